#!/usr/bin/env bash
# sacrebleu 2.6.0, rouge-score 0.1.2, Python 3.11 (2026-11-30).
#
# One would expect a text that equals its reference to have the best score. `corpus_bleu` of answers below four tokens is 0
# (no 4-grams), while `sentence_bleu` of the same is 100; a single long answer in the corpus lifts it to 100. rouge-score
# keeps a to z and digits only: equal Chinese answers score 0, while "-5" for "5", "x < 1" for "x > 1" and "3.14" for "3,
# 14" score 1. It matters where these figures judge short answers or are a reward.
# Seen: "bleu: corpus 0, sentence 100, corpus with a long answer 100; rougeL: equal Chinese 0, wrong ones 1 1 1".
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
python3 -m venv env
env/bin/pip install -q "sacrebleu==2.6.0" "rouge-score==0.1.2"
env/bin/python - <<'PY'
import sacrebleu
from rouge_score import rouge_scorer
short, long = ["The answer is"], ["The capital of France is Paris ."]
corpus, both = (sacrebleu.corpus_bleu(texts, [texts]).score for texts in (short, short + long))
sentence = sacrebleu.sentence_bleu(short[0], short).score
scorer = rouge_scorer.RougeScorer(["rougeL"])
def rouge(answer, said):
    return round(scorer.score(answer, said)["rougeL"].fmeasure)
wrong = " ".join(str(rouge(answer, said)) for answer, said in (("5", "-5"), ("x > 1", "x < 1"), ("3, 14", "3.14")))
seen = f"bleu: corpus {corpus:.0f}, sentence {sentence:.0f}, corpus with a long answer {both:.0f}; "
seen += f"rougeL: equal Chinese {rouge('北京', '北京')}, wrong ones {wrong}"
print(seen)
expected = "bleu: corpus 0, sentence 100, corpus with a long answer 100; rougeL: equal Chinese 0, wrong ones 1 1 1"
raise SystemExit(seen != expected)
PY

"""How similar two texts are, from 0 to 1, by the libraries that define each measure.

| metric | measure |
|---|---|
| `fuzzy_match` | rapidfuzz's `WRatio` over lower-case text without punctuation |
| `bleu` | sacrebleu's sentence BLEU, with its own tokens and smoothing |
| `gleu` | nltk's sentence GLEU over the same tokens |
| `rouge_1` … `rouge_5`, `rouge_l` | F-measure of rouge-score, without stemming; words of any script |

A text that equals the reference is 1 by each of them. They come with `pip install 'motet[graders]'`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping

from motet.rewards.mathematics import UNSPACED

_WORD = re.compile(
    rf"[{UNSPACED}]|(?:[^\W_{UNSPACED}][\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0963\u0981-\u0dff]*)+"
)
ROUGE = {**{f"rouge_{n}": f"rouge{n}" for n in range(1, 6)}, "rouge_l": "rougeL"}
NOT_HAD = {
    "cosine": "it compares embeddings, and this base makes none",
    "meteor": "it needs the WordNet dictionary, which does not come with Motet",
}
"""Metrics that are refused, and why."""


def check_metric(metric: str) -> None:
    """Load a metric's library, so that no answer waits for it. Raises ValueError if it is not supported or not installed."""
    if metric in NOT_HAD:
        raise ValueError(f"{metric!r} is not supported: {NOT_HAD[metric]}. There are {', '.join(_METRICS)}")
    for library in _METRICS[metric][1]:
        try:
            importlib.import_module(library)
        except ImportError as error:
            raise ValueError(
                f"{metric!r} needs {library.partition('.')[0]}, which is not installed here: pip install 'motet[graders]'"
            ) from error


def similarity(metric: str, text: str, reference: str) -> float:
    """How similar a text is to its reference, from 0 to 1, by a metric that passed `check_metric`."""
    if text.strip() and text.strip() == reference.strip():
        return 1.0
    return min(max(_METRICS[metric][0](text, reference), 0.0), 1.0)


def _fuzzy_match(text: str, reference: str) -> float:
    from rapidfuzz import fuzz, utils

    return float(fuzz.WRatio(text, reference, processor=utils.default_process)) / 100


def _bleu(text: str, reference: str) -> float:
    import sacrebleu

    return float(sacrebleu.sentence_bleu(text, [reference]).score) / 100


def _gleu(text: str, reference: str) -> float:
    from nltk.translate.gleu_score import sentence_gleu
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    split = Tokenizer13a()
    return float(sentence_gleu([split(reference).split()], split(text).split()))


class _Words:
    """rouge-score's tokenizer, which knows a to z alone, for all scripts: without spaces each letter is a token."""

    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())


def _rouge(kind: str) -> Callable[[str, str], float]:
    def measure(text: str, reference: str) -> float:
        from rouge_score.rouge_scorer import RougeScorer

        return float(RougeScorer([kind], tokenizer=_Words()).score(reference, text)[kind].fmeasure)

    return measure


_METRICS: Mapping[str, tuple[Callable[[str, str], float], tuple[str, ...]]] = {
    "fuzzy_match": (_fuzzy_match, ("rapidfuzz",)),
    "bleu": (_bleu, ("sacrebleu",)),
    "gleu": (_gleu, ("sacrebleu", "nltk.translate.gleu_score")),
    **{name: (_rouge(kind), ("rouge_score.rouge_scorer",)) for name, kind in ROUGE.items()},
}
"""Measures by name, each with the modules that it needs."""

"""How similar two texts are, from 0 to 1, by the libraries that define each measure.

| metric | measure |
|---|---|
| `fuzzy_match` | rapidfuzz's `WRatio` over lower-case text without punctuation |
| `bleu` | sacrebleu's sentence BLEU, with its own tokens and smoothing |
| `gleu` | nltk's sentence GLEU over the same tokens |
| `rouge_1` … `rouge_5`, `rouge_l` | F-measure of rouge-score, without stemming |

They come with `pip install 'motet[graders]'`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

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


def _rouge(kind: str) -> Callable[[str, str], float]:
    def measure(text: str, reference: str) -> float:
        from rouge_score.rouge_scorer import RougeScorer

        return float(RougeScorer([kind]).score(reference, text)[kind].fmeasure)

    return measure


_METRICS: Mapping[str, tuple[Callable[[str, str], float], tuple[str, ...]]] = {
    "fuzzy_match": (_fuzzy_match, ("rapidfuzz",)),
    "bleu": (_bleu, ("sacrebleu",)),
    "gleu": (_gleu, ("sacrebleu", "nltk.translate.gleu_score")),
    **{name: (_rouge(kind), ("rouge_score.rouge_scorer",)) for name, kind in ROUGE.items()},
}
"""Measures by name, each with the modules that it needs."""

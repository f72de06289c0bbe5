"""The ratios as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence

from bench.speed.measure import Measured

_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}


def draw(results: Sequence[Measured]) -> str:
    """An SVG of how many times faster Motet is; the goals are marks. The same results give the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "motet", "svg.fonttype": "none", "font.family": "sans-serif"}
    from matplotlib import pyplot

    shown = [item for item in results if item.row.compare == "faster" and item.ratio is not None][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.42 * max(len(shown), 1)))
    for place, item in enumerate(shown):
        assert item.ratio is not None
        ratio = item.ratio
        axes.barh(place, ratio.middle, height=0.6, color="#2f6f8f" if item.met is not False else "#b5653b")
        axes.plot([ratio.low, ratio.high], [place, place], color="black", linewidth=1)
        if item.row.goal is not None:
            axes.plot(
                [item.row.goal.bound] * 2, [place - 0.4, place + 0.4], color="black", linestyle=":", linewidth=1.5
            )
        axes.annotate(
            f" {ratio.middle:.1f}×", (max(ratio.middle, ratio.high), place), va="center", fontsize=9, bbox=_WHITE
        )
    axes.set_yticks(range(len(shown)), [_label(item) for item in shown], fontsize=8)
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("times faster (bar; brown: goal not reached), spread of neighbours (line), goal (dots)", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return "\n".join(line.rstrip() for line in picture.getvalue().splitlines()) + "\n"


def _label(item: Measured) -> str:
    against = item.row.against.partition(";")[0]
    return f"{item.row.work}\nagainst {against}"

"""The report, on a run directory written by the runtime's own functions."""

from __future__ import annotations

import json
import math
import random
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from motet.errors import RunError
from motet.report import curves_svg, write_report
from motet.report.figures import COLOURS, SMALL, Chart, device_charts, health_charts, learning_charts
from motet.report.read import MAX_POINTS, Series, read_lines, read_run
from motet.report.svg import ticks
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.metrics import STEP_FIELDS
from tests.run_directory import step_line, write_job, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "evening")


class Page(HTMLParser):
    """Collects what a browser would see: elements with attributes, text outside scripts, and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._inside and tag == self._inside[-1]:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside and self._inside[-1] == "script":
            self.scripts.append(data)
        elif not self._inside:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page(write_report(run).read_text())


# --- the fake run is like a real one -----------------------------------------------------------------------------


def test_fake_lines_have_the_fields_of_the_schema() -> None:
    line = step_line(3, 0.5, random.Random(0)) | {"eval": {}}
    assert set(line) == set(STEP_FIELDS)


# --- the page ----------------------------------------------------------------------------------------------------


def test_one_file_that_asks_the_network_for_nothing(page: Page) -> None:
    assert not [(tag, attrs) for tag, attrs in page.elements if {"src", "href", "srcset"} & set(attrs)]
    assert not [tag for tag, _ in page.elements if tag in ("link", "iframe", "object", "embed", "base")]
    assert len(page.scripts) == 3  # data, plotly.js, ours
    policy = next(
        attrs["content"] for _, attrs in page.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_what_users_and_models_wrote_is_text(page: Page) -> None:
    assert "img" not in {tag for tag, _ in page.elements}
    assert not [attrs for _, attrs in page.elements if any(key.startswith("on") for key in attrs)]
    for told in ("The commonest reason: </script><script>alert", "What is 3 + 41? </script>", "That makes"):
        assert told in page.text
    assert "\x1b" not in page.text


def test_hostile_names_cannot_leave_the_data(tmp_path: Path) -> None:
    name = "a</script><script>alert(1)<b>"
    (tmp_path / name.replace("/", "∕")).mkdir()
    directory = JobDirectory(tmp_path / name.replace("/", "∕"))
    directory.append(directory.metrics, step_line(0, 0.5, random.Random(0)))
    text = write_report(tmp_path).read_text()
    assert "<script>alert(1)" not in text
    page = Page(text)
    assert page.data["jobs"][0]["name"] == directory.path.name
    assert not {"<", ">", "&"} & set(page.scripts[0])
    assert "<script>" not in curves_svg(tmp_path)


def test_summary_says_how_every_job_ended(page: Page) -> None:
    for told in ("✓ succeeded 40/40", "● running 33/60", "✗ failed 9/40", "‖ paused 26/40", "1 succeeded, 1 failed"):
        assert told in page.text
    assert "not exact: a reward ran into its limit" in page.text
    assert "add/versions/v40" in page.text


def test_held_out_before_and_after(page: Page, run: Path) -> None:
    lines = [json.loads(line) for line in (run / "add" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["eval"]["reward"] for line in lines if "eval" in line]
    assert len(rewards) == 5  # versions 0, 10, 20, 30 and, in the line after the last step, 40
    assert f"{rewards[0]:.3f} → {rewards[-1]:.3f} +{rewards[-1] - rewards[0]:.3f}" in page.text


def test_samples_compare_the_same_problems(page: Page, run: Path) -> None:
    first, last = (read_lines(run / "add" / "rollouts" / f"eval-{version}.jsonl") for version in (0, 40))
    record = next(job for job in read_run(run).jobs if job.name == "add")
    assert record.pair_versions == (0, 40)
    assert [pair.before for pair in record.pairs] == list(first[:8])
    assert [pair.after for pair in record.pairs] == list(last[:8])
    for before, after in zip(first[1:8], last[1:8], strict=True):
        written = (" ".join(str(line["completion"]).split()) for line in (before, after))
        assert re.search(".*?after · v40.*?".join(map(re.escape, written)), page.text)
    assert page.text.count("before · v0") == 3 * 8
    assert page.text.count("after · v40") == 8
    assert "the reward raised ValueError: no number" in page.text
    assert "cut off at max_tokens" in page.text


def test_a_job_has_one_colour_in_all_charts(page: Page) -> None:
    names = [job["name"] for job in page.data["jobs"]]
    assert names == ["add", "count_letters", "sort-numbers", "spell-r64-lr0.0003"]
    for chart in page.data["charts"]:
        assert all(curve["job"] is None or names[curve["job"]] == curve["label"] for curve in chart["curves"])
    chips = [attrs for _, attrs in page.elements if attrs.get("class") == "chip"]
    assert [attrs["data-job"] for attrs in chips] == ["0", "1", "2", "3"]
    drawn = {chart["key"] for chart in page.data["charts"] if chart["curves"]}
    assert {str(attrs["id"]) for _, attrs in page.elements if attrs.get("class") == "plot"} == {
        f"plot-{key}" for key in drawn
    }
    assert drawn >= {"reward", "eval", "device", "occupancy", *(field for field, *_ in SMALL)}


def test_small_multiples_show_fields_that_exist() -> None:
    assert {field for field, *_ in SMALL} <= set(STEP_FIELDS)


def test_page_is_deterministic(run: Path) -> None:
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


# --- curves ------------------------------------------------------------------------------------------------------


def curves(charts: tuple[Chart, ...], key: str, job: str) -> dict[str, Series]:
    (chart,) = (chart for chart in charts if chart.key == key)
    return {curve.kind: curve.points for curve in chart.curves if curve.label == job}


def test_curves_hold_what_the_metrics_hold(run: Path) -> None:
    lines = read_lines(run / "add" / "metrics.jsonl")
    found = curves(learning_charts(read_run(run)), "reward", "add")
    assert found["raw"].ys == tuple(line["reward"] for line in lines if "reward" in line)
    assert found["smooth"].xs == found["raw"].xs
    evaluated = curves(learning_charts(read_run(run)), "eval", "add")["markers"]
    assert evaluated.xs == (0, 10, 20, 30, 40)


def test_nulls_are_gaps(run: Path) -> None:
    """What was not measured is not drawn, and no line leads over it."""
    found = curves(learning_charts(read_run(run)), "reward", "count_letters")
    for kind in ("raw", "smooth"):
        assert found[kind].xs == tuple(range(26))
        assert [math.isnan(value) for value in found[kind].ys] == [step % 4 == 1 for step in range(26)]
    sparse = curves(health_charts(read_run(run)), "kl_base", "add")
    assert list(sparse) == ["markers"]
    assert sparse["markers"].xs == tuple(range(0, 40, 5))


def test_steps_without_signal_leave_a_gap(tmp_path: Path) -> None:
    directory = write_job(tmp_path, "add", done=20, steps=20, top=0.9, state="succeeded")
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    for line in lines[8:12]:
        line |= {"entropy": None, "grad_norm": None}
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(write_report(tmp_path).read_text())
    (entropy,) = (chart for chart in page.data["charts"] if chart["key"] == "entropy")
    for curve in entropy["curves"]:
        assert curve["x"] == list(range(20))
        assert [y is None for y in curve["y"]] == [8 <= step < 12 for step in range(20)]


def test_gaps_stay_in_long_curves_and_in_the_picture(tmp_path: Path) -> None:
    long = Series(tuple(map(float, range(10_000))), tuple(math.nan if 2000 <= x < 4000 else 1.0 for x in range(10_000)))
    thinned = long.thinned()
    assert all(math.isnan(y) == (2000 <= x < 4000) for x, y in zip(thinned.xs, thinned.ys, strict=True))
    directory = write_job(tmp_path, "add", done=5, steps=5, top=0.9, state="succeeded", every=0)
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    lines[3]["reward"] = None
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (drawn,) = re.findall(r'<path d="([^"]+)"', curves_svg(tmp_path))
    assert (drawn.count("M"), drawn.count("L")) == (2, 2)  # three points, a gap, and one alone, which is a dot
    assert curves_svg(tmp_path).count("<circle") == 1


def test_a_field_that_never_changes_says_so(tmp_path: Path) -> None:
    write_job(tmp_path, "add", done=5, steps=5, top=0.9, state="succeeded")
    (gap,) = (chart for chart in health_charts(read_run(tmp_path)) if chart.key == "logprob_gap")
    assert gap.flat == "0 throughout"
    assert "0 throughout" in Page(write_report(tmp_path).read_text()).text


def test_device_shares_add_up(run: Path) -> None:
    device, occupancy, tokens = device_charts(read_run(run))
    parts = {curve.label: curve.points for curve in device.curves}
    assert set(parts) == {"decode", "train", "idle"}
    for place in range(len(parts["idle"].ys)):
        assert sum(points.ys[place] for points in parts.values()) == pytest.approx(1.0)
    assert occupancy.curves[0].points.xs == tuple(sorted(occupancy.curves[0].points.xs))
    total = sum(line["tokens_sampled"] + line["tokens_trained"] for line in read_lines(run / "add" / "timings.jsonl"))
    assert curves((tokens,), "tokens", "add")["line"].ys[-1] == total


def test_long_curves_are_thinned_without_losing_their_level() -> None:
    long = Series(tuple(map(float, range(10_000))), tuple(float(x % 2) for x in range(10_000)))
    thinned = long.thinned()
    assert len(thinned.xs) <= MAX_POINTS
    assert sum(thinned.ys) / len(thinned.ys) == pytest.approx(0.5, abs=0.01)
    assert long.smoothed().ys[5000] == pytest.approx(0.5, abs=0.01)


def _linear(colour: str) -> tuple[float, ...]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def _times(matrix: tuple[tuple[float, ...], ...], vector: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def _oklab(colour: tuple[float, ...]) -> tuple[float, ...]:
    """Björn Ottosson's OKLab, of linear RGB."""
    lms = _times(
        ((0.4122, 0.5363, 0.0515), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300)),
        tuple(min(max(part, 0.0), 1.0) for part in colour),
    )
    roots = tuple(part ** (1 / 3) for part in lms)
    return _times(((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087)), roots)


# Machado, Oliveira and Fernandes (2009), severity 1
VISION = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


@pytest.mark.parametrize("vision", VISION)
def test_colours_can_be_told_apart(vision: str) -> None:
    seen = [_oklab(_times(VISION[vision], _linear(colour))) for colour in COLOURS]
    assert min(math.dist(a, b) for place, a in enumerate(seen) for b in seen[:place]) > 0.09


# --- what may be missing or broken -------------------------------------------------------------------------------


def _nothing(directory: JobDirectory) -> None:
    for path in (directory.metrics, directory.timings, *(directory.path / "rollouts").iterdir()):
        path.unlink()


def _half_a_line(directory: JobDirectory) -> None:
    with directory.metrics.open("ab") as file:
        file.write(b'{"step": 99, "reward": 0.')


def _garbage(directory: JobDirectory) -> None:
    lines = [
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"null",
        b'{"step": "x", "reward": "y", "eval": 3, "device": []}',
        b"{}",
        b"1e999",
    ]
    for path in (directory.metrics, directory.timings, directory.path / "rollouts" / "eval-0.jsonl"):
        path.write_bytes(b"\n".join([*lines, b'{"step": 1, "time": 1e400, "reward": ' + b"9" * 400 + b"}", b""]))
    (directory.path / "status.json").write_text("{")
    (directory.path / "job.yaml").write_text("{: [")


@pytest.mark.parametrize("damage", [_nothing, _half_a_line, _garbage], ids=lambda damage: damage.__name__)
def test_broken_files_do_not_break_the_report(damage: Any, tmp_path: Path) -> None:
    damage(write_job(tmp_path, "add", done=5, steps=5, top=0.9, state="succeeded"))
    write_job(tmp_path, "whole", done=5, steps=5, top=0.9, state="succeeded")
    page = Page(write_report(tmp_path).read_text())
    assert [job["name"] for job in page.data["jobs"]] == ["add", "whole"]
    assert curves(learning_charts(read_run(tmp_path)), "reward", "whole")["line"].xs == (0, 1, 2, 3, 4)


def test_a_line_being_written_does_not_count_yet(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}')
    assert read_lines(path) == ({"step": 0},)


def test_a_job_without_steps(tmp_path: Path) -> None:
    write_job(tmp_path, "add", done=0, steps=5, top=0.9, state="queued", every=0)
    text = Page(write_report(tmp_path).read_text()).text
    assert "○ queued 0/5" in text
    assert text.count("no data yet") >= 11


def test_a_directory_without_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no jobs"):
        write_report(tmp_path)


# --- the static picture ------------------------------------------------------------------------------------------


def test_picture_is_svg_with_a_line_for_every_job(run: Path) -> None:
    picture = curves_svg(run)
    assert (run / "report.svg").read_text() == picture
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    strokes = [path.get("stroke") for path in root.iter(f"{space}path")]
    assert strokes.count(COLOURS[0]) == 3  # reward raw and smooth, evaluations
    assert strokes.count(COLOURS[1]) == 2  # no evaluations
    words = [text.text for text in root.iter(f"{space}text")]
    assert {"add", "sort-numbers", "Training reward", "Held-out reward"} <= set(words)
    assert not re.search(r"(?<!xmlns=\")http", picture)
    height = float(str(root.get("viewBox")).split()[3])
    assert all(float(str(text.get("y"))) < height for text in root.iter(f"{space}text"))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.1, 0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0.5, 0.5, [0, 0.25, 0.5, 0.75, 1.0]), (-3, 4, [-4, -2, 0, 2, 4])],
)
def test_ticks_are_round_and_cover(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == pytest.approx(expected)

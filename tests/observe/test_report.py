"""The report, on a run directory written by the runtime's own functions."""

from __future__ import annotations

import json
import math
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from motet.core.errors import RunError
from motet.observe.report import curves_svg, write_report
from motet.observe.report.comparison import evaluated as evaluated_job
from motet.observe.report.comparison import mean_curves, side_of_job
from motet.observe.report.read import MAX_POINTS, Series, read_lines, read_run
from motet.observe.report.svg import COLOURS, Curves, draw_curves, ticks
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.metrics import STEP_FIELDS
from tests.support.commands import Motet
from tests.support.run_directory import step_line, write_job, write_run

pytestmark = pytest.mark.tier1


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

    def job(self, name: str) -> dict[str, Any]:
        """Of the data."""
        (found,) = (job for job in self.data["jobs"] if job["name"] == name)
        return dict(found)


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page(write_report(run).read_text())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real one; each report is shown in a session of its own."""
    pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    from tests.support.browser import CHROMIUM, browsing

    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt install chromium")
    with browsing() as opened:
        yield opened


def shown(browser: Any, report: Path, text: str = "", modifiers: Any = (), **settings: Any) -> str:
    """What a browser shows of a report, once it has drawn; it must ask for nothing and tell no error.

    Args:
        browser: a real one.
        report: the file.
        text: of the buttons that are pressed, with commas between.
        modifiers: keys that are held meanwhile.
        settings: of the browser's context.
    """
    from tests.support.browser import watched

    with watched(browser, report.as_uri(), **settings) as opened:
        opened.goto(report.as_uri())
        opened.locator("figure .scatterlayer .trace, figure[data-points='0']").first.wait_for()
        opened.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        for name in filter(None, text.split(",")):
            opened.get_by_role("button", name=name, exact=True).click(modifiers=modifiers)
        opened.wait_for_timeout(600 if text else 0)
        assert opened.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, "nothing to scroll sideways"
        assert opened.locator("main img, main script").count() == 0
        found = opened.locator("main").inner_text()
        points = """each => each.map(one => `${one.querySelector('h3').textContent}=${one.dataset.points}`
            + ` ${one.querySelector('h3').textContent} now ${one.querySelector('.latest')?.textContent}`)"""
        return " ".join([*found.split(), *opened.locator("figure").evaluate_all(points)])


# --- the fake run is like a real one -----------------------------------------------------------------------------


def test_fake_lines_have_the_fields_of_the_schema() -> None:
    line = step_line(3, 0.5, random.Random(0)) | {"eval": {}}
    of_few = {"value_loss", "value_explained", "accuracy", "margin", "roles", "reward_metrics", "unread"}
    assert set(line) == set(STEP_FIELDS) - of_few, "those are of few algorithms, rewards and bases"


# --- the page ----------------------------------------------------------------------------------------------------


def test_one_file_that_asks_the_network_for_nothing(page: Page) -> None:
    assert not [(tag, attrs) for tag, attrs in page.elements if {"src", "href", "srcset"} & set(attrs)]
    assert not [tag for tag, _ in page.elements if tag in ("link", "iframe", "object", "embed", "base")]
    assert "\\u001b" not in page.scripts[0]
    assert len(page.scripts) == 3  # data, plotly.js, ours
    assert not re.search(r"^(import|export) ", page.scripts[2], re.M)
    policy = next(
        attrs["content"] for _, attrs in page.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_without_scripts_the_curves_are_there(page: Page) -> None:
    tags = [tag for tag, _ in page.elements]
    assert tags.index("noscript") < tags.index("svg")
    assert "need JavaScript" in page.text


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


def test_held_out_before_and_after(page: Page, run: Path) -> None:
    lines = [json.loads(line) for line in (run / "add" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["eval"]["reward"] for line in lines if "eval" in line]
    assert len(rewards) == 5  # versions 0, 10, 20, 30 and, in the line after the last step, 40
    assert page.job("add")["evaluations"] == rewards


def test_samples_compare_the_same_problems(page: Page, run: Path) -> None:
    first, last = (read_lines(run / "add" / "rollouts" / f"eval-{version}.jsonl") for version in (0, 40))
    found = page.job("add")
    assert found["versions"] == [0, 40]
    for side, lines in (("before", first[:8]), ("after", last[:8])):
        assert [pair[side]["turns"] for pair in found["pairs"]] == [
            [line["completion"].replace("\x1b", "")] for line in lines
        ]
        assert [pair[side]["reward"] for pair in found["pairs"]] == [line["reward"] for line in lines]


def test_the_best_version_is_one_that_is_kept(tmp_path: Path) -> None:
    """Versions between are pruned; the adapter that is named is the one whose figure is told."""
    directory = write_job(tmp_path, "add", done=20, steps=20, top=0.5, state="succeeded", every=5)
    values = {0: 0.2, 5: 0.9, 10: 0.1, 15: 0.3, 20: 0.25}
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    for line in lines:
        if "eval" in line:
            line["eval"]["reward"] = values[line["step"]]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory.path / "versions" / "v15").mkdir()
    found = Page(write_report(tmp_path).read_text()).job("add")
    assert (found["best"], found["best_figure"], found["adapter"]) == (15, 0.3, "add/versions/v15")


def test_preferences_are_measured_by_their_accuracy(tmp_path: Path, says: Motet) -> None:
    """`dpo` and `kto` have neither a held-out reward nor a likelihood of held-out answers."""
    for name, gain in (("first", 0.0), ("second", 0.125)):
        directory = write_job(tmp_path, name, done=10, steps=10, top=0.5, state="succeeded", every=5)
        values = {0: 0.5, 5: 0.75 + gain, 10: 0.625}
        lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
        for line in lines:
            if "eval" in line:
                line["eval"] = {"loss": 0.6, "accuracy": values[line["step"]], "margin": 0.1, "rows": 8}
        directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for version in (5, 10):
            (directory.path / "versions" / f"v{version}").mkdir(exist_ok=True)
    found = Page(write_report(tmp_path).read_text()).job("second")
    assert (found["best"], found["best_figure"], found["adapter"]) == (5, 0.875, "second/versions/v5")
    assert found["evaluations"] == [0.5, 0.875, 0.625]
    code, out, _ = says("compare", tmp_path / "first", tmp_path / "second")
    assert code == 0
    assert "0.625" in out


def test_jobs_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["a2", "a10", "b-lr=1e-05", "b-lr=0.0001-c=0", "b-lr=0.0001-c=0.02", "b-lr=0.0001-c=0.1", "b-lr=0.001"]
    names += ["c-v1.9", "c-v1.10"]
    for name in reversed(names):
        write_job(tmp_path, name, done=1, steps=1, top=0.5, state="succeeded")
    assert [job.name for job in read_run(tmp_path).jobs] == names


def test_page_is_deterministic(run: Path) -> None:
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_without_a_network(run: Path, browser: Any, scheme: str) -> None:
    """On a desk and on a phone; what users and models wrote is text."""
    viewport = {"width": 360, "height": 740} if scheme == "dark" else {"width": 1280, "height": 900}
    text = shown(browser, write_report(run), viewport=viewport, color_scheme=scheme)
    for part in ("succeeded", "40/40", "33/60", "9/40", "26/40", "1 succeeded", "1 failed", "add/versions/v40"):
        assert part in text
    for part in (
        "The commonest reason: </script><script>alert", "What is 3 + 41? </script>", "That makes",
        "not exact: a reward ran into its limit", "the reward raised ValueError: no number", "cut off at max_tokens",
    ):  # fmt: skip
        assert part in text
    values = read_run(run).jobs[0].evaluations.ys
    assert f"{values[0]:.3f} → {values[-1]:.3f} +{values[-1] - values[0]:.3f}" in text
    assert (text.count("before · v0"), text.count("after · v40")) == (3 * 8, 8)
    for title in ("Training reward", "Held-out reward", "Entropy", "Device time", "Occupancy", "Tokens"):
        assert re.search(rf"{title}=[1-9]", text), title


@pytest.mark.slow
def test_figures_of_any_size_are_read_on_a_narrow_phone(tmp_path: Path, browser: Any) -> None:
    for name, factor in (("huge", -3e6), ("tiny", 2e-6)):
        metrics = write_job(tmp_path, name, done=11, steps=11, top=0.5, state="succeeded").metrics
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        for line in lines:
            if "eval" in line:
                line["eval"]["reward"] = factor * (line["step"] + 1)
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = shown(browser, write_report(tmp_path), viewport={"width": 320, "height": 700})
    assert "−3.0e6 → −3.6e7 −3.3e7" in text
    assert "2.0e−6 → 2.4e−5 +2.2e−5" in text


@pytest.mark.slow
def test_a_job_is_hidden_in_all_charts_at_once(run: Path, browser: Any) -> None:
    def points(text: str) -> dict[str, int]:
        return {title: int(number) for title, number in re.findall(r"(\w+)=(\d+)", text)}

    report = write_report(run)
    before, after = points(shown(browser, report)), points(shown(browser, report, "add"))
    assert all(after[title] < before[title] for title in ("Length", "Entropy", "Tokens"))
    assert after["Occupancy"] == before["Occupancy"]
    assert "parts" not in before
    shifted = shown(browser, report, "add", ["Shift"])
    alone = points(shifted)
    assert alone["Length"] == before["Length"] - after["Length"] == 40
    assert alone["parts"] > 40
    assert re.search(r"Held-out reward now \d", shifted)
    assert re.search(r"Held-out reward now +Length", shown(browser, report, "spell-r64-lr0.0003,count_letters")), (
        "of two jobs, no one's value is the chart's"
    )


SHOWN = """() => Object.fromEntries([...document.querySelectorAll('figure')].filter(one => one.offsetParent).map(one => [
    one.querySelector('h3').textContent, {
        bars: one.querySelectorAll('.errorbar').length,
        low: one.querySelector('.plot').layout?.yaxis.range[0], high: one.querySelector('.plot').layout?.yaxis.range[1],
    }]))"""
"""What is seen of each chart."""


@pytest.mark.slow
def test_charts_show_parts_of_all_jobs_intervals_and_no_noise(tmp_path: Path, browser: Any) -> None:
    from tests.support.browser import watched

    for name in ("first", "second"):
        directory = write_job(tmp_path, name, done=20, steps=20, top=0.5, state="succeeded", every=5)
        lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
        for line in lines:
            line |= {"reward": 0.5 + line["step"] / 1e5, "clip_fraction": 0.0}
        directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = write_report(tmp_path)
    with watched(browser, report.as_uri()) as opened:
        opened.goto(report.as_uri())
        opened.locator("figure .scatterlayer .trace").first.wait_for()
        opened.wait_for_timeout(1000)
        several = opened.evaluate(SHOWN)
        opened.get_by_role("button", name="second", exact=True).click()
        opened.wait_for_timeout(1000)
        alone = opened.evaluate(SHOWN)
    assert {"Reward part exact", "Reward part length"} <= several.keys()
    assert "Reward parts" not in several
    assert "Reward parts" in alone
    assert not [title for title in alone if title.startswith("Reward part ")]
    assert "Clipped" not in several, "it is 0 throughout"
    assert several["Held-out reward"]["bars"] == 2 * 5
    assert several["Training reward"]["low"] == 0
    assert several["Training reward"]["high"] > 0.5
    assert several["Held-out reward"]["low"] <= 0


# --- curves ------------------------------------------------------------------------------------------------------


def test_curves_hold_what_the_metrics_hold(run: Path, page: Page) -> None:
    lines = read_lines(run / "add" / "metrics.jsonl")
    found = page.job("add")["series"]
    assert found["reward"]["x"] == [line["step"] for line in lines if "reward" in line]
    assert found["reward"]["y"] == pytest.approx([line["reward"] for line in lines if "reward" in line], rel=1e-4)
    assert found["eval/reward"]["x"] == [0, 10, 20, 30, 40]
    assert {"reward_parts/exact", "eval/reward_parts/exact"} <= set(found)


def test_charts_show_fields_that_exist() -> None:
    text = (resources.files("motet.service") / "dashboard/curves.js").read_text("utf-8")
    fields = re.findall(r'^  \["(\w+)", "[A-Z]', text, re.M)
    assert len(fields) > 10
    assert set(fields) <= set(STEP_FIELDS)


def test_nulls_are_gaps(run: Path) -> None:
    """What was not measured is not drawn, and no line leads over it."""
    record = next(job for job in read_run(run).jobs if job.name == "count_letters")
    found = record.columns["reward"]
    assert found.xs == tuple(range(26))
    assert [math.isnan(value) for value in found.ys] == [step % 4 == 1 for step in range(26)]
    drawn = Page(write_report(run).read_text()).job("count_letters")["series"]["reward"]
    assert [y is None for y in drawn["y"]] == [step % 4 == 1 for step in range(26)]


def test_gaps_stay_in_long_curves_and_in_the_picture(tmp_path: Path) -> None:
    long = Series(tuple(map(float, range(10_000))), tuple(math.nan if 2000 <= x < 4000 else 1.0 for x in range(10_000)))
    thinned = long.thinned()
    for x, y in zip(thinned.xs, thinned.ys, strict=True):
        assert math.isnan(y) == (2000 <= x < 4000)
    directory = write_job(tmp_path, "add", done=5, steps=5, top=0.9, state="succeeded", every=0)
    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    lines[3]["reward"] = None
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (drawn,) = re.findall(r'<path d="([^"]+)"', curves_svg(tmp_path))
    assert (drawn.count("M"), drawn.count("L")) == (2, 2)  # three points, a gap, and one alone, which is a dot
    assert curves_svg(tmp_path).count("<circle") == 1


def test_device_shares_add_up(run: Path) -> None:
    found = read_run(run)
    parts = found.device()
    occupancy = parts.pop("occupancy")
    assert set(parts) == {"decode", "train", "idle"}
    for place in range(len(parts["idle"].ys)):
        assert sum(points.ys[place] for points in parts.values()) == pytest.approx(1.0)
    assert occupancy.xs == tuple(sorted(occupancy.xs))
    total = sum(line["tokens_sampled"] + line["tokens_trained"] for line in read_lines(run / "add" / "timings.jsonl"))
    assert found.jobs[0].used(found.start).ys[-1] == found.jobs[0].tokens == total


def test_long_curves_are_thinned_without_losing_their_level() -> None:
    long = Series(tuple(map(float, range(10_000))), tuple(float(x % 2) for x in range(10_000)))
    thinned = long.thinned()
    assert len(thinned.xs) <= MAX_POINTS
    assert sum(thinned.ys) / len(thinned.ys) == pytest.approx(0.5, abs=0.03)


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
    assert page.job("whole")["series"]["reward"]["x"] == [0, 1, 2, 3, 4]


def test_a_line_being_written_does_not_count_yet(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}')
    assert read_lines(path) == ({"step": 0},)


@pytest.mark.slow
def test_a_job_without_steps_and_one_of_garbage(tmp_path: Path, browser: Any) -> None:
    write_job(tmp_path, "add", done=0, steps=5, top=0.9, state="queued", every=0)
    _garbage(write_job(tmp_path, "broken", done=5, steps=5, top=0.9, state="succeeded"))
    text = shown(browser, write_report(tmp_path))
    assert "queued 0/5" in text
    assert "Entropy=0" in text


def test_a_directory_without_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no jobs"):
        write_report(tmp_path)


# --- the static picture ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluated", "told"),
    [
        ([{"reward": 0.5}], "reward"),
        ([{"accuracy": 0.5, "loss": 0.7}], "accuracy"),
        ([{"nll": 2.0}], "log-lik"),
        ([{"reward": 0.5}, {"accuracy": 0.5, "loss": 0.7}], "reward and accuracy"),
        ([{}], "reward"),
    ],
)
def test_a_picture_names_the_figure_that_it_shows(tmp_path: Path, evaluated: list[dict[str, float]], told: str) -> None:
    for number, figures in enumerate(evaluated):
        (place := tmp_path / f"run/job-{number}").mkdir(parents=True)
        (place / "job.yaml").write_text("base: small\njob: {steps: 1}\n")
        (place / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": 0.1, "eval": figures}) + "\n")
    jobs = read_run(tmp_path / "run").jobs
    sides = [side_of_job(one.name, evaluated_job(one, ())) for one in jobs if one.evaluations.xs]
    for picture in (curves_svg(tmp_path / "run"), draw_curves([mean_curves(side) for side in sides])):
        assert re.findall(r">(Held-out [^<]+)<", picture) == [f"Held-out {told}"]
        assert f"<title>Training reward and held-out {told} of" in picture


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


def test_held_out_points_of_the_picture_have_intervals(tmp_path: Path) -> None:
    evaluated = {
        "rewarded": [{"reward": 0.5, "reward_stderr": 0.25}, {"reward": 0.9, "reward_stderr": 0.1}, {"reward": 0.4}],
        "paired": [{"accuracy": 0.5, "loss": 0.7, "rows": 100}],
        "likely": [{"nll": 2.0}],
    }
    for name, figures in evaluated.items():
        (place := tmp_path / name).mkdir(parents=True)
        (place / "job.yaml").write_text("base: small\njob: {steps: 1}\n")
        (place / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": at, "loss": 0.1, "eval": line}) + "\n" for at, line in enumerate(figures))
        )
    jobs = {job.name: job for job in read_run(tmp_path).jobs}
    assert jobs["rewarded"].intervals == {0: 0.5, 1: 0.2}
    assert jobs["paired"].intervals == {0: pytest.approx(0.1)}
    assert jobs["likely"].intervals == {}
    picture = curves_svg(tmp_path)
    bars = [
        COLOURS.index(colour) for colour in re.findall(r'<line x1=[^>]+ y2="[\d.]+" stroke="(#[0-9a-f]+)"/>', picture)
    ]
    assert sorted(bars) == [1, 2, 2]
    assert "by version; bars: 95 % intervals" in picture
    dots = [float(y) for y in re.findall(rf'cy="([\d.]+)" r="3.6" fill="{COLOURS[2]}"', picture)]
    ends = re.findall(rf'y1="([\d.]+)" y2="([\d.]+)" stroke="{COLOURS[2]}"/>', picture)
    assert [(float(low) + float(high)) / 2 for low, high in ends] == pytest.approx(dots[:2], abs=0.1)
    assert min(float(high) for _, high in ends) >= 58, "the axis holds the bars"


def test_an_axis_does_not_follow_noise() -> None:
    noise = Series(tuple(map(float, range(20))), tuple(0.5 + step % 3 / 1e4 for step in range(20)))
    tiny = Series(noise.xs, tuple(step % 3 / 1e4 for step in range(20)))
    for curve, last in ((noise, "0.6"), (tiny, "0.1")):
        shown = re.findall(r">(-?[\d.]+)</text>", draw_curves([Curves("a", curve, curve, "reward")]))
        assert {"0", last} <= set(shown), shown


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.1, 0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0.5, 0.5, [0, 0.25, 0.5, 0.75, 1.0]), (-3, 4, [-4, -2, 0, 2, 4])],
)
def test_ticks_are_round_and_cover(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 5) == pytest.approx(expected)

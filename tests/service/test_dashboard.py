"""The dashboard in a real Chromium, against a real `motet serve` with keys: watch, steer, talk, on a phone, by keyboard."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
from playwright.sync_api import Browser, Page, Route, expect

from motet.core.types import ADAPTER_FILES
from tests.support.browser import CHROMIUM, PATIENCE, browsing, watched
from tests.support.cases import few
from tests.support.commands import rows_in
from tests.support.misbehaving_rewards import Scorer, misbehaving
from tests.support.red_team_work import ENDLESS
from tests.support.scripted_service import scripted_service
from tests.support.service_run import Json, Service, tiny
from tests.support.speaking_bases import SPEAKERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]
expect.set_options(timeout=PATIENCE)

LONG = 400
"""Steps of jobs that something happens to meanwhile."""
CONFIG = """
engine: {samplers: 0, threads: 1}
reward_hosts: ['127.0.0.1:*']
"""
COVERED = """() => [...document.querySelectorAll('figure')].flatMap(figure => {
    const boxes = query => [...figure.querySelectorAll(query)].map(one => one.getBoundingClientRect());
    const marks = boxes('.points path');
    return boxes('.ytick text, .xtick text').filter(text => marks.some(mark =>
        mark.left < text.right && text.left < mark.right && mark.top < text.bottom && text.top < mark.bottom));
}).length"""
"""How many numbers of axes a mark covers."""
HOSTILE = '<img src=x onerror="window.hacked=1"><b>bold</b>'
LOST = (
    "ERR_CONNECTION_REFUSED",
    "ERR_INCOMPLETE_CHUNKED_ENCODING",
    "ERR_CONNECTION_RESET",
    "ERR_EMPTY_RESPONSE",
    "503",
)


class Keyed(Service):
    """A service that asks for keys; what is asked through it is asked with the admin's."""

    def __init__(self, directory: Path, scorer: Scorer) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "serve.yaml").write_text(CONFIG)
        super().__init__(directory, "--config", str(directory / "serve.yaml"), keys=True)
        self.keys: dict[str, str] = {}
        self._scorer = scorer

    def open(self) -> None:
        """Start it and make a key for two tenants."""
        self.start()
        self.become(self.admin_key)
        self.keys = {"admin": self.admin_key}
        for tenant in ("us", "them"):
            self.keys[tenant] = self.key_for(tenant)
        self.become(self.keys["us"])

    def long(self, name: str) -> Json:
        """A job that something happens to meanwhile: it waits for its rewards, so its steps leave the machine to the page."""
        return tiny(name, LONG, reward={"name": "http", "args": {"url": self._scorer.url("wait")}})


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    """An address that takes its time."""
    with misbehaving() as found:
        yield found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, scorer: Scorer) -> Iterator[Keyed]:
    """One for the whole file, with a job that has ended; what it wrote is then made hostile."""
    found = Keyed(tmp_path_factory.mktemp("dashboard"), scorer)
    try:
        found.open()
        found.submit(tiny("ended", 6, eval={"every": 3}, reward=["exact", {"name": "contains", "weight": 0.5}]))
        assert found.ended("ended") == "succeeded"
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for the whole file."""
    with browsing() as found:
        yield found


@pytest.fixture
def page(service: Keyed, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page on which `us` has signed in; a parameter is a status that the test expects to see refused."""
    with watched(browser, service.url, expected=(getattr(request, "param", "nothing"),)) as found:
        log_in(found, service)
        yield found


def log_in(page: Page, service: Keyed, who: str = "us") -> None:
    page.goto(service.url)
    page.get_by_label("API key").fill(service.keys[who])
    page.get_by_role("button", name="Sign in with this key").click()
    page.get_by_role("heading", name="Jobs").first.wait_for(state="attached")


def open_job(page: Page, name: str, tab: str = "Curves") -> None:
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    page.get_by_role("tab", name=tab).click()


def points(page: Page, title: str) -> int:
    """Of a chart, as it is drawn now."""
    return int(chart(page, title).get_attribute("data-points") or 0)


def chart(page: Page, title: str) -> Any:
    return page.locator("figure", has=page.get_by_role("heading", name=title, exact=True))


def wait(page: Page, condition: str) -> None:
    page.wait_for_function(condition, timeout=PATIENCE)


def grows(page: Page, title: str, beyond: int) -> None:
    """Wait until a chart has more points, drawn."""
    figure = chart(page, title)
    expect(figure.locator(".scatterlayer .trace").first).to_be_attached()
    expect(figure).to_have_attribute("data-points", re.compile(rf"^(?!({'|'.join(map(str, range(beyond + 1)))})$)\d+$"))


# --- who asks ---------------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_told_and_a_good_one_stays_in_the_tab(service: Keyed, browser: Browser) -> None:
    with watched(browser, service.url, expected=("401",)) as page:
        page.goto(service.url)
        page.get_by_label("API key").fill("mk-wrong")
        page.get_by_role("button", name="Sign in with this key").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown, revoked or expired")
        expect(page.get_by_label("API key")).to_be_focused()
        log_in(page, service)
        page.reload()
        expect(page.get_by_role("link", name="ended", exact=True)).to_be_visible()
        assert "mk-" not in page.url
        kept = page.evaluate("[Object.values({...sessionStorage}), Object.keys(localStorage), document.cookie]")
        assert kept == [[service.keys["us"]], [], ""]
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_have_value("")
        assert page.evaluate("Object.keys(sessionStorage)") == []
        page.reload()
        expect(page.get_by_label("API key")).to_be_visible()


def test_idle_time_keeps_its_name_among_many_jobs(service: Keyed, browser: Browser) -> None:
    lines = [
        {"kind": "job", "job": f"job-{n}", "name": "sort", "tenant": f"t{n}", "device_seconds": 20 - n}
        for n in range(12)
    ]
    idle = {"kind": "idle", "device_seconds": 100}
    with watched(browser, service.url) as page:
        page.route("**/v1/usage?*", lambda route: route.fulfill(json={"data": [*lines, idle]}))
        log_in(page, service, "admin")
        keys = page.locator("section", has_text="Device time").locator(".keys span")
        expect(keys.first).to_have_text("t0/sort 20 s, 7 %")
        expect(keys.filter(has_text="others")).to_have_text("others 19 s, 7 %")
        expect(keys.last).to_have_text("idle 1 min, 36 %")


def test_a_narrow_phone_shows_the_whole_bar_and_the_chosen_tab(service: Keyed, browser: Browser) -> None:
    with watched(browser, service.url, viewport={"width": 320, "height": 700}) as page:
        log_in(page, service)
        assert page.evaluate("document.documentElement.scrollWidth") == 320
        open_job(page, "ended")
        page.evaluate("location.hash += '/events'")
        page.reload()
        expect(page.get_by_role("tab", name="Events")).to_be_in_viewport(ratio=0.9)


def test_tenants_see_their_own_jobs_and_an_admin_all(service: Keyed, browser: Browser) -> None:
    with watched(browser, service.url) as page:
        log_in(page, service, "them")
        expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
        expect(page.locator("main")).to_contain_text("motet submit jobs.yaml")
    with watched(browser, service.url) as page:
        log_in(page, service, "admin")
        row = page.get_by_role("row", name="ended")
        expect(row.locator("[data-label=tenant]")).to_have_text("us")


def test_a_colleague_sees_who_submitted_a_job_and_no_buttons_for_it(service: Keyed, browser: Browser) -> None:
    whose = service.job("ended")["submitter"]
    service.become(service.admin_key)
    service.keys["colleague"] = service.key_for("us")
    service.become(service.keys["us"])
    for who, buttons in (("colleague", []), ("us", ["Delete"])):
        with watched(browser, service.url) as page:
            log_in(page, service, who)
            expect(page.get_by_role("row", name="ended").locator("[data-label=by]")).to_have_text(whose)
            open_job(page, "ended", "Events")
            expect(page.locator("main")).to_contain_text(f"by {whose}")
            expect(page.locator(".happened")).to_contain_text(f"submitted by {whose}")
            expect(page.locator(".title button:visible")).to_have_text(["Download", *buttons])


# --- a job's life -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["400"], indirect=True)
def test_a_job_is_written_watched_paused_resumed_and_cancelled(service: Keyed, page: Page) -> None:
    page.get_by_role("link", name="New job").click()
    editor = page.get_by_label("Job, or job file")
    editor.fill(json.dumps({**service.long("watched"), "optimizer": {"rate": 1}}))
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("alert").first).to_contain_text("optimizer.rate")
    expect(editor).to_have_attribute("aria-invalid", "true")
    editor.fill(json.dumps(service.long("watched")))
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("watched")
    page.evaluate("window.same = true")
    grows(page, "Training reward", 2)
    seen = points(page, "Training reward")
    grows(page, "Training reward", seen)
    grows(page, "Entropy", 2)
    state = page.locator(".facts .state")
    page.get_by_role("button", name="Pause").click()
    expect(state).to_have_text("paused")
    assert service.job("watched")["state"] == "paused"
    page.get_by_role("button", name="Resume").click()
    grows(page, "Training reward", points(page, "Training reward"))
    assert service.job("watched")["state"] == "running"
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Keep it").click()
    assert service.job("watched")["state"] == "running"
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(state).to_have_text("cancelled")
    assert service.ended("watched") == "cancelled"
    page.get_by_role("tab", name="Events").click()
    expect(page.locator(".happened li").first).to_contain_text("cancelled")
    told = [one for one in service.events("watched") if one["kind"] == "state"]
    expect(page.locator(".happened .state")).to_have_count(len(told))
    assert page.evaluate("window.same")  # nothing was loaded again
    page.get_by_role("tab", name="Curves").click()
    assert_complete(service, page, "watched")


def test_an_answer_that_comes_late_does_not_undo_what_was_told_since(service: Keyed, page: Page) -> None:
    def late(route: Route) -> None:
        answer = route.fetch()
        expect(page.locator(".facts")).to_contain_text(re.compile("^paused"))  # it has heard of it
        route.fulfill(response=answer)

    service.submit(service.long("late"))
    open_job(page, "late")
    grows(page, "Entropy", 1)
    page.route("**/pause", late)
    with page.expect_response("**/pause"):
        page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(300)
    assert page.locator(".facts").inner_text().startswith("paused")  # at once: later it would be asked for again
    service.steer("late", "cancel")


def test_steps_that_come_while_the_page_loads_are_there(service: Keyed, page: Page) -> None:
    def late(route: Route) -> None:
        answer = route.fetch()
        service.reaches("slowly", answer.json()["data"][-1]["step"] + 4)
        route.fulfill(response=answer)

    service.submit(service.long("slowly"))
    service.reaches("slowly", 2)
    page.route("**/steps?points=*", late)
    open_job(page, "slowly")
    grows(page, "Length", 4)
    service.steer("slowly", "cancel")
    expect(page.locator(".facts .state")).to_have_text("cancelled")
    assert_complete(service, page, "slowly")


def assert_complete(service: Keyed, page: Page, name: str) -> None:
    """The curves have every step once."""
    steps = [line["step"] for line in service.ask("GET", f"/v1/jobs/{name}/steps")["data"] if "reward" in line]
    expect(chart(page, "Length")).to_have_attribute("data-points", str(len(steps)))


def test_the_overview_shows_jobs_as_they_learn(service: Keyed, page: Page) -> None:
    service.submit(service.long("shown"))
    row = page.get_by_role("row", name="shown")
    expect(row.locator(".state")).to_have_text("running")
    grows(page, "Training reward", 8)
    grows(page, "Training reward", points(page, "Training reward"))
    expect(row.locator("[data-label=reward]")).to_have_text(re.compile(r"^[\d.]+$"))
    page.get_by_role("button", name=re.compile("^cancelled|^succeeded")).first.click()
    expect(page.get_by_role("link", name="shown", exact=True)).to_have_count(0)
    page.get_by_role("button", name=re.compile("^running")).click()
    expect(page.get_by_role("link", name="shown", exact=True)).to_be_visible()
    page.get_by_role("button", name=re.compile("^all")).click()
    before = points(page, "Training reward")
    service.steer("shown", "cancel")
    expect(row.locator(".state")).to_have_text("cancelled")
    page.get_by_role("button", name="Show shown in the chart").click()
    expect(page.get_by_role("button", name="Show shown in the chart")).to_have_attribute("aria-pressed", "false")
    assert points(page, "Training reward") < before


def test_what_a_job_came_to_on_held_out_problems_is_on_both_pages(service: Keyed, page: Page) -> None:
    lines = service.ask("GET", "/v1/jobs/ended/steps")["data"]
    held_out = {line["step"]: line["eval"]["reward"] for line in lines if "eval" in line}
    best = max((version for version in held_out if version), key=lambda version: (held_out[version], -version))
    row = page.get_by_role("row", name="ended")
    number = r"[\d.]+"
    expect(row.locator("[data-label=held-out]")).to_have_text(re.compile(rf"^reward {number}$"))
    assert float(row.locator("[data-label=held-out]").inner_text().removeprefix("reward ")) == pytest.approx(
        held_out[6], abs=0.005
    )
    expect(row.locator("[data-label=best]")).to_have_text(re.compile(rf"^v{best} · {number}$"))
    open_job(page, "ended")
    expect(page.locator(".facts")).to_contain_text(
        re.compile(rf"held-out reward {number} \(v6\).*· training reward {number}")
    )


@pytest.mark.parametrize(("best_by", "older"), [("", True), ("accuracy, then loss", False)])
def test_a_held_out_figure_has_its_name_and_an_older_rule_is_told(page: Page, best_by: str, older: bool) -> None:
    """Pairs have an accuracy. The job of an earlier release chose its best version by another figure."""
    held_out = {"figure": "accuracy", "version": 6, "value": 0.75, "best_version": 3, "best": 0.5, "best_by": best_by}

    def of_pairs(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        for one in body.get("data", [body]):
            if "held_out" in one:
                one["held_out"] = held_out
            elif "eval" in one.get("data", {}):
                one["data"]["eval"] = {"accuracy": 0.25, "loss": 0.5} if one["data"]["step"] else {"nll": 2.5}
        route.fulfill(response=answer, json=body)

    page.route(re.compile(r"/v1/jobs(/[^/?]+(/events)?)?(\?.*)?$"), of_pairs)
    open_job(page, "ended", "Events")
    expect(page.locator(".happened")).to_contain_text(re.compile(r"held-out accuracy 0\.25.*held-out NLL 2\.5"))
    facts = page.locator(".facts")
    expect(facts).to_contain_text("held-out accuracy 0.75 (v6), best 0.5 (v3)")
    told = "chosen by held-out loss, the rule of the release that began the job"
    (expect(facts).to_contain_text if older else expect(facts).not_to_contain_text)(told)
    page.unroute_all(behavior="wait")


def test_chart_of_one_value_is_a_word_in_a_line(service: Keyed, page: Page) -> None:
    open_job(page, "ended")
    expect(page.locator(".charts .same")).to_contain_text(re.compile(r"The same in every step: .*Learning rate [\d.]+"))
    expect(chart(page, "Learning rate")).to_be_hidden()
    expect(chart(page, "Gradient norm")).to_be_visible()
    expect(page.get_by_role("heading", name="Are the updates sound?")).to_be_visible()


def test_curves_of_several_jobs_have_a_legend(service: Keyed, page: Page) -> None:
    service.submit(tiny("beside", 2))
    assert service.ended("beside") == "succeeded"
    keys = chart(page, "Training reward").locator(".keys span")
    expect(keys.filter(has_text="beside")).to_be_visible()
    expect(keys.filter(has_text="ended")).to_be_visible()


def test_a_warning_is_seen_on_both_pages(service: Keyed, page: Page) -> None:
    service.submit(
        tiny(
            "warned",
            LONG,
            reward={"name": "regex", "args": {"pattern": ENDLESS}, "cpu_seconds": 0.1},
            algorithm={"group_size": 2, "groups_per_step": 2, "max_failed_fraction": 1},
        )
    )
    warning = re.compile(
        r"\d+ of \d+ rollouts have no reward, commonest: reward regex: took more than 0\.1 s of CPU time"
    )
    expect(page.locator(".jobs tr.why", has_text=warning)).to_be_visible()
    open_job(page, "warned")
    expect(page.locator(".note")).to_contain_text(warning)
    service.steer("warned", "cancel")


def test_a_job_that_hardly_learned_says_so_with_a_link_to_the_cure(service: Keyed, page: Page) -> None:
    service.submit(tiny("still", 12, optimizer={"lr": 1e-12}, eval={"every": 4}))
    assert service.ended("still") == "succeeded"
    says = re.compile("hint: (hardly learned|nothing was learned).*#flat")
    expect(page.locator(".jobs tr.why", has_text=says)).to_be_visible()
    expect(page.locator(".jobs tr.why").get_by_role("link", name="docs/not-learning.md#flat")).to_have_count(1)
    shown = subprocess.run(
        [sys.executable, "-m", "motet", "ls", "--url", service.url],
        env={**os.environ, "MOTET_API_KEY": service.keys["us"], "COLUMNS": "160"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.search(r"still +succeeded, hardly learned", shown.stdout), shown.stdout
    open_job(page, "still", "Events")
    expect(page.locator(".happened li").first.get_by_role("link", name="docs/not-learning.md#flat")).to_be_visible()
    expect(page.locator(".note")).to_contain_text(says)
    with page.expect_popup() as opening:
        page.locator(".note").get_by_role("link", name="docs/not-learning.md#flat").click()
    opened = opening.value
    expect(opened.get_by_role("heading", level=1)).to_have_text("My job does not learn")
    expect(opened.locator("tr", has=opened.locator("#flat"))).to_be_in_viewport()
    assert opened.locator("a[href]").evaluate_all(
        "all => all.every(one => one.getAttribute('href').startsWith('#') && document.querySelector(one.getAttribute('href')))"
    )


def test_each_kind_of_hint_has_its_place_on_the_page_of_the_service(service: Keyed) -> None:
    kinds = re.findall(r'<a id="([a-z-]+)">', Path("docs/not-learning.md").read_text(encoding="utf-8"))
    text = httpx2.get(f"{service.url}/dashboard/not-learning.html").raise_for_status().text
    assert len(kinds) > 10
    assert re.findall(r'<a id="([a-z-]+)">', text) == kinds


def test_what_is_copied_asks_the_adapter(service: Keyed, browser: Browser) -> None:
    with watched(browser, service.url, permissions=["clipboard-read", "clipboard-write"]) as page:
        log_in(page, service)
        open_job(page, "ended", "Use it")
        best = next(one["version"] for one in service.ask("GET", "/v1/jobs/ended/versions")["data"] if one["best"])
        expect(page.get_by_label("Version")).to_have_value(str(best))
        for client in ("curl", "python"):
            page.get_by_role("button", name=f"Copy {client}").click()
            expect(page.get_by_role("button", name=f"Copy {client}")).to_have_text("Copied")
            copied = str(page.evaluate("navigator.clipboard.readText()"))
            assert f"ended@{best}" in copied
            assert service.keys["us"] not in copied
            command = ["sh", "-c", f"{copied} --silent"] if client == "curl" else [sys.executable, "-c", copied]
            environment = {**os.environ, "MOTET_API_KEY": service.keys["us"]}
            answer = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=PATIENCE / 1000, check=True
            )
            assert "error" not in answer.stdout
            assert answer.stdout.strip()
        page.get_by_label("Version").select_option("6")
        expect(page.get_by_role("tabpanel")).to_contain_text("ended@6")


def test_an_adapter_is_taken_home_and_its_job_forgotten(service: Keyed, page: Page, tmp_path: Path) -> None:
    service.submit(tiny("taken", 2))
    assert service.ended("taken") == "succeeded"
    open_job(page, "taken")
    page.get_by_role("button", name="Download", exact=True).click()
    with page.expect_download() as coming:
        page.get_by_role("button", name="Download version 2").click()
    assert coming.value.suggested_filename == "taken-v2.tar.gz"
    coming.value.save_as(tmp_path / "taken.tar.gz")
    with tarfile.open(tmp_path / "taken.tar.gz") as archive:
        assert "taken-v2/adapter_model.safetensors" in archive.getnames()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete the job").click()
    expect(page.get_by_role("link", name="ended", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="taken", exact=True)).to_have_count(0)
    assert service.get("/v1/jobs/taken").status_code == 404


@pytest.mark.parametrize("page", ["400"], indirect=True)
def test_a_job_of_uploaded_rows_runs_until_its_adapter_is_taken_home(
    service: Keyed, page: Page, tmp_path: Path
) -> None:
    page.get_by_role("link", name="New job").click()
    upload, said = page.get_by_label("Upload data"), page.locator("form").get_by_role("status")
    (tmp_path / "wrong.jsonl").write_text("no rows")
    upload.set_input_files(tmp_path / "wrong.jsonl")
    expect(page.get_by_role("alert")).to_contain_text("wrong.jsonl")
    expect(said).to_have_text("")
    upload.set_input_files(rows_in(tmp_path))
    expect(said).to_have_text(re.compile(r"^rows\.jsonl is stored\. Write data: file-\w+$"))
    expect(page.get_by_role("alert")).to_have_text("")
    line = said.inner_text().partition("Write ")[2]
    editor = page.get_by_label("Job, or job file")
    editor.fill(re.sub("data: .*", line, editor.input_value()))
    editor.fill(re.sub(r"steps: \d+", "steps: 2", editor.input_value()))
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("sort")
    expect(page.locator(".facts .state")).to_have_text("succeeded")
    asked = service.ask("GET", "/v1/jobs/sort/rollouts")["data"]
    assert asked
    assert all(re.search(r"\d \+ 1 =", one["prompt"]) for one in asked)
    page.get_by_role("button", name="Download", exact=True).click()
    with page.expect_download() as coming:
        page.get_by_role("button", name="Download version 2").click()
    coming.value.save_as(tmp_path / "taken.tar.gz")
    with tarfile.open(tmp_path / "taken.tar.gz") as archive:
        assert {Path(name).name for name in archive.getnames()} >= {*ADAPTER_FILES}


# --- what it learned --------------------------------------------------------------------------------------------------------


def test_every_chart_of_a_job_is_drawn(page: Page) -> None:
    open_job(page, "ended")
    grows(page, "Reward parts", 2)
    drawn = page.evaluate(
        "[...document.querySelectorAll('figure')].filter(one => one.offsetParent).map(one => one.dataset.points)"
    )
    assert len(drawn) == 11, "and none whose values are all the same"
    assert "0" not in drawn
    assert points(page, "Held-out reward") == 3
    assert page.evaluate(COVERED) == 0


def test_what_a_step_did_not_measure_is_a_gap(service: Keyed, page: Page) -> None:
    """A step without signal knows no entropy, and no line leads over it."""

    def some_without(route: Route) -> None:
        answer = route.fetch()
        found = answer.json()
        found["data"] = [
            line | {"entropy": value} for line, value in zip(found["data"], (0.5, 0.4, None, 0.3), strict=False)
        ]
        route.fulfill(response=answer, json=found)

    page.route("**/steps?points=*", some_without)
    open_job(page, "ended")
    grows(page, "Entropy", 2)
    assert points(page, "Entropy") == 3
    assert points(page, "Length") == 4
    # a stretch, and a point alone
    expect(chart(page, "Entropy").locator(".scatterlayer path.js-line")).to_have_count(2)


def columns(service: Keyed) -> tuple[str, ...]:
    """Of the chat with the job `ended`: one version that is both the best and the latest is shown once."""
    (best,) = [one for one in service.ask("GET", "/v1/jobs/ended/versions")["data"] if one["best"]]
    return ("base", "best") if best["latest"] else ("base", "best", "latest")


def test_base_best_and_latest_answer_side_by_side(service: Keyed, page: Page) -> None:
    open_job(page, "ended", "Chat")
    page.get_by_role("button", name="A problem from the data").click()
    expect(page.get_by_label("Message")).not_to_have_value("")
    asked = page.get_by_label("Message").input_value()
    page.get_by_role("button", name="Send").click()
    for name in columns(service):
        model = "small" if name == "base" else f"ended@{name}"
        body = {"model": model, "messages": [{"role": "user", "content": asked}], "temperature": 0, "max_tokens": 8}
        answer = service.ask("POST", "/v1/chat/completions", json=body)["choices"][0]["message"]["content"]
        talk = page.get_by_role("log", name=re.compile(f"^{name}"))
        expect(talk.locator(".user")).to_have_text(asked)
        expect(talk.locator(".assistant")).to_have_text(answer or "(nothing)")


def test_a_shared_adapter_is_listed_and_answers_beside_its_base(service: Keyed, browser: Browser) -> None:
    share = service.ask("POST", "/v1/shares", json={"name": "ended", "tenant": "them"})
    with watched(browser, service.url) as page:
        log_in(page, service, "them")
        page.get_by_role("link", name="us/ended").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("us/ended")
        expect(page.locator(".sides > section:visible h3")).to_have_text(
            ["base · small", "best · us/ended@best", "latest · us/ended@latest"]
        )
        page.get_by_label("Message").fill("cab")
        page.get_by_label("most tokens").fill("8")
        page.get_by_role("button", name="Send").click()
        body = {
            "model": "ended@best",
            "messages": [{"role": "user", "content": "cab"}],
            "temperature": 0,
            "max_tokens": 8,
        }
        answer = service.ask("POST", "/v1/chat/completions", json=body)["choices"][0]["message"]["content"]
        talk = page.get_by_role("log", name="best · us/ended@best")
        expect(talk.locator(".assistant")).to_have_text(answer or "(nothing)")
        service.ask("DELETE", f"/v1/shares/{share['id']}")
        page.reload()
        expect(page.get_by_role("alert")).to_have_text("us/ended is not shared with you.")


@pytest.mark.parametrize("opens", ["<tool_call>", "<call>"])
def test_a_base_whose_form_is_not_known_says_so(tmp_path: Path, browser: Browser, opens: str) -> None:
    tokenizer = SPEAKERS["qwen25"].tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", opens)
    with scripted_service(tmp_path, tokenizer, tokenizer.eos_token_id) as (house, _):
        note = house.ask("GET", "/v1/models/small").json().get("note", "")
        with watched(browser, str(house.http.base_url), expected=("503",)) as page:
            page.goto(str(house.http.base_url))
            page.get_by_label("API key").fill(house.keys["ours"])
            page.get_by_role("button", name="Sign in with this key").click()
            open_job(page, "ended", "Chat")
            expect(page.get_by_role("heading", name="base · small")).to_be_visible()
            shown = page.get_by_text("writes thoughts and tool calls is not known")
            expect(shown).to_have_text([note] if note else [])
            expect(page.locator(".engine")).to_have_attribute("title", re.compile(f"{re.escape(note)}$"))
    assert bool(note) == (opens == "<call>")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    ("listed", "panes"),
    [
        ([], ["base · small"]),
        ([{"version": 0, "latest": True}], ["base · small", "latest · version 0"]),
        ([{"version": 0}, {"version": 1, "latest": True, "best": True}], ["base · small", "best and latest · version 1"]),
        (
            [{"version": 1, "best": True}, {"version": 2, "latest": True}],
            ["base · small", "best · version 1", "latest · version 2"],
        ),
    ],
    ids=["none", "untrained", "one", "two"],
)  # fmt: skip
def test_each_pane_of_the_chat_has_a_model_of_its_own(
    service: Keyed, browser: Browser, listed: list[Json], panes: list[str], width: int
) -> None:
    with watched(browser, service.url, viewport={"width": width, "height": 900}) as page:
        page.route("**/versions", lambda route: route.fulfill(json={"data": listed, "next": None}))
        log_in(page, service)
        open_job(page, "ended", "Chat")
        shown = page.locator(".sides > section:visible")
        expect(shown.locator("h3")).to_have_text(panes)
        assert fills_the_rows(page)


def fills_the_rows(page: Page) -> bool:
    """Whether no place beside the panes is empty."""
    found = page.evaluate("""() => {
        const sides = document.querySelector('.sides'), right = sides.getBoundingClientRect().right;
        const panes = [...sides.children].map(one => one.getBoundingClientRect()).filter(one => one.width);
        const beside = (one, other) => other.left > one.right && other.top < one.bottom && other.bottom > one.top;
        return panes.every(one => Math.abs(one.right - right) < 1 || panes.some(other => beside(one, other)));
    }""")
    return bool(found)


def test_rollouts_of_one_version_are_shown_once_until_there_is_another(service: Keyed, page: Page) -> None:
    def first_alone(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"steps": answer.json()["steps"][:1]})

    newest = f"**/{service.job('ended')['id']}/rollouts?purpose=eval&limit=1"
    page.route(newest, first_alone)
    open_job(page, "ended", "Rollouts")
    left, right = page.get_by_role("region", name="Left"), page.get_by_role("region", name="Right")
    expect(left.locator(".tokens").first).to_be_visible()
    expect(right).to_be_hidden()
    assert fills_the_rows(page)
    page.unroute(newest)
    page.get_by_role("tab", name="Curves").click()
    page.get_by_role("tab", name="Rollouts").click()
    expect(right.get_by_role("combobox").first).to_have_value("6")
    expect(left.get_by_role("combobox").first).to_have_value("0")
    assert fills_the_rows(page)


def test_an_answer_that_breaks_off_says_why(service: Keyed, page: Page) -> None:
    deltas = [{"reasoning_content": "Two twos"}, {"content": "It is"}]
    pieces: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    pieces.append({"error": {"message": "the engine is away"}})
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in pieces)
    page.route("**/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    open_job(page, "ended", "Chat")
    page.get_by_label("Message").fill("2 + 2 =")
    page.get_by_role("button", name="Send").click()
    for name in columns(service):
        talk = page.get_by_role("log", name=re.compile(f"^{name}"))
        expect(talk.locator(".thought")).to_have_text("Two twos")
        expect(talk.locator(".assistant")).to_have_text("the engine is away")


def test_a_job_that_runs_is_shown_however_many_are_newer(service: Keyed, page: Page) -> None:
    def newest(route: Route) -> None:
        found = route.fetch()
        newer = [job for job in found.json()["data"] if job["name"] == "newer"]
        route.fulfill(response=found, json={"data": newer, "next": "1"})

    for name in ("early", "newer"):
        service.submit(service.long(name))
        service.becomes(name, "running")
    page.route("**/v1/jobs?limit=100", newest)
    page.reload()
    state = page.get_by_role("row", name="early").locator(".state")
    expect(state).to_have_text("running")
    expect(page.locator(".stats dd").first).not_to_have_text("0")
    expect(page.get_by_role("button", name=re.compile("^all"))).to_have_text(re.compile(r"^all\d+\+$"))
    service.steer("early", "cancel")
    expect(state).to_have_text("cancelled")
    service.steer("newer", "cancel")


def test_older_jobs_come_once_however_often_they_are_asked_for(service: Keyed, page: Page) -> None:
    def list_first(route: Route) -> None:
        found = route.fetch()
        route.fulfill(response=found, json={**found.json(), "next": "1"})

    def list_older(route: Route) -> None:
        job = service.ask("GET", "/v1/jobs/ended")
        time.sleep(0.5)
        route.fulfill(
            json={"data": [{**job, "id": "job-older", "name": "older", "step": 0, "created": 1.0}], "next": None}
        )

    page.route("**/v1/jobs?limit=100", list_first)
    page.route("**/v1/jobs?limit=100&after=1", list_older)
    page.reload()
    before = len(service.ask("GET", "/v1/jobs")["data"])
    page.get_by_role("button", name="Show older jobs").dblclick()
    expect(page.get_by_role("link", name="older", exact=True)).to_be_visible()
    page.wait_for_timeout(1500)
    expect(page.get_by_role("button", name=re.compile("^all"))).to_have_text(f"all{before + 1}")


@pytest.mark.parametrize("page", ["503"], indirect=True)
def test_older_jobs_stay_while_requests_are_under_way_or_fail(service: Keyed, page: Page) -> None:
    held: list[Route] = []
    ended = service.ask("GET", "/v1/jobs/ended")

    def job(name: str, state: str, created: float) -> Json:
        return {**ended, "id": f"job-{name}", "name": name, "state": state, "step": 0, "created": created}

    def hold(route: Route) -> None:
        held.append(route)

    def refresh() -> None:
        held.clear()
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        for _ in range(1500):  # half a minute, in which the page's requests are handled
            if held:
                return
            page.wait_for_timeout(20)
        raise AssertionError("the page asked for nothing")

    def lists(after: str, one: Json, following: str | None) -> None:
        page.route(f"**/v1/jobs?limit=100{after}", lambda route: route.fulfill(json={"data": [one], "next": following}))

    lists("", job("newest", "succeeded", 3.0), "1")
    lists("&after=1", job("waits", "paused", 2.0), "2")
    lists("&after=2", job("oldest", "succeeded", 1.0), None)
    page.route("**/v1/jobs/job-waits", hold)
    page.reload()
    older = page.get_by_role("button", name="Show older jobs")
    older.click()
    waits = page.get_by_role("link", name="waits", exact=True)
    expect(waits).to_be_visible()
    refresh()
    older.click()
    oldest = page.get_by_role("link", name="oldest", exact=True)
    expect(oldest).to_be_visible()
    for route in held:
        route.fulfill(json=job("waits", "cancelled", 2.0))
    page.wait_for_timeout(500)
    expect(oldest).to_be_visible()
    refresh()
    for route in held:
        route.fulfill(status=503, json={"error": {"message": "the database is away"}})
    page.wait_for_timeout(500)
    expect(waits).to_be_visible()


def test_rollouts_stand_side_by_side_with_the_logprob_of_each_token(service: Keyed, page: Page) -> None:
    open_job(page, "ended", "Rollouts")
    left, right = page.get_by_role("region", name="Left"), page.get_by_role("region", name="Right")
    expect(left.locator(".tokens").first).to_be_visible()
    for side, version in ((left, 0), (right, 6)):
        expect(side.get_by_role("combobox").first).to_have_value(str(version))
        path = f"/v1/jobs/ended/rollouts?purpose=eval&step={version}&tokens=true"
        found = service.ask("GET", path)["data"][0]
        expect(side.locator(".tokens span")).to_have_count(len(found["token_texts"]))
        assert side.locator(".tokens").first.inner_text() == "".join(found["token_texts"])
    tokens = right.locator(".tokens").first
    tokens.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    logprob = round(float(found["logprobs"][1]), 2)
    expect(right.locator(".readout").first).to_contain_text(re.compile(r"logprob \S+, probability [\d.]+ %"))
    told = re.search(r"logprob (\S+),", right.locator(".readout").first.inner_text())
    assert told is not None
    assert float(told[1].replace("−", "-")) == pytest.approx(logprob, abs=0.01)
    page.get_by_role("button", name="Training").click()
    left.get_by_role("combobox", name="Left: step").select_option("1")
    expect(left.locator(".rollout")).to_have_count(4)


@pytest.mark.parametrize("page", ["404"], indirect=True)
def test_what_jobs_and_models_wrote_stays_text(service: Keyed, page: Page) -> None:
    directory = service.directory / "run" / str(service.job("ended")["id"]) / "rollouts"
    for file in directory.glob("eval-*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line |= {"prompt": HOSTILE, "answer": HOSTILE, "completion": HOSTILE, "error": HOSTILE}
            line |= {"token_texts": [HOSTILE], "logprobs": [-1.0], "reward_parts": {HOSTILE: 1.0, "b": 0.0}}
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    open_job(page, "ended", "Rollouts")
    expect(page.locator(".tokens").first).to_have_text(HOSTILE)
    expect(page.locator(".asked").first).to_have_text(HOSTILE)
    page.get_by_role("tab", name="Chat").click()
    page.get_by_label("Message").fill(HOSTILE)
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".said.user").first).to_have_text(HOSTILE)
    page.goto(f"{service.url}/#/job/{HOSTILE}")
    expect(page.locator("main")).to_contain_text("There is no such job")
    assert page.locator("main img, main b").count() == 0
    assert page.evaluate("window.hacked") is None


def test_an_episode_is_shown_turn_by_turn(service: Keyed, page: Page) -> None:
    """What its environment began with, what the model said and read, and what each turn was worth."""
    texts = ["<tool_call>", "<|im_end|>", "\n", "7 <b>", "sure", "<|im_end|>"]
    episode = {
        "purpose": "train", "problem": 1, "index": 0, "prompt": "Task 1.", "opening": f"Task 1.\n\nTurn it. {HOSTILE}",
        "turns": ["<tool_call>", "sure"], "replies": [["7 <b>"], []], "turn_rewards": [0.5, None], "reward": 0.5, "tokens": 4,
        "token_texts": texts, "logprobs": [-0.1, -0.2, None, None, -3.0, -0.1],
    }  # fmt: skip
    one_turn = episode | {"index": 1, "turns": ["sure"], "logprobs": [-0.1] * 6, "turn_rewards": [0.25]}
    file = service.directory / "run" / str(service.job("ended")["id"]) / "rollouts" / "0.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (episode, one_turn)))
    open_job(page, "ended", "Rollouts")
    page.get_by_text("Training", exact=True).click()
    cards = page.get_by_role("region", name="Left").locator(".rollout")
    expect(cards.nth(0).locator(".opening")).to_have_text(str(episode["opening"]))
    expect(cards.nth(0).locator(".turn")).to_have_text(["turn 1 · reward 0.5", "turn 2"])
    expect(cards.nth(0).locator(".read")).to_have_text(["⏎", "7 <b>"])
    expect(cards.nth(1).locator(".turn")).to_have_count(0)
    expect(cards.nth(1)).to_contain_text("turns: 0.25")
    assert page.evaluate("window.hacked") is None


def test_branches_of_an_episode_are_told_apart(service: Keyed, page: Page) -> None:
    """Two calls that go on from one turn, the second not trained, and a history of its own."""
    episode = {
        "purpose": "train", "problem": 1, "index": 0, "prompt": "Task 1.", "reward": 1.0, "tokens": 4,
        "turns": ["a", "b", "c", "d"], "replies": [["left"], ["right"], ["other", HOSTILE], []],
        "trained": [True, True, False, True], "turn_rewards": [0.5, None, None, 1.0],
        "branches": [
            {"turn": turn, "after": after, "token": token} for turn, after, token in ((0, None, 0), (2, 0, 3), (3, None, 3))
        ],
        "token_texts": ["a", "left", "b", "d"], "logprobs": [-0.1, None, -3.0, -0.1],
    }  # fmt: skip
    bare = {name: value for name, value in episode.items() if name not in ("token_texts", "logprobs")}
    file = service.directory / "run" / str(service.job("ended")["id"]) / "rollouts" / "1.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (episode, bare)))
    open_job(page, "ended", "Rollouts")
    page.get_by_text("Training", exact=True).click()
    page.get_by_role("combobox", name="Left: step").select_option("1")
    whole, texts = (page.get_by_role("region", name="Left").locator(".rollout").nth(n) for n in range(2))
    heads = ["branch 1 · turns 1–2", "branch 2 · turn 3 · goes on from turn 1", "branch 3 · turn 4 · begins anew"]
    expect(whole.locator(".branch")).to_have_text(heads)
    expect(whole.locator("header")).to_contain_text("4 tokens · 3 branches")
    told = whole.locator(".tokens").inner_text()
    lines = ["turn 1 · reward 0.5", "turn 2", "right", "turn 4 · reward 1"]
    places = [told.index(line) for line in (*heads[:1], *lines[:2], heads[1], lines[2], heads[2], "other", lines[3])]
    assert places == sorted(places), told
    expect(whole.locator(".turn")).to_have_text([lines[0], lines[1], lines[3]])
    expect(texts.locator(".branch")).to_have_text(heads)
    expect(texts.locator(".branch, .tokens")).to_have_text([heads[0], "a", "b", heads[1], "c", heads[2], "d"])
    assert page.evaluate("window.hacked") is None


# --- everywhere -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", few(["light", "dark"], "light"))
def test_a_phone_has_nothing_to_scroll_sideways(service: Keyed, browser: Browser, scheme: str) -> None:
    settings: Json = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme, "has_touch": True}
    with watched(browser, service.url, **settings) as page:
        log_in(page, service)
        page.get_by_role("table").wait_for()
        wide = "document.documentElement.scrollWidth"
        assert page.evaluate(wide) == 360
        open_job(page, "ended")
        for tab in ("Curves", "Rollouts", "Chat", "Use it", "Configuration", "Events"):
            page.get_by_role("tab", name=tab).click()
            page.get_by_role("tabpanel").locator("> *").first.wait_for()
            page.wait_for_timeout(150)
            assert page.evaluate(wide) == 360, tab
        page.get_by_role("link", name="New job").click()
        assert page.evaluate(wide) == 360


def test_a_job_is_paused_by_keyboard_alone(service: Keyed, browser: Browser) -> None:
    job = service.submit(service.long("typed"))
    with watched(browser, service.url) as page:
        page.goto(service.url)
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type(service.keys["us"])
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name="typed", exact=True)).to_be_visible()
        tab_to(page, "typed")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        tab_to(page, "Pause")
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring == "solid"  # one sees where one is
        page.keyboard.press("Enter")
        expect(page.locator(".facts")).to_contain_text(re.compile("^paused"))
    assert service.job(job["id"])["state"] == "paused"
    service.steer("typed", "cancel")


def tab_to(page: Page, text: str) -> None:
    """Press Tab until what has this text has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == text:
            return
    pytest.fail(f"{text} cannot be reached with Tab")


def test_a_restart_of_the_server_is_told_and_survived(service: Keyed, browser: Browser) -> None:
    service.submit(service.long("restarted"))
    with watched(browser, service.url, expected=LOST) as page:
        log_in(page, service)
        open_job(page, "restarted")
        grows(page, "Training reward", 2)
        page.evaluate("window.same = true")
        service.kill()
        expect(page.get_by_role("status").filter(has_text="Connection lost")).to_be_visible()
        before = points(page, "Training reward")
        service.start()
        expect(page.get_by_role("status").filter(has_text="Connection lost")).to_have_count(0)
        grows(page, "Training reward", before)
        assert page.evaluate("window.same")
        service.steer("restarted", "cancel")
        expect(page.locator(".facts .state")).to_have_text("cancelled")
        assert_complete(service, page, "restarted")

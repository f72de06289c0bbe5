"""`motet init` writes job files that run; `motet data` shows and selects rows; `data.order` is a curriculum."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from motet.commands.chat import is_served
from motet.commands.data import Comparison, Selection, far_apart, look_at, selected
from motet.commands.init import TASKS, write_job_file
from motet.config import DataConfig
from motet.config.jobfile import load_jobs
from motet.core.errors import ConfigError, DataError, MotetError
from motet.data.dataset import load_dataset
from motet.hosts.checks import check_run
from tests.support.commands import Motet
from tests.support.waiting import PATIENCE

ROWS: list[dict[str, Any]] = [
    {"question": f"What is {n % 20} + 1?", "answer": str(n % 20 + 1), "level": (7 * n) % 5, "kind": "ab"[n % 2]}
    for n in range(40)
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", TASKS)
def test_each_kind_of_task_becomes_a_job_file_that_is_right(here: Path, task: str) -> None:
    write_job_file(here / "jobs.yaml", task, "rows.jsonl", "small", ask=False)
    (job,) = load_jobs(here / "jobs.yaml").jobs
    assert (job.name, Path(job.data.source)) == ("rows", here / "rows.jsonl")
    check_run(load_jobs(here / "jobs.yaml"))


def test_init_looks_at_the_rows_that_the_job_will_have(here: Path) -> None:
    (here / "below").mkdir()
    longer = ({"question": row["question"] + str(n), "answer": "a" * 100} for n, row in enumerate(ROWS))
    (here / "below/rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in longer))
    write_job_file(here / "below/jobs.yaml", "exact", "rows.jsonl", "small", ask=False)
    (job,) = load_jobs(here / "below/jobs.yaml").jobs
    assert Path(job.data.source) == here / "below/rows.jsonl"
    assert job.sampling.max_tokens >= 100


@pytest.mark.parametrize(("file", "name"), [("données.jsonl", "donn-es"), ("数据.jsonl", "job")])
def test_a_file_of_any_name_becomes_a_job(here: Path, file: str, name: str) -> None:
    (here / "rows.jsonl").rename(here / file)
    write_job_file(here / "jobs.yaml", "exact", file, "small", ask=False)
    assert [job.name for job in load_jobs(here / "jobs.yaml").jobs] == [name]


def test_init_asks_again_after_a_wrong_answer(here: Path) -> None:
    person, terminal = pty.openpty()
    os.write(person, b"numbr\nnumber\nnone.jsonl\n\nsmal\n\n")
    command = [sys.executable, "-m", "motet", "init"]
    done = subprocess.run(command, stdin=terminal, capture_output=True, text=True, check=False, timeout=PATIENCE)
    for end in (person, terminal):
        os.close(end)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    for wrong in ("did you mean number?", "none.jsonl' is not a file", "did you mean 'small'?"):
        assert wrong in said
    assert "--task" not in said
    (job,) = load_jobs(here / "jobs.yaml").jobs
    assert (job.data.source, [one.name for one in job.rewards]) == ("toy:count_letters", ["numeric"])


UNKNOWN: list[dict[str, Any]] = [
    {"level": n % 3, "task": f"What is {n} + 1?", "solved": {"final": str(n + 1)}} for n in range(12)
]


@pytest.fixture
def unknown(here: Path) -> Path:
    (here / "odd.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in UNKNOWN))
    return here


@pytest.mark.parametrize("questions", [b"", b"exact\nodd.jsonl\nsmall\n"])
def test_init_asks_for_columns_of_unknown_names(unknown: Path, questions: bytes) -> None:
    person, terminal = pty.openpty()
    first, last = (questions[:16], questions[16:]) if questions else (b"", b"")
    os.write(person, first + b"tsak\ntask\nsolved.last\nsolved.final\n" + last)
    named = [] if questions else ["--task", "exact", "--data", "odd.jsonl", "--base", "small"]
    command = [sys.executable, "-m", "motet", "init", *named]
    done = subprocess.run(command, stdin=terminal, capture_output=True, text=True, check=False, timeout=PATIENCE)
    for end in (person, terminal):
        os.close(end)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it has level, task, solved.final" in done.stdout
    (job,) = load_jobs(unknown / "jobs.yaml").jobs
    assert (job.data.prompt, job.data.answer) == ("task", "solved.final")
    data = load_dataset(job.data)
    assert {data.train[0].answer, data.train[0].messages[0].content} <= {
        *(row["task"] for row in UNKNOWN), *(row["solved"]["final"] for row in UNKNOWN)
    }  # fmt: skip


def test_init_that_may_not_ask_says_how_to_name_columns(unknown: Path, says: Motet) -> None:
    asked = ("init", "--yes", "--data", "odd.jsonl")
    code, _, err = says(*asked)
    assert code == 2
    assert "hold the prompts; it has level, task, solved.final: name it with --prompt COLUMN" in " ".join(err.split())
    code, _, err = says(*asked, "--prompt", "task")
    assert code == 2
    assert "hold the answers; it has level, solved.final: name it with --answer COLUMN" in " ".join(err.split())
    assert not (unknown / "jobs.yaml").exists()
    assert says(*asked, "--prompt", "task", "--answer", "solved.final")[0] == 0
    check_run(load_jobs(unknown / "jobs.yaml"))


def test_what_init_wrote_passes_check(here: Path, says: Motet) -> None:
    assert says("init", "--yes", "--task", "own")[0] == 0
    code, out, err = says("check", "jobs.yaml", "--rollouts", "2", "--set", "sampling.max_tokens=8")
    assert (code, err) == (0, ""), out
    assert "nothing was trained" in out
    assert "job sort-letters: forecast: " in out
    assert "its first" not in out
    sizes = ("algorithm.group_size=2", "algorithm.groups_per_step=2", "data.holdout=2")
    few = [word for one in ("steps=2", "sampling.max_tokens=8", *sizes) for word in ("--set", one)]
    assert says("run", "jobs.yaml", *few)[0] == 0
    code, out, err = says("check", "jobs.yaml", "--rollouts", "2", *few)
    assert code == 0, err
    assert "job sort-letters: its first 2 steps sampled " in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("exact", "rows.jsonl", "smal"), "did you mean 'small'"),
        (("numbr", "rows.jsonl", "small"), "did you mean number?"),
        (("exact", "none.jsonl", "small"), "none.jsonl"),
        (("exact", "bare.jsonl", "small"), "compares with a reference answer, and no row"),
        ((None, "rows.jsonl", "small"), "--task, --data and --base"),
    ],
)
def test_init_leaves_no_file_that_does_not_run(here: Path, args: Any, words: str) -> None:
    (here / "bare.jsonl").write_text("".join(f'{{"prompt": "Say {n}"}}\n' for n in range(9)))
    before = sorted(here.iterdir())
    with pytest.raises(MotetError) as error:
        write_job_file(here / "jobs.yaml", *args, ask=None in args)
    assert words in str(error.value)
    assert sorted(here.iterdir()) == before
    (here / "jobs.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        write_job_file(here / "jobs.yaml", "exact", "rows.jsonl", "small", ask=False)


def test_rows_are_filtered_deduplicated_and_split(here: Path, says: Motet) -> None:
    asked = ("data", "rows.jsonl", "--filter", "level >= 1", "--filter", "kind == a")
    code, out, err = says(*asked, "--dedupe", "--split", "2", "--to", "out.jsonl")
    assert (code, err) == (0, ""), out
    fits = [row for row in ROWS if row["level"] >= 1 and row["kind"] == "a"]
    want = list({row["question"]: row for row in reversed(fits)}.values())
    train, held_out = read(here / "out.jsonl"), read(here / "out-held-out.jsonl")
    assert len(held_out) == 2
    assert sorted(map(str, [*train, *held_out])) == sorted(map(str, want))
    assert train == [row for row in fits if row in train][: len(train)]  # in their order
    for text in ("level", "prompt", "<|im_start|>user", "reference answer: "):
        assert text in out
    look_at("rows.jsonl", "small", None, None, Selection(held_out=2), here / "again.jsonl")
    look_at("rows.jsonl", "small", None, None, Selection(held_out=2, seed=1), here / "other.jsonl")
    first = read(here / "again-held-out.jsonl")
    look_at("rows.jsonl", "small", None, None, Selection(held_out=2), here / "again.jsonl")
    assert read(here / "again-held-out.jsonl") == first != read(here / "other-held-out.jsonl")


def test_rows_with_half_a_character_are_shown_and_checked(here: Path, says: Motet) -> None:
    """Such as an emoji that was cut in two; only prompts have to be read by a tokenizer."""
    rows = [{"note": "\ud83d", "prompt": f"{n} + 1", "answer": f"{n + 1} \ud83d"} for n in range(16)]
    (here / "cut.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    code, out, err = says("data", "cut.jsonl", "--to", "again.jsonl")
    assert (code, err, "wrote 16 rows" in out) == (0, "", True)
    assert read(here / "again.jsonl") == rows
    write_job_file(here / "jobs.yaml", "exact", "cut.jsonl", "small", ask=False)
    code, out, err = says("check", "jobs.yaml", "--rollouts", "2")
    assert (code, err) == (0, ""), out


def test_prompts_that_are_nearly_the_same_are_left_out(here: Path, says: Motet) -> None:
    long = "Ann has three red apples and gives two of them to her brother; how many red apples are left with Ann"
    said = [f"{long}?", f"So: {long.upper()} ...", "What is 2 + 3?", "What is 2 + 4?", "Hi", "hi!", "Ho"]
    (here / "near.jsonl").write_text("".join(json.dumps({"prompt": one, "answer": "1"}) + "\n" for one in said))
    code, out, _ = says("data", "near.jsonl", "--near", "0.8", "--to", "far.jsonl")
    assert code == 0, out
    assert [row["prompt"] for row in read(here / "far.jsonl")] == [said[at] for at in (0, 2, 3, 4, 6)]
    assert "2 of 7 rows are near an earlier prompt" in out
    assert f"95% alike: {said[1][:40]!r} and the earlier {said[0][:40]!r}" in out
    places, pairs = far_apart(["a b c d", "a b c e", "a b c d"], 1.0)
    assert (places, pairs) == ([0, 1], [(1.0, 2, 0)])
    assert far_apart(["What is 7 + 3?", "What is 7 - 3?", "what is 7 + 3"], 1.0)[0] == [0, 1]
    with pytest.raises(DataError, match="at most 20,000 rows"):
        far_apart(["x"] * 20_001, 0.9)


@pytest.mark.parametrize(
    ("text", "row", "holds"),
    [
        ("n >= 3", {"n": 3}, True), ("n>=3", {"n": 2.9}, False), ("n < 3", {"n": "2"}, True), ("n == 3", {"n": "3"}, True),
        ("n != 3", {"n": 4}, True), ("n < 3", {"n": "many"}, False), ("n < 3", {"m": 1}, False), ("n < 3", {"n": None}, False),
        ("t ~ a b", {"t": "xa by"}, True), ("t == x y", {"t": "x y"}, True), ('t == "3"', {"t": "3"}, True),
        ("ok == true", {"ok": True}, True), ("t < b", {"t": "a"}, True), ("v == 1.10", {"v": "1.10"}, True),
        ("v == 1.10", {"v": "1.1"}, False), ("v != 1e3", {"v": "1e3"}, False), ("v ~ 1.10", {"v": "v1.12"}, False),
    ],
)  # fmt: skip
def test_a_comparison_holds(text: str, row: dict[str, Any], holds: bool) -> None:
    assert Comparison.of(text).holds(row) is holds


@pytest.mark.parametrize("text", ["", "n", "n 3", "n =", "n >= ", "__import__('os')", "n = 3"])
def test_what_is_no_comparison_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="COLUMN SIGN VALUE"):
        Comparison.of(text)


def test_filters_that_leave_nothing_are_told() -> None:
    with pytest.raises(ConfigError, match="did you mean 'level'"):
        selected(ROWS, Selection(("levl > 1",)))
    with pytest.raises(DataError, match="none of the 40 rows"):
        selected(ROWS, Selection(("level > 9",)))
    with pytest.raises(ConfigError, match="--to"):
        look_at("toy:add", "small", None, None, Selection(held_out=1), None)


def test_a_curriculum_goes_through_the_rows_by_a_column(here: Path) -> None:
    config = DataConfig.model_validate({"source": "rows.jsonl", "order": "level", "holdout": 4})
    data = load_dataset(config)
    train = data.train
    levels = [problem.metadata["level"] for problem in train]
    assert levels == sorted(levels)
    assert {0, 4} <= set(levels)
    width = len(train) // 2 + 1
    steps = [data.window(step * width, width, 0, width) for step in range(2)]
    assert [one.metadata["level"] for step in steps for one in step][: len(train)] == levels
    plain = DataConfig.model_validate({"source": "rows.jsonl", "holdout": 4})
    assert load_dataset(plain).holdout == load_dataset(config).holdout
    with pytest.raises(DataError, match=r"data.order 'none':.*has nothing there"):
        load_dataset(config.model_copy(update={"order": "none"}))
    with pytest.raises(ValueError, match="do not go together"):
        DataConfig.model_validate({"source": "rows.jsonl", "order": "level", "shuffle": True})


@pytest.mark.parametrize("to", ["rows.jsonl", "below/../rows.jsonl"])
def test_data_never_replaces_its_source(here: Path, says: Motet, to: str) -> None:
    (here / "below").mkdir()
    before = (here / "rows.jsonl").read_bytes()
    code, _, err = says("data", "rows.jsonl", "--filter", "level >= 3", "--to", to)
    assert (code, "is the source, and its other rows would be lost; give another file" in err) == (2, True)
    (here / "rows.jsonl").rename(here / "some-held-out.jsonl")
    assert says("data", "some-held-out.jsonl", "--split", 5, "--to", "some.jsonl")[0] == 2
    assert (here / "some-held-out.jsonl").read_bytes() == before


class _Names(BaseHTTPRequestHandler):
    """A service with two bases, an adapter, `mine`, a job, and what another tenant shares."""

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        name = unquote(self.path.removeprefix("/v1/models/"))
        answer: dict[str, Any] = {"id": name}
        if self.path == "/readyz":
            answer = {"status": "ready", "base": "org/base", "bases": {"org/base": "org/base", "tiny": "small"}}
        known = "/readyz", "org/base", "tiny", "small", "mine", "sort", "us/lent", "us/job"
        self.send_response(200 if name in known else 404)
        body = json.dumps(answer).encode()
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_name_is_looked_for_on_the_service_before_the_hub() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Names) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        names = ("mine", "sort", "us/lent", "us/job", "other", "small", "org/mine", "org/base", "tiny")
        found = {name for name in names if is_served(url, None, name)}
        server.shutdown()
        thread.join()
    assert found == {"mine", "sort", "us/lent", "us/job"}
    assert not is_served(url, None, "mine"), "nothing answers there any more"


@pytest.mark.parametrize(
    ("script", "what", "cure"),
    [
        (
            "from motet.model.find import find_files; find_files('no-such/model')",
            "base 'no-such/model' is not on this machine",
            "run `hf download` where there is a network, and give the directory here",
        ),
        (
            "from motet.model.outline import outline; outline('no-such/model')",
            "base 'no-such/model' is not on this machine",
            "run `hf download` where there is a network, and give the directory here",
        ),
        (
            "from motet.config import DataConfig; from motet.data.sources import read_rows; "
            "list(read_rows(DataConfig(source='no-such/rows'))[0])",
            "data.source 'no-such/rows': it is not on this machine",
            "use a file (.jsonl, .json, .csv, .parquet), a local directory, toy:NAME or reasoning-gym:NAME",
        ),
    ],
    ids=["base", "configuration", "data"],
)
def test_a_hub_that_does_not_answer_is_asked_once_and_said_so_in_words(script: str, what: str, cure: str) -> None:
    """In a process of its own: the hub's client reads its address when it is imported."""
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{taken.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        ended = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    told = ended.stderr.splitlines()[-1]
    assert f"{what}, and the hub does not answer (" in told
    assert told.endswith(cure)
    assert "Retrying" not in ended.stderr

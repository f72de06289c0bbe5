"""Documentation is under test: generated pages are fresh, commands and links exist, job examples are valid."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from pydantic import BaseModel

import make_reference
from doors_page import BY_HAND, doors, proofs
from motet.core.errors import RewardError
from plant_faults import FAULTS
from tests.support.pages import FENCE, fences
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\n]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
TARGET = re.compile(r"^([a-z0-9-]+):", re.MULTILINE)


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    folders = ("docs", "examples", "bench", ".github")
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))])


def anchors(text: str) -> set[str]:
    """The fragments that a page's headings answer to, after the rule of the common forges."""
    titles = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page whose file or heading does not exist."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if (
            " " in link
            or not target.exists()
            or (fragment and fragment not in anchors(target.read_text(encoding="utf-8")))
        ):
            broken.append(link)
    return broken


def shell_lines(text: str) -> list[str]:
    """Lines of shell blocks and inline code, without the prompt sign."""
    blocks = [block for language in ("", "sh", "bash", "shell", "console") for block in fences(text, language)]
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def job_examples() -> list[tuple[str, str]]:
    """Every job file in the documentation: where it stands, its text."""
    found = []
    for page in pages():
        for number, block in enumerate(fences(page.read_text(encoding="utf-8"), "yaml")):
            content = yaml.safe_load(block)
            if isinstance(content, dict) and {"base", "jobs"} <= content.keys():
                found.append((f"{page.relative_to(ROOT)}, YAML block {number}", block))
    return found


def test_generated_pages_are_fresh() -> None:
    assert make_reference.stale_pages() == [], "run `make docs`"


def test_marks_of_cells_name_doors_and_engines_and_the_quickest_proof_counts(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    mark = '@pytest.mark.cell("retry, critic", "vLLM"{})\n{}def test_{}(): ...\n'
    soak = "@pytest.mark.soak\n"
    file.write_text(
        mark.format("", soak, "long") + mark.format("", "", "quick") + mark.format(", soak=True", "", "own")
    )
    assert {cell: (one.state, one.test) for cell, one in proofs(tmp_path).items()} == {
        (door, "vLLM"): ("tested", "test_one::test_quick") for door in ("retry", "critic")
    }
    file.write_text(mark.format(', refused="why"', "", "none"))
    assert proofs(tmp_path)["retry", "vLLM"].reason == "why"
    file.write_text(mark.format(", untried=True", soak, "later").replace("vLLM", "Ray"))
    assert "0 cells are tested, 0 have a long proof" in doors(tmp_path)
    assert "| retry | `test_one::test_later` |" in doors(tmp_path)
    file.write_text(mark.format("", "", "other").replace("vLLM", "TGI"))
    with pytest.raises(ValueError, match="'TGI'"):
        proofs(tmp_path)


def test_what_a_person_tried_is_listed_only_until_a_test_proves_it() -> None:
    found = proofs()
    assert [cell for cell in BY_HAND if cell in found and found[cell].state != "untried"] == []


def test_a_stale_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = make_reference.configuration()
    monkeypatch.setattr(make_reference, "PAGES", {"configuration.md": lambda: written})
    page = tmp_path / "configuration.md"
    assert make_reference.stale_pages(tmp_path) == ["configuration.md"]
    page.write_text(make_reference.NOTICE + written, encoding="utf-8")
    assert make_reference.stale_pages(tmp_path) == []
    page.write_text(page.read_text(encoding="utf-8").replace("`32`", "`16`"), encoding="utf-8")
    assert make_reference.stale_pages(tmp_path) == ["configuration.md"]


def test_make_targets_in_the_pages_exist() -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    for page in pages():
        for line in shell_lines(page.read_text(encoding="utf-8")):
            match = re.match(r"make(?: [A-Z_]+=\S+)* ([a-z0-9-]+)\b", line)
            assert match is None or match[1] in targets, f"{page.name} names `{line}`"


def test_commands_in_the_pages_exist() -> None:
    from typer.main import get_command

    from motet.commands.cli import app

    commands = getattr(get_command(app), "commands", {})
    for page in pages():
        for line in shell_lines(page.read_text(encoding="utf-8")):
            match = re.match(r"(?:\.venv/bin/)?motet ([a-z][a-z-]*)\b", line)
            assert match is None or match[1] in commands, f"{page.name} names `{line}`"


def test_links_in_the_pages_resolve() -> None:
    broken = [f"{page.relative_to(ROOT)}: {link}" for page in pages() for link in broken_links(page)]
    assert not broken, broken


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One two\n[a](#one-two) [b](other.md) [c](https://example.org) [d](#three) [e](page.md#nine) [g](#one two)\n"
        "```sh\n[f](in-code.md)\n```\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["other.md", "#three", "page.md#nine", "#one two"]


def job_files() -> list[Path]:
    """The examples that `motet run` takes."""
    return [
        file for file in sorted((ROOT / "examples").rglob("*.yaml")) if not str(file).endswith("harnesses/add.yaml")
    ]


def test_job_examples_validate() -> None:
    from motet.config.jobfile import load_jobs, parse_jobs

    for place, text in job_examples():
        assert parse_jobs(text, place).jobs
    for file in job_files():
        assert load_jobs(file).jobs


def test_rewards_of_job_examples_load() -> None:
    """What an example names is there and takes the arguments it gives; files of the reader's own are left out."""
    from motet.commands.cli import EXAMPLE
    from motet.config.jobfile import load_jobs, parse_jobs
    from motet.rewards.reward_elsewhere import ELSEWHERE, check
    from motet.rewards.reward_loading import SCORER, resolve

    in_help = EXAMPLE.split("jobs.yaml):\n")[1].split("\n\n")[0]
    examples = [*job_examples(), ("motet run --help", textwrap.dedent(in_help))]
    runs = [(place, parse_jobs(text, place)) for place, text in examples]
    runs += [(file.name, load_jobs(file)) for file in job_files()]
    for place, config in runs:
        for job in config.jobs:
            for reward in job.rewards:
                if ":" in reward.name or reward.name == SCORER:
                    continue
                try:
                    if reward.name in ELSEWHERE:
                        check(reward)
                        continue
                    resolve(reward.name, reward.args, reward.function)
                except RewardError as error:
                    pytest.fail(f"{place}, job {job.name}: {error}")


# --- pages that people write: their names, tables and examples are those of the code -----------------------------------


def page_text(name: str) -> str:
    """A page of docs/."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def table(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table whose first heading is this one, backquotes around a cell taken off."""
    rows: list[list[str]] = []
    for line in FENCE.sub("", text).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        if rows and not cells:
            break
        if rows or (cells and cells[0].strip("`") == heading):
            rows.append(cells)
    assert len(rows) > 2, f"there is no table headed {heading!r}"
    return [[row[0].strip("`"), *row[1:]] for row in rows[2:]]


def names_in(rows: list[list[str]]) -> list[str]:
    """The first cells of a table."""
    return [row[0] for row in rows]


def choices(model: type[BaseModel], field: str) -> list[str]:
    """The values of a configuration field that is a choice of names."""
    found = get_args(model.model_fields[field].annotation)
    return [name for part in found for name in (get_args(part) or (part,)) if isinstance(name, str)]


REWARD_EXAMPLES = [*fences(page_text("rewards"), "python"), *fences(page_text("bring-rewards"), "python")]


@pytest.mark.parametrize("number", range(len(REWARD_EXAMPLES)))
def test_reward_examples_score(number: int, tmp_path: Path) -> None:
    """Each example is loaded by name, in a process of its own, and tells a right answer from a wrong one."""
    from motet.config import RewardConfig
    from motet.core.types import Message, Problem
    from motet.rewards.reward_answers import AnswerContext, ScoreOutcome, TrainerState
    from motet.rewards.reward_pool import RewardPool

    file, text = tmp_path / "rewards.py", REWARD_EXAMPLES[number]
    file.write_text(text, encoding="utf-8")
    function = next(name for name in ("compute_score", "reward_func", "reward") if f"def {name}(" in text)
    shown = AnswerContext(shown=lambda: [("3 + 4?", "3 + 4?7"), ("3 + 4?", "3 + 4?eight")], state=TrainerState(1, 2))
    problem = Problem(0, (Message("user", "What is 3 + 4?"),), "7", {"answer": "7", "level": 2})

    async def scores() -> list[ScoreOutcome]:
        pool = RewardPool(1)
        try:
            await pool.register("job", [RewardConfig(name=f"{file}:{function}")], log=tmp_path / "rewards.log")
            return await pool.score("job", problem, ["7", "eight"], shown)
        finally:
            await pool.close()

    right, wrong = asyncio.run(scores())
    assert not right.error, right.error
    assert not wrong.error, wrong.error
    assert right.reward > wrong.reward


def tiny_classifier(directory: Path) -> None:
    """A random classifier of transformers, with labels as the page has them."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "7", "eight"]
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(directory)
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": len(words), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    labels = {0: "NEGATIVE", 1: "POSITIVE"}
    BertForSequenceClassification(BertConfig(**sizes, intermediate_size=16, id2label=labels)).save_pretrained(directory)


def test_the_classifier_of_the_page_scores(tmp_path: Path) -> None:
    from motet.config import RewardConfig
    from motet.core.types import Message, Problem
    from motet.rewards.reward_answers import ScoreOutcome
    from motet.rewards.reward_pool import RewardPool

    (text,) = fences(page_text("bring-rewards"), "py")
    tiny_classifier(tmp_path / "classifier")
    file = tmp_path / "rewards.py"
    file.write_text(text.replace("path/or/hub-id", str(tmp_path / "classifier")), encoding="utf-8")
    problem = Problem(0, (Message("user", "What is 3 + 4?"),), "7", {})

    async def scores() -> list[ScoreOutcome]:
        pool = RewardPool(1)
        try:
            reward = RewardConfig(name=f"{file}:reward", wall_seconds=PATIENCE)
            await pool.register("job", [reward], log=tmp_path / "rewards.log")
            return await pool.score("job", problem, ["7", "eight"])
        finally:
            await pool.close()

    outcomes = asyncio.run(scores())
    assert not any(one.error for one in outcomes), outcomes
    seven, eight = (one.reward for one in outcomes)
    assert 0 < seven < 1
    assert 0 < eight < 1
    assert seven != eight


def test_the_example_of_the_readme_prints_the_version_that_the_run_recommends(tmp_path: Path) -> None:
    """Nothing is learned here, so that the first trained version is the best, and not the newest."""
    example = fences((ROOT / "README.md").read_text(encoding="utf-8"), "python")[-1]
    assert example.count('"steps": 20') == 1
    settings = '"steps": 4, "optimizer": {"lr": 1e-12}, "eval": {"every": 2, "temperature": 0}'
    (tmp_path / "example.py").write_text(example.replace('"steps": 20', settings), encoding="utf-8")
    ended = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    said = ended.stdout + ended.stderr
    told = re.search(r"^sort  succeeded after 4/4 steps  eval \S+→(\S+) \(v(\d+)\)", said, re.MULTILINE)
    assert told, said
    figure, version = told.groups()
    assert version != "4", "the newest"
    printed = re.search(r"^\((\d+), ([\d.]+)\) \S+/versions/v(\d+)$", said, re.MULTILINE)
    assert printed, said
    assert (printed[1], f"{float(printed[2]):.2f}", printed[3]) == (version, figure, version)


def test_readme_code_has_lines_of_80_and_the_loop_of_the_example() -> None:
    blocks = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [line for _, block in blocks for line in block.splitlines() if len(line) > 80] == []
    loop, *_ = fences((ROOT / "README.md").read_text(encoding="utf-8"), "python")
    assert textwrap.indent(loop, "    ") in (ROOT / "examples" / "loop.py").read_text(encoding="utf-8")


def test_the_base_alone_fails_at_the_question_of_the_first_run() -> None:
    """Else the tutorial shows nothing: the adapter's answer has to be better than the base's."""
    words = " ".join(page_text("first-run").split())
    found = re.search(r"Type `(.+? (\w+) .+?)`: the adapter answers `(\w+)`.+? gets it wrong: `(.+?)`", words)
    assert found, "the page has another question"
    question, word, right, wrong = found.groups()
    assert right == word[::-1]
    asked = subprocess.run(
        [sys.executable, "-m", "motet", "chat", "small"],
        input=f"{question}\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert wrong in asked.stdout, asked.stdout
    assert right not in wrong


def test_the_page_about_rewards_has_every_built_in_one() -> None:
    from motet.config import RewardConfig
    from motet.rewards.rewards import BUILTIN

    text = page_text("rewards")
    rows = {row[0]: row for row in table(text, "name")}
    assert list(rows) == [*BUILTIN, "scorer"]
    for name, function in BUILTIN.items():
        parameters = inspect.signature(function).parameters.values()
        arguments = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        assert all(f"`{argument}`" in rows[name][-1] for argument in arguments), rows[name]
        assert arguments or rows[name][-1] == "none", rows[name]
    for field, default, *_ in table(text, "field"):
        assert float(default) == RewardConfig.model_fields[field].default


def test_the_page_about_data_has_every_toy_task() -> None:
    from motet.data.toys import FAMILIES, make_rows

    rows = {row[0]: row[-2:] for row in table(page_text("data"), "toy:")}
    assert list(rows) == list(FAMILIES)
    for family, shown in rows.items():
        (made,) = make_rows(family, 1, seed=0)
        assert shown == [made["prompt"], made["answer"]]


def test_the_page_about_algorithms_has_every_name() -> None:
    from motet.algorithms.policy_gradient import KLConfig, PolicyGradient
    from motet.algorithms.registry import ALGORITHMS

    text = page_text("algorithms")
    types = table(text, "type")
    kinds = {name: kind for name, kind in ALGORITHMS.items() if issubclass(kind, PolicyGradient)}
    del kinds["distill"]  # its advantages are a teacher's, and none of the table's
    named = re.findall(r"(?:type|algorithm): (\w+)", text) + names_in(types)
    assert set(ALGORITHMS) - set(named) == {"client"}
    assert sorted(names_in(types)) == sorted(kinds)
    for name, *parts in types:
        made = kinds[name]()
        assert [part.strip("`") for part in parts[:3]] == [made.advantage, made.loss, made.reduction]
    for field in ("advantage", "loss", "reduction"):
        assert names_in(table(text, field)) == choices(PolicyGradient, field)
    assert names_in(table(text, "kl.type")) == list(get_args(KLConfig.model_fields["type"].annotation))


def test_the_page_about_metrics_has_every_field() -> None:
    from motet.core.device import BusyTime
    from motet.runtime.metrics import STEP_FIELDS, timing_record

    text = page_text("metrics")
    about_metrics, about_timings = text.split("## metrics.jsonl")[1], text.split("## timings.jsonl")[1]
    assert {row[0]: row[1] for row in table(about_metrics, "field")} == STEP_FIELDS
    seconds = dict.fromkeys(("sample", "reward", "train", "publish"), 0.0)
    record = timing_record(0, seconds, 0, 0, BusyTime(), beside={"adapter_norm": 1.0, "reward_range": [0.0, 1.0]})
    nested = (
        [f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [name] for name, value in record.items()
    )
    shown = [name.strip("`") for row in table(about_timings, "field") for name in row[0].split(", ")]
    shown.remove("errors")  # only of steps with failed rewards
    shown.remove("judge")  # only of jobs with a judge
    assert shown == [name for names in nested for name in names]
    for page in ("runs", "adapters", "team", "chat"):
        for number, example in enumerate(fences(page_text(page), "py")):
            compile(example, f"{page}.md, example {number}", "exec")


def test_the_page_about_security_says_up_to_which_size_the_http_process_parses() -> None:
    from motet.core.safetensors_header import MOST_TENSORS
    from motet.data.row_files import SMALL as ROWS
    from motet.service.tinker.wire import SMALL as GRADIENT

    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    said = (
        f"reads up to {ROWS >> 10} KB |",
        f"gradients above {GRADIENT >> 10} KB",
        f"at most {MOST_TENSORS:,} matrices",
    )
    assert [one for one in said if one not in text] == []


def test_week_one_has_the_cells_of_the_page_about_cards() -> None:
    heads = [
        next(line for line in page_text(name).splitlines() if line.startswith("| base | "))
        for name in ("fits", "week-one")
    ]
    cards, chosen = ([cell.strip() for cell in head.strip("|").split("|")] for head in heads)
    known = {row[0]: dict(zip(cards, row, strict=True)) for row in table(page_text("fits"), "base")}
    rows = table(page_text("week-one"), "base")
    assert rows == [[known[row[0]][card] for card in chosen] for row in rows]


def test_figures_of_learning_say_at_which_commit_they_were_made() -> None:
    for section in page_text("learning").split("\n## "):
        assert "|---" not in section or re.search(r"[Cc]ommits? [0-9a-f]{7}\b", section), section.partition("\n")[0]


@pytest.mark.parametrize("page", ["architecture", "extend", "exactness", "torch-kernels"])
def test_the_pages_about_the_house_name_what_exists(page: str) -> None:
    text = page_text(page)
    source = ROOT / "src" / "motet"
    files = [*source.rglob("*.py"), *(ROOT / "tests" / "support").glob("fake_*.py")]
    code = {file: file.read_text(encoding="utf-8") for file in files}
    quoted = re.findall(r"`([^`\n]+)`", text)
    for name in quoted:
        if match := re.fullmatch(r"([\w/]+\.py)(?:::(\w+))?", name):
            assert (source / match[1]).is_file(), name
            body = code[source / match[1]]
            assert match[2] is None or re.search(rf"^(?:async )?(?:def |class )?{match[2]}\b", body, re.M), name
        elif match := re.fullmatch(r"([A-Z]\w+)(?:\.(\w+))?", name):
            holders = [body for body in code.values() if re.search(rf"^(?:class )?{match[1]}\b", body, re.M)]
            assert holders, name
            member = rf"^    (?:async )?(?:def )?{match[2]}\b"
            assert match[2] is None or any(re.search(member, body, re.M) for body in holders), name
        elif re.fullmatch(r"\w+/", name):
            assert (source / name).is_dir(), name
    assert len(text.splitlines()) < 250


def test_addresses_of_a_service_in_the_pages_have_the_port_that_it_takes() -> None:
    from motet.client.connection import DEFAULT_URL

    for page in pages():
        for url in re.findall(r"(?:TINKER_BASE_URL|MOTET_URL)=(http://[\w.]+:\d+)", page.read_text(encoding="utf-8")):
            assert url == DEFAULT_URL, f"{page.name}: {url}"


def test_planted_faults_spoil_lines_and_name_tests_that_are_there() -> None:
    for fault in FAULTS:
        text = (ROOT / "src" / "motet" / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.right) == 1, f"{fault.what}: its line is there {text.count(fault.right)} times"
        file, name = fault.test.split("::")
        body = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(?:async )?def {name.partition('[')[0]}\(", body, re.M), f"{fault.what}: no {fault.test}"

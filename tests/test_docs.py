"""Documentation is under test: generated pages are fresh, commands and links exist, job examples are valid."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import make_reference

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
TARGET = re.compile(r"^([a-z0-9-]+):", re.MULTILINE)


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    folders = ("docs", "examples", "bench", ".github")
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))])


def fences(text: str, language: str) -> list[str]:
    """The contents of fenced blocks in a language."""
    return [body for kind, body in FENCE.findall(text) if kind == language]


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
        if not target.exists() or (fragment and fragment not in anchors(target.read_text(encoding="utf-8"))):
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


def test_configuration_page_is_fresh() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == make_reference.configuration(), "run `make docs`"


def test_command_line_page_is_fresh() -> None:
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == make_reference.command_line(), "run `make docs`"


def test_a_stale_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_reference, "PAGES", {"configuration.md": make_reference.configuration})
    page = tmp_path / "configuration.md"
    assert make_reference.stale_pages(tmp_path) == ["configuration.md"]
    page.write_text(make_reference.configuration(), encoding="utf-8")
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

    from motet.cli import app

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
        "# One two\n[a](#one-two) [b](other.md) [c](https://example.org) [d](#three) [e](page.md#nine)\n"
        "```sh\n[f](in-code.md)\n```\n",
        encoding="utf-8",
    )
    assert broken_links(page) == ["other.md", "#three", "page.md#nine"]


def test_job_examples_validate() -> None:
    from motet.jobfile import load_jobs, parse_jobs

    for place, text in job_examples():
        assert parse_jobs(text, place).jobs
    for file in sorted((ROOT / "examples").rglob("*.yaml")):
        assert load_jobs(file).jobs


def test_help_is_quick_because_it_loads_nothing_heavy() -> None:
    code = "import sys, motet.cli; print(sorted({'torch', 'transformers', 'datasets', 'plotly'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

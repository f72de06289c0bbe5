"""The documentation builds as a website without a warning, and every link of it leads somewhere."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import make_site
import motet
from tests.support.pages import FENCE

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = {"configuration", "cli", "http", "algorithms", "bases", "benchmarks", "benchmarks-gpu", "table-of-limits"}
"""Pages without a limit of words: they are generated, or looked up and not read."""


@pytest.fixture(scope="module")
def site() -> Path:
    pytest.importorskip("zensical", reason="pip install '.[docs]'")
    return make_site.build()


def test_the_site_has_every_page_search_and_both_colour_schemes(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        built = site / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        assert built.is_file(), page.stem
    home = (site / "index.html").read_text()
    assert {"default", "slate"} <= set(re.findall(r'data-md-color-scheme="(\w+)"', home))
    assert (site / "search.json").is_file() or (site / "search" / "search_index.json").is_file()


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    for page in site.glob("*/index.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, page


def test_llms_txt_and_the_navigation_that_it_is_made_from_list_every_page_once(site: Path) -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (site / "llms.txt").read_text())
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    assert all((site / name).is_file() for name in listed)


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    text = '<p id="x"><a href="../b/#y">1</a><a href="#x">2</a><a href="../c/">3</a><a href="https://example.org">4</a>'
    (tmp_path / "a" / "index.html").write_text(text)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "index.html").write_text("<p>")
    assert make_site.dead_links(tmp_path) == ["a/index.html: ../b/#y", "a/index.html: ../c/"]


def test_files_of_the_repository_are_brought(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text(
        '<a href="../../examples/agent.py">1</a><a href="../../examples/launchers">2</a>'
    )
    make_site.bring_files(tmp_path)
    assert make_site.dead_links(tmp_path) == []
    assert "slurm.sh" in (tmp_path / "files" / "examples" / "launchers" / "index.html").read_text()


def test_versions_are_published_side_by_side(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "index.html").write_text("<p>")
    for version in ("0.9", "0.10rc1", "0.10", "0.9"):
        make_site.publish(site, version, tmp_path / "public")
    versions = json.loads((tmp_path / "public" / "versions.json").read_text())
    listed = [(one["version"], one["aliases"]) for one in versions]
    assert listed == [("0.10", ["latest"]), ("0.10rc1", []), ("0.9", [])], "an old version is published again"
    assert "url=0.10/" in (tmp_path / "public" / "index.html").read_text()


def test_a_file_that_git_does_not_track_is_not_published(tmp_path: Path) -> None:
    root, site = tmp_path / "root", tmp_path / "site"
    (root / "examples").mkdir(parents=True)
    for name in ("known.py", "secret.env"):
        (root / "examples" / name).write_text(name)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    subprocess.run(["git", "add", "examples/known.py"], cwd=root, check=True)
    make_site.bring("examples", site, root)
    assert {path.name for path in (site / "files" / "examples").iterdir()} == {"known.py", "index.html"}
    assert "secret" not in (site / "files" / "examples" / "index.html").read_text()


def test_pages_are_short() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        words = sum(bool(re.search(r"\w", word)) for word in FENCE.sub("", page.read_text()).split())
        assert words <= 1500 or page.stem in REFERENCE, f"{page.name}: {words} words"


def test_guides_have_short_sentences() -> None:
    """Prose without tables and code: no sentence of more than thirty words."""
    for page in (ROOT / "docs").glob("*.md"):
        if page.stem in {"configuration", "cli", "http", "benchmarks"}:
            continue
        text = re.sub(r" *```.*?```", "", page.read_text(), flags=re.DOTALL)
        text = re.sub(r"\]\([^)]*\)", "]", text)
        for block in re.split(r"\n\s*\n|\n *(?:-|\d+\.) |^\|.*$", text, flags=re.M):
            for sentence in re.split(r"(?<=[.:;?!])[*\"]*\s", block):
                words = [word for word in sentence.split() if re.search(r"\w", word)]
                assert len(words) <= 30, f"{page.name}: {' '.join(words)}"


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == motet.__version__

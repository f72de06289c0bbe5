"""Build the documentation as a website, and fail on any link that leads nowhere.

    python scripts/make_site.py                            # site/
    python scripts/make_site.py --version 0.1 --to public  # also public/0.1/, with a selector of versions

Zensical renders `docs/` by `mkdocs.yml`. Pages link to files of the repository, such as `../examples/agent.py`.
These are copied to `files/`, and the links changed. `llms.txt` lists all pages as Markdown.
"""

from __future__ import annotations

import argparse
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = (
    "Train many LoRA adapters at once by reinforcement learning over one frozen base model. One GPU ran it, on one day."
)


class Page(html.parser.HTMLParser):
    """Where a page's links and images lead, and which fragments it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fragments: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect one element's links and its id."""
        for name, value in attrs:
            if name in {"href", "src"} and value and tag != "base" and not re.match(r"[a-z]+:|//", value):
                self.links.append(unquote(value))
            elif name == "id" and value:
                self.fragments.add(value)


def nav_pages(nav: list[dict[str, Any]], above: tuple[str, ...] = ()) -> list[tuple[str, list[tuple[str, str]]]]:
    """List the sections of the navigation, each with titles and files."""
    entries = [(title, inside) for entry in nav for title, inside in entry.items()]
    pages = [(title, inside) for title, inside in entries if isinstance(inside, str)]
    found = [(": ".join(above) or "Begin", pages)] if pages else []
    for title, inside in entries:
        if not isinstance(inside, str):
            found += nav_pages(inside, (*above, title))
    return found


def first_sentence(text: str) -> str:
    """The first sentence of a page's first paragraph, without its links; empty for generated pages."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [part for part in prose.split("\n\n")[1:] if re.match(r"[A-Z*`]", part)]
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraphs[0].split())) if paragraphs else ""
    return re.split(r"(?<=[.:]) ", words)[0].rstrip(":")


def write_llms(site: Path) -> None:
    """`llms.txt` (https://llmstxt.org), and every page as Markdown beside its HTML."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    lines = ["# Motet", "", f"> {SUMMARY}", ""]
    for title, pages in nav_pages(config["nav"]):
        lines += [f"## {title}", ""]
        for name, file in pages:
            text = (ROOT / "docs" / file).read_text(encoding="utf-8")
            lines.append(f"- [{name}]({file}): {first_sentence(text)}".rstrip(": "))
            shutil.copy(ROOT / "docs" / file, site / file)
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def tracked(name: str, root: Path) -> list[str]:
    """Files below a path that git tracks: nothing else may be published."""
    command = ["git", "ls-files", "-z", "--", name]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{done.stderr}\nbuild the site in a git checkout: only files that git tracks are published")
    return [name for name in done.stdout.split("\0") if (root / name).is_file()]


def bring(name: str, site: Path, root: Path = ROOT) -> None:
    """Copy a file of the repository to `files/`; a directory gets a list of its files."""
    for file in tracked(name, root):
        copy = site / "files" / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file, copy)
    if (place := site / "files" / name).is_dir():
        names = "".join(f'<li><a href="{path.name}">{path.name}</a></li>' for path in sorted(place.iterdir()))
        text = f"<!doctype html><title>{place.name}</title><ul>{names}</ul>"
        (place / "index.html").write_text(text, encoding="utf-8")


def bring_files(site: Path) -> None:
    """Copy what pages link to outside `docs/`, and let the links lead there."""
    for file in sorted(site.rglob("*.html")):
        text = file.read_text(encoding="utf-8")
        up = "../" * (len(file.relative_to(site).parents) - 1)
        outside = {link for link in Page(text).links if link.startswith(f"{up}../")}
        for link in outside:
            name = link.removeprefix(f"{up}../").rstrip("/")
            if not name.startswith("..") and (ROOT / name).exists():
                bring(name, site)
                ending = "/" if (ROOT / name).is_dir() else ""
                text = text.replace(f'href="{link}"', f'href="{up}files/{name}{ending}"')
        if outside:
            file.write_text(text, encoding="utf-8")


def dead_links(site: Path) -> list[str]:
    """Links of the site that lead nowhere."""
    files = [file for file in sorted(site.rglob("*.html")) if file.name != "404.html"]
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in files}
    dead = []
    for file, page in pages.items():
        for link in page.links:
            path, _, fragment = link.partition("#")
            target = (file.parent / path.partition("?")[0]).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            lost = fragment and target in pages and fragment not in pages[target].fragments
            if lost or not target.is_file() or not target.is_relative_to(site):
                dead.append(f"{file.relative_to(site)}: {link}")
    return dead


def build() -> Path:
    """The site, complete.

    Raises:
        SystemExit: Zensical warns, or a link leads nowhere.
    """
    site = ROOT / "site"
    shutil.rmtree(site, ignore_errors=True)
    words = "zensical build --clean --strict --config-file".split()
    command = [sys.executable, "-m", *words, str(ROOT / "mkdocs.yml")]
    plain = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (site / "index.html").is_file():
        raise SystemExit(f"{done.stdout}{done.stderr}\nzensical did not build the site")
    write_llms(site)
    bring_files(site)
    if dead := dead_links(site):
        raise SystemExit("links that lead nowhere:\n" + "\n".join(dead))
    return site


def publish(site: Path, version: str, to: Path) -> None:
    """Put the site below `to` as one version, beside the others; the highest is where `to` itself leads."""
    shutil.rmtree(to / version, ignore_errors=True)
    shutil.copytree(site, to / version)
    record = to / "versions.json"
    old = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else []
    numbers = sorted({version, *(str(entry["version"]) for entry in old)}, key=_by_number, reverse=True)
    aliases = {numbers[0]: ["latest"]}
    versions = [{"version": number, "title": number, "aliases": aliases.get(number, [])} for number in numbers]
    record.write_text(json.dumps(versions, indent=2), encoding="utf-8")
    redirect = f'<!doctype html><meta http-equiv="refresh" content="0; url={numbers[0]}/">'
    (to / "index.html").write_text(redirect, encoding="utf-8")


def _by_number(version: str) -> list[tuple[int, bool, str]]:
    """What orders versions: 0.10 after 0.9, and 1.0rc1 before 1.0."""
    parts = [re.match(r"(\d*)(.*)", part) for part in version.split(".")]
    numbers = [(int(found[1] or 0), found[2]) for found in parts if found]
    return [(number, not rest, rest) for number, rest in numbers]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build the documentation as a website.")
    parser.add_argument("--version", help="also publish it as this version")
    parser.add_argument("--to", type=Path, default=ROOT / "public", help="where versions are (default: public)")
    arguments = parser.parse_args()
    if arguments.version is not None and not re.fullmatch(r"[0-9][0-9A-Za-z.]*", arguments.version):
        parser.error("--version is a number such as 0.1: the directory of that name is replaced")
    site = build()
    if arguments.version:
        publish(site, arguments.version, arguments.to)


if __name__ == "__main__":
    main()

"""Nodes that do not see the project directory get a copy of it; what they cannot get is refused with its path."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from motet.config.jobfile import validate
from motet.config.service import ANY_SIZE
from motet.core.errors import ConfigError, EngineError
from motet.core.types import Wanted
from motet.hosts.messages import AddJob, StartHost, Stop
from motet.hosts.nodes import NodeFacts, address_of, faults
from motet.hosts.project import (
    Seen,
    copy_to,
    leads_away,
    look_of,
    moved,
    named_by_place,
    place_on,
    seen_here,
    too_large,
)
from motet.runtime.slots import FREE


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A project as people have them, with a run directory and an environment in it."""
    files = {
        "own.py": "x = 1", "data/sums.jsonl": "{}", ".env": "SECRET=1", ".git/config": "", ".venv/lib/a.py": "",
        "venv/pyvenv.cfg": "", "venv/lib/b.py": "", "runs/old/run.json": "{}", "runs/old/job/adapter": "", "notes/a.md": "",
        "__pycache__/own.pyc": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(text)
    (tmp_path / "project" / "gone").symlink_to("nowhere")
    (tmp_path / "run").mkdir()
    return tmp_path


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_copy_has_the_code_and_data_and_nothing_secret(home: Path) -> None:
    copy = copy_to(home / "run", home / "project")
    assert copy.parent == home / "run"
    assert files(copy) == {"own.py", "data/sums.jsonl", "notes/a.md"}
    assert copy_to(home / "run", home / "project") == copy
    (home / "project" / "own.py").write_text("x = 22")
    changed = copy_to(home / "run", home / "project")
    assert (changed / "own.py").read_text() == "x = 22"
    assert [path.name for path in (home / "run").iterdir()] == [changed.name], "older copies go"


def test_a_run_directory_inside_is_not_copied_into_itself(home: Path) -> None:
    run = home / "project" / "here"
    run.mkdir()
    assert files(copy_to(run, home / "project")) == {"own.py", "data/sums.jsonl", "notes/a.md"}


def test_a_project_that_is_too_large_is_refused_with_its_largest_part(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (home / "project" / "data" / "base.bin").open("wb") as large:
        os.ftruncate(large.fileno(), 600 << 20)
    run, here = home / "run", home / "project"
    with pytest.raises(ConfigError, match=r"directory.*/project is.*600 MiB so far"):
        place_on(Seen("10.0.0.2", run=True, project=False, there=False), run, here, [])
    assert place_on(Seen("10.0.0.2", run=True, project=False), run, here, []) == here
    assert "node 10.0.0.2 uses its own files in" in caplog.text
    assert too_large(here, run)
    assert not list(run.iterdir())


def test_a_copy_elsewhere_does_not_look_like_the_project(home: Path) -> None:
    shutil.copytree(home / "project", home / "other", symlinks=True)
    assert look_of(home / "project") == look_of(home / "project") != look_of(home / "other")
    assert look_of(home / "missing") == ""


def test_what_may_not_be_read_is_left_out(home: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        project, run = shutil.copytree(home / "project", Path(place, "project"), symlinks=True), Path(place, "run")
        closed = project / "closed"
        closed.mkdir()
        closed.chmod(0o444)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            assert look_of(closed / "below") == ""
            assert leads_away(project, run) == {}
            assert not too_large(project, run)
        finally:
            if user == 0:
                os.seteuid(user)
            closed.chmod(0o755)


def test_what_a_node_lacks_is_refused_with_the_path(home: Path) -> None:
    run, here = home / "run", home / "project"
    own, secret = str(here / "own.py"), str(here / ".env")
    assert place_on(Seen("10.0.0.2", run=True, project=True), run, here, [secret]) == here
    assert place_on(Seen("10.0.0.2", run=True, project=False, missing=(own,)), run, here, [own, "/a"]).parent == run
    with pytest.raises(EngineError, match=f"node 10.0.0.2 does not see the run directory {run}: mount"):
        place_on(Seen("10.0.0.2", run=False, project=True), run, here, [])
    with pytest.raises(EngineError, match=r"node 10.0.0.2 does.*/b: mount it there"):
        place_on(Seen("10.0.0.2", run=True, project=False, missing=("/a", "/b", own)), run, here, [])
    with pytest.raises(EngineError, match=f"node 10.0.0.2 does not see {own}: mount it there"):
        place_on(Seen("10.0.0.2", run=True, project=True, missing=(own,)), run, here, [])
    with pytest.raises(ConfigError, match=f"does not see {secret}, and hidden files, virtual environments and run"):
        place_on(Seen("10.0.0.2", run=True, project=False), run, here, [own, secret])


def test_a_host_in_a_copy_hears_of_paths_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    here, copy = home / "project", home / "run" / "copy"
    job = {
        "name": "one",
        "rewards": [{"name": f"{here}/own.py:x", "weight": 1.0}],
        "data": {"source": "~/project/data"},
    }
    start = StartHost(f"{here}/data", "/run", {}, {}, {"known": {"target": f"{here}/own.py:x"}}, [], 1.0, ANY_SIZE)
    told = moved(AddJob({**job, "init": f"{home}/run"}, Wanted.RUN, 0, "", FREE, 1), here, copy)
    assert isinstance(told, AddJob)
    assert told.job == {
        "name": "one",
        "rewards": [{"name": f"{copy}/own.py:x", "weight": 1.0}],
        "data": {"source": f"{copy}/data"},
        "init": f"{home}/run",
    }
    begun = moved(start, here, copy)
    assert isinstance(begun, StartHost)
    assert (begun.base, begun.rewards, begun.run) == (f"{copy}/data", {"known": {"target": f"{copy}/own.py:x"}}, "/run")
    assert moved(Stop(), here, copy) == Stop()


def test_absolute_paths_of_jobs_are_known(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    own, data = home / "project" / "own.py", home / "project" / "data" / "sums.jsonl"
    job = {"name": "one", "data": "~/project/data/sums.jsonl", "reward": f"{own}:x", "sampling": {"stop": ["/", "/no"]}}
    near = {"name": "two", "data": "data/sums.jsonl", "reward": "own.py:x"}
    tree = {"base": "small", "run": str(home / "run"), "jobs": [job, near]}
    assert named_by_place(validate(tree, "the test")) == sorted([str(own), str(data)])


def test_links_to_directories_inside_are_followed_and_others_refused(home: Path) -> None:
    run, here, outside = home / "run", home / "project", home / "outside"
    (here / ".cache" / "rows").mkdir(parents=True)
    (here / ".cache" / "rows" / "a.jsonl").write_text("{}")
    (here / "rows").symlink_to(".cache/rows")
    (here / "data" / "up").symlink_to(here)
    copied = {"own.py", "data/sums.jsonl", "notes/a.md", "rows/a.jsonl"}
    assert files(copy_to(run, here)) == copied, "a link back to a directory above is left out"
    outside.mkdir()
    (outside / "large.jsonl").write_text("{}")
    (here / "data" / "linked").symlink_to(outside)
    with pytest.raises(
        ConfigError, match=f"{here}/data/linked is a link to {outside}, outside the project, and is not"
    ):
        copy_to(run, here)
    assert leads_away(here, run)[str(outside)] == look_of(outside)
    assert seen_here({**leads_away(here, run), str(home / "gone"): ""}) == {str(outside)}
    node = Seen("10.0.0.2", run=True, project=False, same=frozenset({str(outside)}))
    copy = place_on(node, run, here, [str(here / "data" / "linked" / "large.jsonl")])
    assert (copy / "data" / "linked").readlink() == outside
    assert too_large(here, run)
    assert not too_large(here, run, {str(outside)})


def test_a_mount_that_a_node_sees_is_not_copied_and_linked_at_its_place(home: Path, tmp_path: Path) -> None:
    run, here, mount = home / "run", home / "project", home / "project" / "our data"
    mount.mkdir()
    with (mount / "rows.jsonl").open("wb") as large:
        os.ftruncate(large.fileno(), 600 << 20)
    spaced = str(mount).replace(" ", "\\040")
    (tmp_path / "mountinfo").write_text(
        f"22 1 0:21 / / rw\n36 35 98:0 / {spaced} rw - nfs x rw\n37 35 98:1 / {here} rw\n"
    )
    assert set(leads_away(here, run, tmp_path / "mountinfo")) == {str(mount)}
    rows = str(mount / "rows.jsonl")
    unseen, sees = (Seen("10.0.0.2", True, False, False, same=one) for one in (frozenset(), frozenset({str(mount)})))
    with pytest.raises(ConfigError, match=r"than what is copied.*600 MiB so far in"):
        place_on(unseen, run, here, [rows])
    copy = place_on(sees, run, here, [rows])
    assert (copy / "our data").readlink() == mount
    assert not {"own.py", "data/sums.jsonl", "notes/a.md"} - files(copy)
    small = mount / "rows.jsonl"
    small.write_text("{}")
    made = {sees.same: copy}
    other = place_on(unseen, run, here, [rows], made)
    assert (copy / "own.py").is_file(), "a copy that another host runs in stays"
    assert (other / "our data" / "rows.jsonl").read_text() == "{}"
    assert place_on(sees, run, here, [rows], made) == copy


def test_a_node_whose_name_means_nothing_is_told_what_to_set() -> None:
    versions, unknown = ("1", "2", "3"), address_of("a name with spaces")
    facts = NodeFacts("10.0.0.2", versions, unknown, 1, 1, sees=True, free_disk=1, gloo="no address")
    (told,) = faults([facts], Path("/shared"))
    assert "(the name of 10.0.0.2 means itself alone or nothing: set GLOO_SOCKET_IFNAME there)" in told

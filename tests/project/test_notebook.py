"""The example notebook runs as it is, but for its number of steps, and its picture follows the run."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.waiting import PATIENCE

PLACE = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


def test_the_notebook_runs_and_draws_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    text = PLACE.read_text()
    assert text.count("STEPS = 30") == 1
    notebook = nbformat.reads(text.replace("STEPS = 30", "STEPS = 1"), as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "commit it without outputs"
    NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (picture,) = [
        output.data["image/svg+xml"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/svg+xml" in output.get("data", {})
    ]
    assert "sort-0.0003" in picture
    assert "sort-0.003" in picture
    last = notebook.cells[-1].outputs[0].text.splitlines()
    assert len(last) == 5
    assert all("→" in line for line in last)


_CELL = """
import motet

def score(problem, completion):
    return {value}

fields = {{"data": {{"source": "toy:add", "size": 32, "holdout": 2}}, "sampling": {{"max_tokens": 4}}}}
fields["algorithm"] = {{"group_size": 2, "groups_per_step": 2}}
job = {{"name": "{name}", "reward": score, "steps": {steps}, "optimizer": {{"lr": {lr}}}, **fields}}
result = motet.run([job], base="small", engine={{"threads": 1}}, accept_changes={accept})
"""


def test_a_cell_that_is_edited_when_its_job_has_ended_gives_no_old_figures(tmp_path: Path) -> None:
    """Another name trains the changed job."""
    first = {"value": "len(completion)", "name": "a", "steps": 2, "lr": 1e-4, "accept": False}
    edits: list[tuple[dict[str, object], str]] = [
        ({"lr": 3e-4}, "job.optimizer.lr: was 0.0001, is 0.0003"),
        ({"steps": 1}, "job.steps: was 2, is 1"),
        ({"value": "0.0"}, "score:6 was edited"),
    ]
    cells = [nbformat.v4.new_code_cell(_CELL.format(**first))]
    for edit, _ in edits:
        for accept in (False, True):
            cells.append(
                nbformat.v4.new_code_cell("result = None\n" + _CELL.format(**{**first, **edit, "accept": accept}))
            )
            cells.append(nbformat.v4.new_code_cell("print(result)"))
    cells.append(nbformat.v4.new_code_cell(_CELL.format(**{**first, "name": "b", "value": "0.0"}) + "\nprint(result)"))
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=PATIENCE, resources=resources, allow_errors=True).execute()
    told = [difference for _, difference in edits for _ in range(2)]
    for difference, edited, shown in zip(told, cells[1::2], cells[2::2], strict=False):
        (error,) = [output for output in edited.outputs if output.output_type == "error"]
        assert difference in error.evalue
        assert "It has ended, so nothing of the changed job would be trained. Give it another name" in error.evalue
        assert shown.outputs[0].text == "None\n"
    assert "0.00 → 0.00" in "".join(output.get("text", "") for output in cells[-1].outputs)

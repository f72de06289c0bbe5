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

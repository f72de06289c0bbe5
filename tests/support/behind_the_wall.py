"""Work of libraries that rewards use, done behind the wall with threads: `python -m tests.support.behind_the_wall`.

Prints the libraries that are installed and did what they should.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from motet.process import wall


def _python():
    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(lambda n: n * n, range(100))) == 328350

    async def waits():
        started = threading.Thread(target=lambda: None)
        started.start()
        return await asyncio.gather(asyncio.to_thread(started.join), asyncio.sleep(0.001, 7))

    assert asyncio.run(waits()) == [None, 7]
    with sqlite3.connect(":memory:") as database:
        assert database.execute("SELECT 6 * 7").fetchone() == (42,)
    assert "".encode("idna") == b""


def _numpy():
    import numpy as np

    square = np.random.default_rng(0).normal(size=(600, 600))
    assert np.allclose(np.linalg.inv(square) @ square, np.eye(600), atol=1e-6)
    assert np.allclose(np.fft.ifft(np.fft.fft(square[0])).real, square[0])


def _scipy():
    names = ("integrate", "optimize", "sparse", "stats", "sparse.linalg")
    integrate, optimize, sparse, stats, linalg = (import_module(f"scipy.{name}") for name in names)
    assert abs(integrate.quad(lambda x: x * x, 0, 3)[0] - 9) < 1e-9
    assert optimize.minimize(lambda x: (x[0] - 2) ** 2, [0.0]).success
    assert stats.ttest_ind([1, 2, 3], [2, 3, 4]).pvalue > 0.05
    assert linalg.spsolve(sparse.identity(10, format="csc") * 2, [4.0] * 10)[0] == 2


def _pandas():
    import pandas as pd

    rows = pd.DataFrame({"of": ["a", "b"] * 500, "n": range(1000), "at": pd.date_range("2026-01-01", periods=1000)})
    assert rows.groupby("of").n.sum()["b"] == 250000
    assert rows.set_index("at").n.resample("30D").mean().iloc[0] == 14.5


def _pyarrow():
    import pyarrow as pa
    from pyarrow import compute, parquet

    table, kept = pa.table({"n": list(range(100_000))}), pa.BufferOutputStream()
    parquet.write_table(table, kept)
    assert compute.sum(parquet.read_table(pa.BufferReader(kept.getvalue()))["n"]).as_py() == 4999950000


def _sympy():
    sympy: Any = import_module("sympy")
    x = sympy.symbols("x")
    assert sympy.integrate(sympy.sin(x) ** 2, (x, 0, sympy.pi)) == sympy.pi / 2
    assert sympy.solve(x**2 - 2, x) == [-sympy.sqrt(2), sympy.sqrt(2)]


def _math_verify():
    from math_verify import parse, verify

    assert verify(
        parse("$\\frac{1}{2}$", parsing_timeout=None), parse("$0.5$", parsing_timeout=None), timeout_seconds=None
    )


def _torch():
    torch: Any = import_module("torch")
    torch.set_num_threads(2)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    given = torch.randn(512, 256)
    model(given).pow(2).mean().backward()
    assert model[0].weight.grad.isfinite().all()
    assert torch.nn.functional.conv2d(torch.randn(4, 3, 64, 64), torch.randn(8, 3, 3, 3)).shape == (4, 8, 62, 62)


def _pillow():
    import io

    from PIL import Image, ImageDraw, ImageFilter

    picture, kept = Image.new("RGB", (200, 200), "white"), io.BytesIO()
    ImageDraw.Draw(picture).text((20, 20), "Motet", fill="black")
    picture.filter(ImageFilter.GaussianBlur(2)).resize((50, 50)).save(kept, "JPEG")
    assert Image.open(io.BytesIO(kept.getvalue())).convert("L").tobytes()[-1] > 240


def _matplotlib():
    import io

    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    pyplot.plot([1, 2], [3, 4])
    pyplot.savefig(kept := io.BytesIO())
    assert kept.getvalue().startswith(b"\x89PNG")


WORK = {
    "json": _python, "numpy": _numpy, "scipy": _scipy, "pandas": _pandas, "pyarrow": _pyarrow, "sympy": _sympy,
    "math_verify": _math_verify, "torch": _torch, "PIL": _pillow, "matplotlib": _matplotlib,
}  # fmt: skip


def main() -> None:
    """Do the work of all that is installed, imported behind the wall, twice in two threads each."""
    found = [name for name in WORK if importlib.util.find_spec(name)]
    wall.enter(1 << 15)
    logging.disable()
    for name in found:
        with ThreadPoolExecutor(2) as threads:
            WORK[name]()
            list(threads.map(lambda work: work(), [WORK[name]] * (name != "matplotlib") * 2))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Launches are counted while a test counts, by kernel."""

from __future__ import annotations

from typing import Any

from motet.cuda import launches


class Kernel:
    """Launched as Triton's kernels are."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.grids.append(grid)


def test_launches_are_counted_by_kernel_and_only_meanwhile() -> None:
    kernel = Kernel()
    launches.launch(kernel, [1])
    with launches.count() as outer:
        launches.launch(kernel, (2, 3), 1, word=2)
        with launches.count() as inner:
            launches.called("library")
    launches.launch(kernel, (4,))
    assert kernel.grids == [(1,), (2, 3), (4,)]
    assert (outer, inner) == ({"kernel": 1, "library": 1}, {"library": 1})

"""Libraries that multiply with the faults that `motet.kernels.cuda.bit_trial` looks for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from motet.kernels.cuda.product_backends import REFERENCE, Adapters, ProductWeight
from motet.model.accelerator import Recorder


@dataclass(frozen=True)
class BadLibrary:
    """Has the bits of Motet's own, but splits K in two where it is faulty: by number of rows, and with a bias."""

    faulty: Callable[[int, bool], bool] = lambda n_rows, biased: False
    alignment: int = 1
    rounds_twice: bool = False
    """Where it is faulty, it rounds the product before it adds the bias; K is whole."""

    name = "bad library"
    any_rows = False

    def multiply(
        self, x_TK: Tensor, weight: ProductWeight, y_TN: Tensor, adapters: Adapters | None, *, back: bool
    ) -> None:
        """See `Way`."""
        if not self.faulty(len(x_TK), weight.bias_N is not None and not back):
            REFERENCE.multiply(x_TK, weight, y_TN, adapters, back=back)
            return
        if self.rounds_twice:
            REFERENCE.multiply(x_TK, ProductWeight(weight.weight_NK), y_TN, adapters, back=back)
            if weight.bias_N is not None:
                y_TN += weight.bias_N
            return
        half = x_TK.shape[1] // 2
        sums_TN = torch.zeros_like(y_TN, dtype=torch.float32)
        for part, bias in ((slice(0, half), None), (slice(half, None), weight.bias_N)):
            part_NK = weight.weight_NK[part] if back else weight.weight_NK[:, part]
            of_part_TN = torch.empty_like(sums_TN)
            of_part = ProductWeight(part_NK.contiguous(), bias)
            REFERENCE.multiply(x_TK[:, part].contiguous(), of_part, of_part_TN, None, back=back)
            sums_TN += of_part_TN
        y_TN.copy_(sums_TN)


class WatchedRecorder(Recorder):
    """Replays runs on its stream, and says whether one is replayed. A graph may share memory only with one that lives."""

    replaying = False
    running: ClassVar[object] = None
    """The stream of the run that is replayed."""

    def __init__(self, stream: object = None) -> None:
        super().__init__(torch.device("cpu"))
        self.stream = stream or object()

    def beside(self) -> WatchedRecorder:
        """See `motet.model.accelerator.Recorder`."""
        return WatchedRecorder(self.stream)

    _latest: Callable[[], object] = staticmethod(lambda: None)

    def capture(self, run: Callable[[], Tensor], *, first: bool) -> Callable[[], Tensor]:
        """See `motet.model.accelerator.Recorder`."""
        assert first or self._latest() is not None, "torch frees a pool with its last graph"

        def replay() -> Tensor:
            self.replaying, WatchedRecorder.running = True, self.stream
            found = run()
            self.replaying, WatchedRecorder.running = False, None
            return found

        self._latest = weakref.ref(replay)
        return replay

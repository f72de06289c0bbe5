"""A device's queue whose work begins as late as it may, and what each piece of work copied and launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from motet.cuda.launches import count
from motet.model.accelerator import Recorder, Replay, WorkQueue


@dataclass
class Work:
    """One piece of work."""

    do: Callable[[], None]
    sent: int = 0
    """Bytes that were copied to the device."""
    launches: Counter[str] = field(default_factory=Counter)


class LateQueue(WorkQueue):
    """Work runs when it is waited for."""

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self.late: list[Work] = []
        self.done: list[Work] = []
        self.most = 0
        """Most pieces of work that waited at a time."""

    def begin(self, work: Callable[[], None]) -> Callable[[], None]:
        piece = Work(work)
        self.late.append(piece)
        self.most = max(self.most, len(self.late))

        def wait() -> None:
            while piece in self.late:
                self.run()

        return wait

    def run(self) -> None:
        """Run the first piece that has not run."""
        self.done.append(self.late.pop(0))
        with torch.inference_mode(), count() as self.done[-1].launches:
            self.done[-1].do()

    def send(self, host: Tensor) -> Tensor:
        self.done[-1].sent += host.numel()
        return super().send(host)


class RefusingRecorder(Recorder):
    """Runs what it is to record, as recorders do before, and then fails: for lack of memory at first."""

    def __init__(self, place: torch.device, queue: LateQueue) -> None:
        super().__init__(place)
        self._queue = queue
        self._tried = False

    def capture(self, run: Replay, *, first: bool) -> Replay:
        while self._queue.late:
            self._queue.run()
        with np.errstate(all="ignore"):  # of rows that are in no tile
            run()
        if not self._tried:
            self._tried = True
            raise torch.OutOfMemoryError("no memory for a graph")
        raise RuntimeError("this device has no graphs")

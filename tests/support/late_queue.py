"""A device's queue whose work begins as late as it may, and what each piece of work copied and launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from motet.kernels.cuda.launches import called, count
from motet.model.accelerator import Recorder, Replay, WorkQueue, wait_for


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
        self.recorder = LateRecorder(place, self)
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
            wait_for(self._place)

    def send(self, host: Tensor) -> Tensor:
        self.done[-1].sent += host.numel()
        return super().send(host)


class LateRecorder(Recorder):
    """Records on a GPU once the work before has run, because it runs a step at once; a replay counts what was recorded."""

    def __init__(self, place: torch.device, queue: LateQueue) -> None:
        super().__init__(place)
        self._queue = queue

    def catch_up(self) -> None:
        """Run what waits."""
        while self._queue.late:
            self._queue.run()

    def capture(self, run: Replay, *, first: bool) -> Replay:
        if self._place.type == "cpu":
            return run
        self.catch_up()
        launches = Counter[str]()

        def counted() -> Tensor:
            with count() as latest:
                made = run()
            launches.clear()
            launches.update(latest)
            return made

        replay = super().capture(counted, first=first)

        def counted_again() -> Tensor:
            for name in launches.elements():
                called(name)
            return replay()

        return counted_again


class RefusingRecorder(LateRecorder):
    """Runs what it is to record, as recorders do before, and then fails: for lack of memory at first."""

    def __init__(self, place: torch.device, queue: LateQueue, error: Exception) -> None:
        super().__init__(place, queue)
        self._tried, self._error = False, error

    def capture(self, run: Replay, *, first: bool) -> Replay:
        self.catch_up()
        with np.errstate(all="ignore"):  # of rows that are in no tile
            run()
        if not self._tried:
            self._tried = True
            raise torch.OutOfMemoryError("no memory for a graph")
        raise self._error

"""Runs work on the device: decode ticks and training calls take turns on one thread.

Engines and trainers have no thread; the code that composes a run creates one `Device` for both. The tenant that has
used the least time is next. Within a tenant, ticks get as much time as the last call took, and vice versa, so neither
sampling nor training starves; if one has no work, the other continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from motet.core.errors import DeviceLost
from motet.core.tenant_turns import LEAD, SLACK, Payer, TenantTurns

Result = TypeVar("Result")
Fault = TypeVar("Fault", bound=BaseException)


_NEXT_CALL_SECONDS = 0.005
"""While calls are owed time, ticks wait this long after a call for the job's next one: a step makes several."""


_CALLS, DECODES, WAITS = "calls", "decodes", "waits"
"""Places where a tenant can have work: queued calls; sequences that the next tick can decode; anything at the decoder."""


@dataclass
class BusyTime:
    """Seconds of device time by activity."""

    decode: float = 0.0
    train: float = 0.0
    full: float = 0.0
    """Of these, seconds in which the decode batch or the micro-batch was full."""
    turns: float = 0.0
    """Seconds of all calls and ticks on the device's thread."""
    started: float = field(default_factory=time.monotonic)
    _decoded: Counter[str] = field(default_factory=Counter)
    _used: dict[str, int] = field(default_factory=dict)
    """Microseconds of the jobs that are watched."""
    _spent: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def decoded(self, seconds: float, full: float, parts: Mapping[str, int]) -> None:
        """Add seconds of sampling, `full` of them with a full batch.

        `parts` are microseconds by job; the rest of the seconds is divided in proportion.
        """
        with self._lock:
            self.decode += seconds
            self.full += full
            self._decoded.update(parts)
            for name in parts.keys() & self._used.keys():
                self._used[name] += parts[name]

    def called(self, seconds: float, owners: Mapping[str, float]) -> None:
        """Divide a call's time among its owners in proportion to their parts; the caller updates `train` and `full`."""
        whole = sum(owners.values())
        with self._lock:
            for name, part in owners.items():
                own = seconds * (part / whole if whole else 1 / len(owners))
                self._spent[name] = self._spent.get(name, 0.0) + own
                if name in self._used:
                    self._used[name] += round(1e6 * own)

    def watch(self, job: str) -> None:
        """Count a job's seconds from now on, until it is forgotten."""
        with self._lock:
            self._used.setdefault(job, 0)

    def of(self, job: str) -> float:
        """Seconds that a job has used here since it is watched."""
        return self._used.get(job, 0) / 1e6

    def forget(self, job: str) -> None:
        """Forget the seconds of a job that has ended."""
        with self._lock:
            self._used.pop(job, None)

    def take(self) -> tuple[float, dict[str, int], dict[str, float]]:
        """Seconds of decoding so far; since the last `take`, microseconds of decoding and seconds of calls, by job."""
        with self._lock:
            decoded, self._decoded = self._decoded, Counter()
            spent, self._spent = self._spent, {}
            return self.decode, dict(decoded), spent


_payer: ContextVar[Payer] = ContextVar("payer of calls of a device", default=Payer())  # noqa: B039  # it is frozen


@contextlib.contextmanager
def used_by(owner: str, tenant: str = "", share: float = 1.0) -> Iterator[None]:
    """Charge calls in the block to a job or to a tenant's completions; they run when it is that tenant's turn.

    With an empty `owner` they are not charged here, but wait for the tenant's turn all the same.
    """
    token = _payer.set(Payer(owner, tenant, share))
    try:
        yield
    finally:
        _payer.reset(token)


@dataclass(frozen=True, eq=False)
class _QueuedCall:
    """A call that waits for its turn, with its future."""

    call: Callable[[], Any]
    future: Future[Any]
    light: bool
    payer: Payer

    def settle(self, examine: Callable[[BaseException], BaseException]) -> None:
        """Run it, unless it was cancelled; the caller gets the error that `examine` returns."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
        except BaseException as error:  # the caller gets the error, the device continues
            self.future.set_exception(examine(error))
        else:
            self.future.set_result(result)


class Device:
    """One thread that runs training calls and decode ticks in turn."""

    def __init__(
        self,
        turn: Callable[[bool], None] | None = None,
        check: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the thread, which calls `turn` and `check`.

        Args:
            turn: called with True before calls, with False before ticks and light calls.
            check: called after work has failed; raises if the device can do no more work.
            clock: seconds.
        """
        self._clock, self._check = clock, check
        self.busy = BusyTime()
        self.turns = TenantTurns()
        """Used in the device's thread only, also by the decoder."""
        self._turn = turn
        self._calling: bool | None = None
        self._owners: Mapping[Payer, float] = {}
        self._held = False
        self._calls: deque[_QueuedCall] = deque()
        self._ticks: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._wake = threading.Condition()
        self._closed = False
        self.beat = 0
        """Counts begins and ends of turns: odd while one runs."""
        self._lost: DeviceLost | None = None
        self._on_loss: Callable[[], object] = lambda: None
        self._woken = False
        self._thread = threading.Thread(target=self._loop, name="motet-device", daemon=True)
        self._thread.start()

    @property
    def job(self) -> str:
        """The job whose call runs now; empty without one, or with several."""
        owners = self._owners
        return next(iter(owners)).job if len(owners) == 1 else ""

    def add_tick(self, tick: Callable[[], bool], land: Callable[[], None] = lambda: None) -> None:
        """Register incremental work; a tick returns whether there is more.

        `land` is called before calls, which would wait for what ticks have begun and be charged with it. Neither may
        raise, because no caller could receive the error. If one does, the device is lost.
        """
        with self._wake:
            self._ticks.append((tick, land))

    def wake(self) -> None:
        """Report that a tick has work again."""
        with self._wake:
            self._woken = True
            self._wake.notify()

    def hold(self) -> None:
        """Pause after the current work, until `go`."""
        with self._wake:
            self._held = True

    def go(self) -> None:
        """Resume after `hold`."""
        with self._wake:
            self._held = False
            self._wake.notify()

    def submit(self, call: Callable[[], Result], *, light: bool = False) -> Future[Result]:
        """Queue a call. Calls of one tenant run in order, `light` ones first.

        A `light` call is short and needs no other core: sampling processes continue during it, and others wait for it
        unless its tenant is more than `LEAD` ahead of them.
        """
        future: Future[Result] = Future()
        with self._wake:
            self.require()
            self._calls.append(_QueuedCall(call, future, light, _payer.get()))
            self._wake.notify()
        return future

    async def run(self, call: Callable[[], Result], *, light: bool = False) -> Result:
        """Run a call on the device and wait for it without blocking the event loop; see `submit`."""
        return await asyncio.wrap_future(self.submit(call, light=light))

    def require(self) -> None:
        """Raise DeviceLost, or RuntimeError after `close`, if nothing runs here any more."""
        if self._lost is not None:
            raise self._lost
        if self._closed:
            raise RuntimeError("the device is closed")

    def examine(self, error: Fault) -> Fault | DeviceLost:
        """The error for those who wait for failed work; call it in the device's thread, before they get it."""
        if isinstance(error, DeviceLost):
            lost: DeviceLost = error
        else:
            try:
                self._check()
                return error
            except Exception as fault:  # of any library
                lost = DeviceLost(f"the device can do no more work ({fault})")
                lost.__cause__ = error
        self.lose(lost)
        return lost

    def lose(self, error: DeviceLost) -> None:
        """Fail every waiting and later call, and end what is `watched`. Thread-safe."""
        with self._wake:
            if self._closed:
                return
            self._lost, self._closed = error, True
            calls = list(self._calls)
            self._calls.clear()
            self._wake.notify()
            self._on_loss()
        for waiting in calls:
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(error)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Cancel the block, run by the current task, as soon as the device is lost. Raises DeviceLost then."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        inside = True

        def cancel() -> None:
            if inside:
                task.cancel()

        with self._wake:
            self._on_loss = lambda: loop.call_soon_threadsafe(cancel)
        try:
            if self._lost is None:
                yield
        except asyncio.CancelledError:
            if self._lost is None:
                raise
            task.uncancel()
        finally:
            inside = False
            with self._wake:
                self._on_loss = lambda: None
        if self._lost is not None:
            raise self._lost

    def charge(self, owners: Mapping[Payer, float]) -> None:
        """Charge the current call to payers in proportion; call it from within that call, before its work."""
        self._owners = owners

    def close(self) -> None:
        """Finish the current call, drop the others and end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        for call in self._calls:
            call.future.cancel()

    def _loop(self) -> None:
        working, owed = False, 0.0
        call: _QueuedCall | None = None
        while True:
            self.beat += self.beat % 2
            with self._wake:
                if call is not None and owed < 0 and working and not self._calls:
                    self._wake.wait(_NEXT_CALL_SECONDS)
                while not self._closed and (self._held or not (self._calls or working or self._woken)):
                    self._wake.wait()
                if self._closed:
                    return
                self._woken = False
                call = self._next_call(owed, working=working)
                ticks = list(self._ticks)
            self.beat += 1
            try:
                if call is not None:
                    begun = self._clock()
                    for _, land in ticks:
                        land()
                    spent = self._clock() - begun
                    self.busy.turns += spent
                    owed -= spent
                    self._turn_to(calling=not call.light)
                    self._owners = {call.payer: 1.0} if call.payer.job else {}
                    begun = self._clock()
                    call.settle(self.examine)
                    spent = self._clock() - begun
                    owed += spent
                    self.busy.turns += spent
                    if self._owners:
                        self.busy.called(spent, {payer.job: part for payer, part in self._owners.items()})
                        self.turns.charge(spent, self._owners.items())
                        self._owners = {}
                    if owed < 0 and working:
                        continue
                self._turn_to(calling=False)
                begun = self._clock()
                left = [tick() for tick, _ in ticks]  # each runs, whether or not one before has more work
                working = any(left)
                spent = self._clock() - begun
                self.busy.turns += spent
                owed = max(owed - spent, -spent) if working else 0.0
            except BaseException as error:  # see add_tick
                if call is not None and not call.future.done():
                    self._calls.append(call)
                self.lose(DeviceLost(f"the device broke down: {error!r}"))
                return

    def _next_call(self, owed: float, *, working: bool) -> _QueuedCall | None:
        """Take the first call of the tenant that has used the least time; None if ticks come first."""
        if not self._calls and not working:
            return None
        self.turns.come({call.payer.tenant for call in self._calls}, _CALLS)
        if not self._calls:
            return None
        most = LEAD + min(self.turns.had(call.payer.tenant) for call in self._calls)
        soon = [call for call in self._calls if call.light and self.turns.had(call.payer.tenant) <= most]
        first = min(soon or self._calls, key=lambda call: self.turns.had(call.payer.tenant))
        ahead = self.turns.ahead(first.payer.tenant, DECODES)
        if working and not soon and (ahead > SLACK or (owed > 0 and ahead >= -SLACK)):
            return None
        self._calls.remove(first)
        return first

    def _turn_to(self, *, calling: bool) -> None:
        if self._turn is not None and calling != self._calling:
            self._turn(calling)
        self._calling = calling

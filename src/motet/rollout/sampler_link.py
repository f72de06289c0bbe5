"""The parent's side of a sampling process: starts it, sends versions and requests, and detects its exit."""

from __future__ import annotations

import asyncio
import itertools
import queue
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from motet.core.device import BusyTime
from motet.core.errors import DeviceError, EngineError
from motet.core.types import AdapterRef, Chunk, GenerateRequest
from motet.model.lora import AdapterWeights
from motet.process.channel import END_SECONDS, StartedChild
from motet.rollout import sampler_messages as m

_MEMORY = Path("/dev/shm")

Outcome = Chunk | Exception


class SamplerLink:
    """One sampling process. It takes requests after it has loaded the base and computed the parent's fingerprint."""

    def __init__(self, load: m.LoadSampler, fingerprint: str, busy: BusyTime, share: float, log: Path | None) -> None:
        """Start the process; it loads in the background.

        `fingerprint` is that of the base in this process. Sampling time, times `share`, is added to `busy`. Errors are
        written to `log`, or discarded.
        """
        self._fingerprint, self._busy, self._share = fingerprint, busy, share
        self._lock = threading.Lock()
        self._versions: dict[AdapterRef, AdapterWeights] = {}
        self._open: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Outcome]]] = {}
        self._keys = itertools.count()
        self._files = tempfile.TemporaryDirectory(prefix="motet-", dir=_MEMORY if _MEMORY.is_dir() else None)
        self._n_files = 0
        self._closing = self._held = False
        self.ready = False
        self.on_ready: Callable[[], None] = lambda: None
        """Called once, in another thread, when the process has loaded the base."""
        self.seconds = 0.0
        """Seconds in which the process sampled, as reported so far."""
        self.note = ""
        """Why the process is not used, for people; empty otherwise."""
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process = StartedChild("motet.rollout.sampler_process", log, **threads)
        self._outbox: queue.SimpleQueue[m.ToSampler | tuple[AdapterRef, AdapterWeights] | None] = queue.SimpleQueue()
        self._outbox.put(replace(load, files=self._files.name))
        self._writer = threading.Thread(target=self._write, name="motet-sampler-out", daemon=True)
        self._writer.start()
        self._reader = threading.Thread(target=self._read, name="motet-sampler", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    # --- to the process ---------------------------------------------------------------------------------------------

    def install(self, ref: AdapterRef, weights: AdapterWeights) -> None:
        """Make a version available in the process."""
        with self._lock:
            self._versions[ref] = weights
            if self.ready:
                self._outbox.put((ref, weights))

    def unload(self, ref: AdapterRef) -> None:
        """Drop a version."""
        with self._lock:
            if self._versions.pop(ref, None) is not None and self.ready:
                self._outbox.put(m.Unload(ref))

    def hold(self, held: bool) -> None:
        """Pause the process, whose core is needed elsewhere, after its current tokens or once it is ready; or resume it."""
        with self._lock:
            self._held = held
            if self.ready:
                self._outbox.put(m.Hold(held))

    def abort(self, name: str) -> None:
        """Abort one request, or every request of a job."""
        if self.ready:
            self._outbox.put(m.Abort(name))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Complete a prompt once per seed; see `RolloutEngine.generate`.

        Raises:
            EngineError: the request can never be served.
            DeviceError: the process died.
        """
        chunks: asyncio.Queue[Outcome] = asyncio.Queue()
        with self._lock:
            if not self.ready:
                raise DeviceError(self.note or "the sampling process is not ready")
            key = next(self._keys)  # request ids may repeat
            self._open[key] = (asyncio.get_running_loop(), chunks)
        self._outbox.put(m.SampleRequest(key, request))
        left = len(request.seeds)
        try:
            while left:
                outcome = await chunks.get()
                if isinstance(outcome, Exception):
                    left = 0
                    raise outcome
                left -= outcome.finish_reason is not None
                yield outcome
        finally:
            self._open.pop(key, None)
            if left:
                self.abort(request.id)

    def close(self) -> None:
        """End the process."""
        self._closing, loaded, self.ready = True, self.ready, False
        if not loaded:  # it does not read messages while it loads
            self._process.kill()
        self._outbox.put(None)
        self._writer.join(END_SECONDS)
        self._process.hang_up(END_SECONDS)
        self._reader.join()
        self._process.close()
        self._files.cleanup()

    def _write(self) -> None:
        """Runs in its own thread, so that publishing does not block the caller; messages keep their order."""
        while (message := self._outbox.get()) is not None:
            sent = self._version(*message) if isinstance(message, tuple) else message
            if sent is not None:
                self._process.send(sent)

    def _version(self, ref: AdapterRef, weights: AdapterWeights) -> m.Install | None:
        """Write a version's bytes to a file that the process deletes after reading; None on failure."""
        self._n_files += 1
        path = Path(self._files.name) / str(self._n_files)
        try:
            weights.flat.view(torch.uint8).numpy().tofile(path)
        except OSError as error:
            self._dismiss(f"a sampling process cannot receive an adapter ({error}); sampling continues without it")
            return None
        layout = weights.layout
        return m.Install(ref, str(path), layout.rank, layout.paths, weights.scaling)

    def _dismiss(self, note: str) -> None:
        """Kill a process that cannot be used; the reader thread fails its requests."""
        self.note, self.ready = note, False
        self._process.kill()

    # --- from the process -------------------------------------------------------------------------------------------

    def _read(self) -> None:
        for message in self._process.messages(m.FromSampler):
            self._handle(message)
        how = self._process.how_it_ended()
        with self._lock:
            if not self._closing:
                self.note = self.note or f"a sampling process {how}; sampling continues without it"
            self.ready = False
            waiting = list(self._open)
        for key in waiting:
            self._put(key, DeviceError("the sampling process died"))

    def _begin(self, fingerprint: str) -> None:
        with self._lock:
            if fingerprint != self._fingerprint:
                self._dismiss("a sampling process computes different bits than this one, so it is not used")
            for ref, weights in self._versions.items():
                if not self.note:
                    self._outbox.put((ref, weights))
            self.ready = not self.note
            if self.ready and self._held:
                self._outbox.put(m.Hold(True))
        self.on_ready()

    def _handle(self, message: m.FromSampler) -> None:
        match message:
            case m.SamplerReady():
                self._begin(message.fingerprint)
            case m.SamplerFailed():
                self.note = f"a sampling process could not load the base: {message.reason}"
            case m.Busy():
                self._busy.decoded(message.decode * self._share, message.full * self._share, message.parts)
                self.seconds += message.decode
            case m.Chunks():
                self._put(message.key, message.chunk)
            case m.RequestRefused():
                self._put(message.key, EngineError(message.reason))
            case m.Broken():
                self._put(message.key, DeviceError(message.reason))

    def _put(self, key: int, outcome: Outcome) -> None:
        loop, chunks = self._open.get(key, (None, None))
        if loop is not None and chunks is not None and not loop.is_closed():
            loop.call_soon_threadsafe(chunks.put_nowait, outcome)

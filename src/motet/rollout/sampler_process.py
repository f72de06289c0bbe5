"""A sampling process: the same base and engine as in the parent, with one torch thread.

Two Python threads that each make thousands of small torch calls per second contend for the interpreter's lock; two
processes do not. The parent (`motet.rollout.sampler_link`) sends messages over the channel. The process exits when its
input ends, which also happens when the parent dies.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motet.core.device import Device
from motet.core.errors import EngineError, MotetError
from motet.core.types import GenerateRequest
from motet.kernels.supported_bases import compute_with
from motet.model import lean_import
from motet.model.load import load_base
from motet.model.lora import AdapterWeights
from motet.process.allocator import keep_freed_memory
from motet.process.channel import Parent
from motet.rollout import sampler_messages as m
from motet.rollout.embedded import EmbeddedEngine

_BUSY_SECONDS = 0.5


class SamplerProcess:
    """Handles the parent's messages in order."""

    def __init__(self, load: m.LoadSampler, parent: Parent[m.ToSampler]) -> None:
        self._parent = parent
        self.base = load_base(
            load.base,
            dtype=load.dtype,
            device="cpu",
            block_size=load.block_size,
            pack=load.pack,
            base_format=load.base_format,
            trust_remote_code=load.trust_remote_code,
            leaves=lambda base: load.kernels != "torch",
        )
        compute_with(self.base, load.kernels)
        self.device = Device()
        self.engine = EmbeddedEngine(self.base, self.device, **load.limits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sent = (0.0, 0.0)
        """Reported decoding seconds, and those with a full batch."""

    async def serve(self) -> None:
        """Handle messages until the input ends."""
        messages = self._parent.queue()
        reporting = asyncio.create_task(self._report_busy())
        while (message := await messages.get()) is not None:
            self.handle(message)
        reporting.cancel()

    def handle(self, message: m.ToSampler) -> None:
        """Start the work of one message. Never waits: the next message may resume the device."""
        match message:
            case m.SampleRequest():
                self._begin(self._generate(message.key, message.request))
            case m.Install():
                self._install(message)
            case m.Unload():
                self._begin(self.engine.unload_adapter(message.ref))
            case m.Abort():
                self._begin(self.engine.abort(message.name))
            case m.Hold(held=True):
                self.device.hold()
            case m.Hold():
                self.device.go()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, key: int, request: GenerateRequest) -> None:
        try:
            async for chunk in self.engine.generate(request):
                self._parent.send(m.Chunks(key, chunk))
            self._send_busy()
        except EngineError as error:
            self._parent.send(m.RequestRefused(key, str(error)))
        except Exception as error:  # the parent then samples this request itself
            self._parent.send(m.Broken(key, f"{type(error).__name__}: {error}"))

    async def _report_busy(self) -> None:
        """Report finished work twice a second; short requests report when they end."""
        while True:
            await asyncio.sleep(_BUSY_SECONDS)
            self._send_busy()

    def _send_busy(self) -> None:
        decode, full = self._sent
        busy = self.device.busy
        seconds, parts, _ = busy.take()
        if seconds > decode:
            self._sent = seconds, busy.full
            self._parent.send(m.Busy(seconds - decode, self._sent[1] - full, parts))

    def _install(self, message: m.Install) -> None:
        path = Path(message.file)
        layout = self.base.adapter_layout(message.paths, message.rank)
        flat = torch.from_numpy(np.fromfile(path, np.uint8)).view(self.base.dtype)
        path.unlink()
        weights = AdapterWeights(layout, message.scaling, flat)
        self.engine.install(message.ref, weights)


def main() -> None:
    """Entry point of the process."""
    keep_freed_memory()
    lean_import.allow()
    torch.set_num_threads(1)
    parent = Parent[m.ToSampler](m.ToSampler)
    load = parent.first()
    if not isinstance(load, m.LoadSampler):
        return
    try:
        process = SamplerProcess(load, parent)
        parent.send(m.SamplerReady(process.base.fingerprint()))
        asyncio.run(process.serve())
    except MotetError as error:
        parent.send(m.SamplerFailed(str(error)))
    finally:
        shutil.rmtree(load.files, ignore_errors=True)  # a killed parent leaves them behind
    os._exit(0)  # do not wait for open completions, which nobody reads


if __name__ == "__main__":
    main()

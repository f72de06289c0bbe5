"""A second place to sample, in a process of its own: the same base, the same engine, one torch thread.

Two Python threads that each make thousands of small torch calls a second spend their time handing the interpreter's lock
to each other; two processes do not. The parent (`motet.rollout.sampler_link`) sends one JSON object a line on standard
input; replies go out on standard output. The process ends when its input does, also when the parent dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from motet.allocator import keep_freed_memory
from motet.device import Device
from motet.errors import EngineError, MotetError
from motet.model.load import load_base
from motet.model.lora import AdapterWeights
from motet.rollout import wire
from motet.rollout.embedded import EmbeddedEngine

_TELL_SECONDS = 0.5


class SamplerProcess:
    """Answers the parent's messages in the order they come."""

    def __init__(self, hello: dict[str, Any], out: BinaryIO) -> None:
        self._out = out
        self.base = load_base(
            hello["base"],
            dtype=hello["dtype"],
            device="cpu",
            block_size=hello["block_size"],
            pack=hello["pack"],
            trust_remote_code=hello["trust_remote_code"],
        )
        self.device = Device()
        limits = {name: hello[name] for name in ("max_rows", "kv_tokens", "prefill_tokens")}
        self.engine = EmbeddedEngine(self.base, self.device, **limits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: tuple[float, float, dict[str, int]] = (0.0, 0.0, {})
        """Seconds of decoding, with a full batch, and tokens by job, as far as the parent knows."""

    def say(self, **message: Any) -> None:
        """Send one message."""
        self._out.write(wire.line(**message))
        self._out.flush()

    def handle(self, message: dict[str, Any]) -> None:
        """Begin what one message asks. Nothing is waited for: the message that lets the device go on may be the next."""
        match message["do"]:
            case "generate":
                self._begin(self._generate(message["key"], message["request"]))
            case "install":
                self._install(message)
            case "unload":
                self._begin(self.engine.unload_adapter(wire.ref_in(message["ref"])))
            case "abort":
                self._begin(self.engine.abort(message["name"]))
            case "hold":
                self.device.hold()
            case "go":
                self.device.go()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, key: int, value: dict[str, Any]) -> None:
        try:
            async for chunk in self.engine.generate(wire.request_in(value)):
                self.say(key=key, chunk=wire.chunk_out(chunk))
            self._tell()
        except EngineError as error:
            self.say(key=key, refused=str(error))
        except Exception as error:  # whatever went wrong here need not go wrong in the parent, which samples it then
            self.say(key=key, broken=f"{type(error).__name__}: {error}")

    async def tell_busy(self) -> None:
        """Say twice a second what was done; of short requests it is said when they end."""
        while True:
            await asyncio.sleep(_TELL_SECONDS)
            self._tell()

    def _tell(self) -> None:
        """Say what was done since the last time, where something was."""
        decode, full, before = self._told
        seconds, sampled, _ = self.device.busy.read()
        if seconds > decode:
            self._told = (seconds, self.device.busy.full, sampled)
            new = {name: n - before.get(name, 0) for name, n in sampled.items() if n > before.get(name, 0)}
            self.say(busy=[seconds - decode, self._told[1] - full, new])

    def _install(self, message: dict[str, Any]) -> None:
        path = Path(message["file"])
        layout = self.base.adapter_layout(message["paths"], message["rank"])
        flat = torch.from_numpy(np.fromfile(path, np.uint8)).view(self.base.dtype)
        path.unlink()
        weights = AdapterWeights(layout, message["scaling"], flat, layout.matrices(flat))
        self.engine.install(wire.ref_in(message["ref"]), weights)


async def _serve(process: SamplerProcess, lines: BinaryIO) -> None:
    """Read messages in a thread of their own until the input ends."""
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def read() -> None:
        for line in lines:
            loop.call_soon_threadsafe(messages.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(messages.put_nowait, None)

    threading.Thread(target=read, name="motet-messages", daemon=True).start()
    telling = asyncio.create_task(process.tell_busy())
    while (message := await messages.get()) is not None:
        process.handle(message)
    telling.cancel()


def main() -> None:
    """Entry point of the process."""
    keep_freed_memory()
    torch.set_num_threads(1)
    lines, out = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that a library prints may pass for a message
    hello = json.loads(lines.readline())
    try:
        process = SamplerProcess(hello, out)
        process.say(ready=process.base.fingerprint())
        asyncio.run(_serve(process, lines))
    except MotetError as error:
        out.write(wire.line(failed=str(error)))
        out.flush()
    finally:
        shutil.rmtree(hello["files"], ignore_errors=True)  # a parent that was killed leaves them behind
    os._exit(0)  # what is still being sampled has nobody left to read it


if __name__ == "__main__":
    main()

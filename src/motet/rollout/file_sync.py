"""Versions for servers: PEFT directories, after a test that the servers apply every kind of layer that an adapter changes.

A server may drop in silence what it was not started for. So before the first version of an adapter, each kind of its layers
is loaded alone, with strong weights: a server that then answers with the base's logprobs drops that kind.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from motet.config.adapters import ADAPTERS, adapter_type
from motet.core.errors import ProbeError, ServerRefused
from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterRef, IntArray
from motet.protocols import Trainer
from motet.rollout.server import ServerEngine

_STRENGTH = 4.0
"""Deviation of what a test adapter adds to the outputs of a layer with normalised inputs, which are about 1."""


class FileSync:
    """A `WeightSync` for servers: a version is a PEFT directory that they load."""

    def __init__(self, engine: ServerEngine, trainer: Trainer, token_ids: IntArray | None = None) -> None:
        """`token_ids` are the text of the test; without, there is none."""
        self._engine, self._trainer, self._token_ids = engine, trainer, token_ids
        self._turn = asyncio.Lock()
        self._tested, self._applied = set[str](), set[str]()
        """Adapters, and kinds of layers that all servers apply."""

    async def publish(self, name: str, ref: AdapterRef) -> None:
        """Make the trainer's current weights of adapter `name` available under this reference.

        Raises:
            ProbeError: a server drops layers that the adapter changes.
        """
        if self._token_ids is not None and ref.name not in self._tested:
            async with self._turn:
                await self._test(name, ref, self._token_ids)
            self._tested.add(ref.name)
        await self._engine.take(ref, lambda staged: self._trainer.save_adapter(name, staged, optimizer=False))

    async def _test(self, name: str, ref: AdapterRef, token_ids: IntArray) -> None:
        config, kinds = await asyncio.to_thread(self._read, name)
        dropped = dict[str, str]()
        for kind, tensors in kinds.items():
            if kind in self._applied:
                continue
            test = AdapterRef(f"{ref.name}.{kind}", ref.version)
            try:
                await self._engine.take(test, partial(_write, config, tensors))
                urls = await self._engine.versions.unmoved(test, token_ids, self._engine.fleet)
            except ServerRefused:  # it then refuses the version too, and says why
                continue
            finally:
                await self._engine.unload_adapter(test)
            if urls:
                dropped[kind.rpartition(".")[2]] = ", ".join(urls)
            else:
                self._applied.add(kind)
        if dropped:
            named = " ".join(sorted({kind.rpartition(".")[2] for kind in kinds}))
            raise ProbeError(
                f"{next(iter(dropped.values()))} drops what adapter {name!r} says of {', '.join(sorted(dropped))}, without an "
                f"error: start it with --lora-target-modules {named}, or name other layers in adapter.target_modules"
            )

    def _read(self, name: str) -> tuple[dict[str, Any], Mapping[str, dict[str, Any]]]:
        """The adapter's configuration, and its tensors by kind: the last two words of a layer's path that are no number."""
        with tempfile.TemporaryDirectory() as place:
            self._trainer.save_adapter(name, Path(place), optimizer=False)
            config = json.loads((Path(place) / ADAPTER_CONFIG).read_text("utf-8"))
            kinds = defaultdict[str, dict[str, Any]](dict)
            for tensor, values in load_file(Path(place) / ADAPTER_WEIGHTS).items():
                words = re.findall(r"[A-Za-z]\w*", tensor.partition(".lora_")[0].replace(".base_layer", ""))
                kinds[".".join(words[-2:])][tensor] = values
        return config, kinds


def _write(config: dict[str, Any], tensors: Mapping[str, Any], place: Path) -> None:
    """An adapter with strong weights on these layers only."""
    draws, strong = np.random.default_rng(0), {}
    scale = ADAPTERS[adapter_type(config)].scale_of(config["r"], config["lora_alpha"])
    for name, old in tensors.items():
        size = old.shape[1] ** -0.5 if ".lora_A." in name else _STRENGTH / (scale * config["r"] ** 0.5)
        strong[name] = (size * draws.standard_normal(old.shape)).astype(np.float32)
    paths = sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors})
    experts = [path for path in config.get("target_parameters") or () if path.rpartition(".")[0] in paths]
    own = {**config, "target_modules": [] if experts else paths, **({"target_parameters": experts} if experts else {})}
    if not experts:
        own.pop("target_parameters", None)
    (place / ADAPTER_CONFIG).write_text(json.dumps(own), "utf-8")
    (place / ADAPTER_WEIGHTS).write_bytes(save(strong, {"format": "pt"}))

"""Loaded by vLLM's workers (`--worker-extension-cls motet_vllm.FetchedAdapters`): adapters as tensors, without files.

A path that begins with `PREFIX` is an address: the worker fetches the adapter from there into its memory, and vLLM keeps it as
one that it has read. All else stays vLLM's: names, order, eviction, and a load when an adapter that was evicted is asked for.

It stands in a folder of its own, which is put on PYTHONPATH, and imports nothing of Motet: vLLM has an environment of its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import time
import urllib.request
from typing import Any

import vllm
from safetensors.torch import load
from vllm.logger import init_logger
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.lora.worker_manager import WorkerLoRAManager

PREFIX = "/fetched-by-motet/"
TESTED = ("0.32.0",)
"""Versions of vLLM that the tests have run: what is used here is not public."""
_ATTEMPTS = 4
_SECONDS = 60.0

# below vLLM's own name, whose level and format are set
_log = init_logger("vllm.motet")
_FROM_FILES = WorkerLoRAManager._load_adapter


class FetchedAdapters:
    """Added to vLLM's worker; to be loaded with it is all it is for."""


def fetch(address: str) -> bytes:
    """The bytes behind an address that ends in their SHA-256.

    Raises:
        RuntimeError: they are not to be had, or not what they should be.
    """
    url, _, digest = address.partition("#")
    key = os.environ.get("VLLM_API_KEY")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for attempt in range(_ATTEMPTS):
        try:
            with opener.open(request, timeout=_SECONDS) as answer:
                content = bytes(answer.read())
            if hashlib.sha256(content).hexdigest() == digest:
                return content
            problem = "other bytes arrived than were sent"
        except OSError as error:
            problem = str(error)
        time.sleep(0.1 * 2**attempt)
    raise RuntimeError(f"{url} cannot be fetched: {problem}")


def _load_adapter(manager: Any, request: Any) -> Any:
    """What vLLM does with the files of a directory, with what was fetched."""
    if not request.lora_path.startswith(PREFIX):
        return _FROM_FILES(manager, request)
    content = fetch(request.lora_path.removeprefix(PREFIX))
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        config, weights = (
            archive.extractfile(name).read() for name in ("adapter_config.json", "adapter_model.safetensors")
        )
    adapters, tensors = manager._adapter_manager, load(weights)
    peft = PEFTHelper.from_dict(
        {**json.loads(config), "vllm_max_position_embeddings": manager.max_position_embeddings}
    )
    peft.validate_legal(manager.lora_config)
    mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    _refuse_unexpected(adapters, tensors, mapper)
    lora = manager._lora_model_cls.from_lora_tensors(
        request.lora_int_id,
        tensors,
        peft,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper,
        skip_prefixes=getattr(adapters.model, "lora_skip_prefixes", None),
    )
    adapters._validate_moe_lora_format(lora)
    return lora


def _refuse_unexpected(adapters: Any, tensors: Any, mapper: Any) -> None:
    """vLLM would pass over weights of layers that it does not adapt."""
    expected = {
        name
        for module in adapters.supported_lora_modules
        for name in adapters.packed_modules_mapping.get(module, [module])
    }
    names = {parse_fine_tuned_lora_name(name, mapper)[0] for name in tensors}
    if unexpected := sorted(name for name in names if name.rpartition(".")[2] not in expected):
        raise ValueError(f"the server adapts {sorted(expected)}, and the adapter has weights of {unexpected}")


if vllm.__version__.partition("+")[0] in TESTED:
    WorkerLoRAManager._load_adapter = _load_adapter
else:
    _log.warning("Motet has not been tried with vLLM %s: adapters are read from files", vllm.__version__)

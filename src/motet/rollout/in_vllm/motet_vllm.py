"""Loaded by vLLM's workers (`--worker-extension-cls EXTENSION`): loads adapters as tensors, without files.

A path with the prefix `PREFIX` is an address: the worker fetches the adapter into its memory, and vLLM treats it as one
read from disk. vLLM keeps control of names, order, eviction and reloading.

vLLM has its own environment. Only this folder is on its PYTHONPATH, so nothing of Motet is imported here.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import logging
import os
import sys
import tarfile
import time
import urllib.error
import urllib.request
from typing import Any

EXTENSION = "motet_vllm.FetchedAdapters"
PREFIX = "/fetched-by-motet/"
"""Without this module, vLLM reports such a path as a missing directory."""
TESTED = ("0.30.0", "0.31.0", "0.32.0")
"""vLLM releases covered by tests, oldest first; this module uses private APIs."""
_ATTEMPTS = 3
_SECONDS = 30.0
_FILES = ("adapter_config.json", "adapter_model.safetensors")


class FetchedAdapters:
    """Mixed into vLLM's worker so that vLLM imports this module; it adds nothing."""


def fetch(location: str, key: str | None) -> bytes:
    """Fetch from a location: `PREFIX`, its URL, # and the SHA-256 of the bytes.

    Raises:
        RuntimeError: it cannot be fetched, or the bytes differ.
    """
    url, _, digest = location.removeprefix(PREFIX).partition("#")
    if not url.startswith("http://"):
        raise RuntimeError(f"{url} is no address that versions are fetched from")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    problem = ""
    for attempt in range(_ATTEMPTS):
        time.sleep(0.2 * attempt)
        try:
            with opener.open(request, timeout=_SECONDS) as answer:
                content = bytes(answer.read())
            if hashlib.sha256(content).hexdigest() == digest:
                return content
            problem = "other bytes arrived than were sent"
        except urllib.error.HTTPError as error:
            error.close()
            raise RuntimeError(f"{url} answers {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            problem = str(error)
    raise RuntimeError(f"{url} cannot be fetched: {problem}")


def _install() -> None:
    """Patch vLLM's workers to accept locations as paths, in tested releases only."""
    import vllm
    from vllm.lora.worker_manager import WorkerLoRAManager

    if vllm.__version__.partition("+")[0] not in TESTED:
        # a child of vLLM's logger, which has level and format
        logging.getLogger("vllm.motet").warning(
            "Motet is not tested with vLLM %s: it loads adapters from files only", vllm.__version__
        )
        return
    from_files = WorkerLoRAManager._load_adapter

    def load_adapter(self: Any, request: Any) -> Any:
        return _fetched(self, request) if request.lora_path.startswith(PREFIX) else from_files(self, request)

    WorkerLoRAManager._load_adapter = load_adapter


def _fetched(manager: Any, request: Any) -> Any:
    """Load fetched content as `WorkerLoRAManager._load_adapter` loads a directory."""
    content = fetch(request.lora_path, os.environ.get("VLLM_API_KEY"))
    from safetensors.torch import load
    from vllm.lora.peft_helper import PEFTHelper

    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        config, weights = (archive.extractfile(name).read() for name in _FILES)  # type: ignore[union-attr]
    adapters, tensors = manager._adapter_manager, load(weights)
    positions = manager.max_position_embeddings
    helper = PEFTHelper.from_dict({**json.loads(config), "vllm_max_position_embeddings": positions})
    helper.validate_legal(manager.lora_config)
    renames = getattr(adapters.model, "hf_to_vllm_mapper", None)
    renames = None if renames is None else renames.get_rename_mapper()
    _refuse_unexpected(adapters, tensors, renames)
    lora = manager._lora_model_cls.from_lora_tensors(
        request.lora_int_id,
        tensors,
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=renames,
        skip_prefixes=getattr(adapters.model, "lora_skip_prefixes", None),
    )
    if hasattr(adapters, "_validate_moe_lora_format"):  # as for files: from vLLM 0.32
        adapters._validate_moe_lora_format(lora)
    return lora


def _refuse_unexpected(adapters: Any, tensors: Any, renames: Any) -> None:
    """Reject weights for layers that the server does not adapt; vLLM would ignore them silently."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    packed = adapters.packed_modules_mapping
    expected = {name for module in adapters.supported_lora_modules for name in packed.get(module, [module])}
    layers = {parse_fine_tuned_lora_name(name, renames)[0] for name in tensors}
    if unexpected := sorted(name for name in layers if name.rpartition(".")[2] not in expected):
        raise ValueError(f"the server adapts {sorted(expected)}, and the adapter has weights of {unexpected}")


if "vllm" in sys.modules:  # only inside vLLM's worker
    _install()

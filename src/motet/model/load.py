"""Load, wrap and prove a base model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from motet.core.errors import BaseModelError
from motet.model.accelerator import add_in_full_precision, place_of
from motet.model.arithmetic import Arithmetic
from motet.model.experts import has_experts
from motet.model.find import find_files
from motet.model.lean_import import import_transformers
from motet.model.lora_model import LoraModel, wrap
from motet.model.packed import BaseFormat, n_hidden
from motet.model.proof import prove
from motet.model.shards import Shards
from motet.process.allocator import without_collections

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOKENIZERS = ("tokenizer*", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
"""File patterns; a directory with a tokenizer matches at least one."""

_READ = "It's 31 of 2026,\n\n  don\u2019t cafe\u0301 3.14 \u4e2d\u6587"
"""A text with what rules treat differently: digits, runs of spaces, accents, letters without spaces."""


@without_collections()
def load_base(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    block_size: int = 64,
    pack: bool = True,
    trust_remote_code: bool = False,
    base_format: BaseFormat = "auto",
    arithmetic: Arithmetic | None = None,
    shards: Shards | None = None,
    check: Callable[[Any], None] = lambda config: None,
    leaves: Callable[[LoraModel], bool] = lambda base: False,
) -> LoraModel:
    """Load, wrap and prove a base model; with `shards`, as one rank of several. `arithmetic` overrides the default.

    `check` is called with the configuration before weights are read, and may raise. If `leaves` returns True, other
    kernels will compute the passes, so torch's products are neither prepared nor checked for exactness.

    Raises:
        BaseModelError: it cannot be found or loaded, or failed the proof; the message suggests alternatives.
    """
    import_transformers()
    place = place_of(device)
    add_in_full_precision(place)
    model, tokenizer = _load(name, dtype, trust_remote_code, base_format, place, check)
    # shards move to their device layer by layer
    model.to(place if shards is None else "cpu").eval().requires_grad_(False)
    limited = _limit_batch_dependent_positions(model) or _limit_batch_dependent_scales(model)
    arithmetic = Arithmetic.of(place, model.dtype, experts=has_experts(model)) if arithmetic is None else arithmetic
    base = prove(
        lambda: wrap(name, model, tokenizer, place, shards=shards is not None),
        model,
        name,
        block_size,
        arithmetic,
        pack=pack,
        shards=shards,
        leaves=leaves,
    )
    if n_hidden(model):
        base.revise(
            "its weights stay packed as they are stored: less memory, the same bits, slower (engine.base_format)"
        )
    if base.towers:
        base.revise(
            f"reads only text: its {' and '.join(base.towers)} is left out, and messages with images are refused"
        )
    if reads_otherwise(name, tokenizer):
        base.revise(
            f"transformers reads text by other rules than its tokenizer.json has, as model_type is {model.config.model_type}: "
            "llama.cpp and other programs that follow the file split digits, spaces or accents otherwise than in training"
        )
    if limited:
        base.revise(
            f"sequences are limited to {base.info.max_positions} tokens: beyond that its {limited} looks at the whole batch, "
            "and one job would change another's results"
        )
    return base


def reads_otherwise(name: str, tokenizer: Any) -> bool:
    """Whether a base's tokenizer makes other tokens of a text than its file, whose rules transformers may replace."""
    from tokenizers import Tokenizer
    from transformers.utils.hub import cached_file

    source, gguf = find_files(name)
    file = None if gguf else cached_file(source, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if file is None or (read := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return False
    own = json.loads(Path(file).read_text("utf-8"))
    parts = {part: getattr(read, part) for part in ("pre_tokenizer", "normalizer")}
    if all(own.get(part) == (None if now is None else json.loads(now.__getstate__())) for part, now in parts.items()):
        return False
    written = Tokenizer.from_file(str(file))
    return bool(written.encode(_READ, add_special_tokens=False).ids != read.encode(_READ, add_special_tokens=False).ids)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a base that is not loaded here."""
    import transformers

    source, gguf = find_files(name)
    options = {} if gguf is None else {"gguf_file": gguf}
    return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)


def _load(
    name: str,
    dtype: str,
    trust_remote_code: bool,
    base_format: BaseFormat,
    place: torch.device,
    check: Callable[[Any], None],
) -> tuple[Any, Any]:
    import transformers

    from motet.model.checkpoint import BaseCheckpoint

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source, gguf = find_files(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        checkpoint = BaseCheckpoint.of(source, gguf, trust_remote_code)
        check(checkpoint.config)
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        wanted: Any = DTYPES.get(dtype, torch.bfloat16 if checkpoint.method else "auto")
        model, report = (
            checkpoint.packed(wanted, options)
            if checkpoint.stays_packed(base_format, wanted, place)
            else checkpoint.unpacked(wanted, options)
        )
    except BaseModelError:
        raise
    except Exception as error:  # configurations, files and model code fail in many ways
        if "trust_remote_code" in str(error):
            raise BaseModelError(
                f"base {name!r} contains Python code that would run here; if you trust it, add "
                "--trust-remote-code to motet run or motet check"
            ) from error
        if (files := Path(source)).is_dir() and gguf is None and not any(any(files.glob(name)) for name in _TOKENIZERS):
            raise BaseModelError(
                f"{files} has no tokenizer; put tokenizer.json and tokenizer_config.json of its model there"
            ) from error
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BaseModelError(
            f"base {name!r} cannot be loaded: {reason.rstrip('.')}; use another base: a hub id, a directory, a .gguf file, "
            "`smollm2` (after `make smollm2`) or `small`"
        ) from error
    model.quantised_as = checkpoint.method
    _check_weights(name, model, report)
    if dtype == "auto" and model.dtype not in DTYPES.values():
        model.bfloat16()
    return model, tokenizer


def _check_weights(name: str, model: Any, report: dict[str, Any]) -> None:
    """Reject unsupported quantised weights and missing weights, which would be random."""
    if getattr(model, "is_quantized", False) and not n_hidden(model):
        method = model.config.quantization_config.quant_method.value
        raise BaseModelError(
            f"base {name!r} is quantised ({method}), and Motet needs weights in float32 or bfloat16; use the base "
            "that it was quantised from"
        )
    absent = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise BaseModelError(
            f"base {name!r} lacks weights that its config.json asks for, or has them in another shape: {absent[0]}{more}; "
            "download all of its files again, from one source"
        )


def _limit_batch_dependent_positions(model: Any) -> str:
    """Limit `longrope` and `dynamic` RoPE to their original length; returns their name, or an empty text."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    kinds = sorted({"longrope", "dynamic"} & {str(part.get("rope_type")) for part in parts})
    if kinds:
        originals = [part.get("original_max_position_embeddings") for part in parts]
        limits = [int(original) for original in originals if original]
        config.max_position_embeddings = min([*limits, config.max_position_embeddings])
    return " and ".join(kinds) and f"{' and '.join(kinds)} position encoding"


def _limit_batch_dependent_scales(model: Any) -> str:
    """Limit Llama 4 to the length up to which all attention scales are one; they depend on positions in the batch."""
    tuned = [module for module in model.modules() if getattr(module, "attn_temperature_tuning", False)]
    if not tuned:
        return ""
    config = model.config.get_text_config()
    config.max_position_embeddings = min(config.max_position_embeddings, *(int(part.floor_scale) - 1 for part in tuned))
    for module in tuned:
        module.attn_temperature_tuning = False
    return "attention temperature"

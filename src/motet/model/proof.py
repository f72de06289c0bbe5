"""Check a base before it is used; a base that does not reproduce the stock model is refused.

On two short random sequences, each attention layer must call its function once. Logits must match transformers' eager
attention (with the same experts chosen) within a multiple of the stock model's own noise (`judge`), and each layer must
match it on the same input (`compare_layers`). A backward pass through all adapters must run.
Packed, cached and solo passes should agree bit for bit; if not, `inexact` gives the reason and the difference.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from motet.core.errors import BaseModelError
from motet.model.arithmetic import Arithmetic, round_up
from motet.model.attention import INSTEAD, LayerCall
from motet.model.exactness import RANK, check_exactness, packed_hidden, packed_logits
from motet.model.layer_comparison import compare_layers
from motet.model.lora import AdapterWeights, FusedLinears, LoraLinear, NoAdapters, fuse
from motet.model.lora_model import LoraModel
from motet.model.mlp_tiles import cut_mlps
from motet.model.norm import speed_up_norms
from motet.model.peft_io import refused_by_peft
from motet.model.reference_model import LENGTHS, Stock, proof_sequences
from motet.model.routing import TrainerRouting, TrainSegment
from motet.model.shards import Shards
from motet.model.simd_safe_functions import Uneven, take_whole_vectors
from motet.model.tolerance import MULTIPLE, LogitsVerdict, judge
from motet.model.unit_sums import UnitSums

Found = TypeVar("Found")

_MIXERS = ("attention", "attn", "mixer", "mamba", "conv")
"""Words in the names of modules that mix positions."""
_MIX_NOTHING = ("mlp", "moe")
"""Layer types without a mixer."""
REASON = 3
"""Gap of logits, as a multiple of the accepted one, up to which the layers decide, one by one."""


def prove(
    wrapper: Callable[[], LoraModel],
    model: Any,
    name: str,
    block_size: int,
    arithmetic: Arithmetic | None = None,
    *,
    pack: bool = True,
    shards: Shards | None = None,
    leaves: Callable[[LoraModel], bool] = lambda base: False,
) -> LoraModel:
    """Wrap a stock eager model and check that it computes the same; with `shards`, all ranks call this together.

    If `leaves(base)` is true, the caller replaces torch's kernels and checks exactness itself.

    Raises:
        BaseModelError: a check failed; the message names it.
    """
    with torch.no_grad(), _refused(f"{name} does not run in transformers itself"):
        stock = Stock(model)
    with torch.no_grad(), _refused(f"{name} does not run as Motet runs it"):
        base = wrapper()
        base.block_size, arithmetic, place = block_size, arithmetic or Arithmetic(), base.device
        base.noise, logits = stock.noise, stock.logits
        if shards is not None:  # no GPU needs memory for the whole base
            base.device = model.device
        here = arithmetic if base.device.type == place.type else Arithmetic()
        calls, watch = _computed(base, here, functools.partial(_first_pass, base, stock))
        del stock  # it holds weights that are about to be copied
        watch.mark(base)
        _leave_out(base, watch)
        if shards is None:
            watch.fuse(base, base.decoder)
        else:
            speed_up_norms(base.decoder)  # while their weights are whole
            keep_experts = shards.settle(base.model, base.decoder, functools.partial(watch.fuse, base))
            base.shards, base.device = shards, place
            if keep_experts:
                base.revise("each rank keeps some of the experts and computes them for the rows of all ranks")
            moved = [each.to(place) for each in logits]
            _computed(base, arithmetic, lambda: _second_pass(base, moved))
        base.compute_with(base.arithmetic)  # also for the fused weights
        _limit_to_window(base, {call.layer: call.window for call in calls})
        if not leaves(base):
            stay_with_torch(base, pack=pack)
    return base


@torch.no_grad()
def stay_with_torch(base: LoraModel, *, pack: bool) -> None:
    """Prepare a base for torch's products: reorder weights, run MLPs in tiles, check exactness and a training step."""
    if pack and base.shards is None:
        base.reorder_weights()
    if base.shards is None:
        with _refused(f"{base.info.name} does not run as Motet runs it"):
            speed_up_norms(base.decoder)
    cut_mlps(base)
    sequences = proof_sequences(base.model)
    with base.routed(NoAdapters()):
        check_exactness(base, sequences)
    with _refused(f"{base.info.name} can be sampled from, but an adapter on it cannot be trained"):
        check_training(base, sequences[0].to(base.device))


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """Convert any exception of a model into a `BaseModelError` that names the module."""
    try:
        yield
    except BaseModelError:
        raise
    except Exception as error:  # models raise exceptions of any kind
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise BaseModelError(f"{what}: {_where(error)}{reason}; {INSTEAD}") from error


def _where(error: Exception) -> str:
    """Class of the innermost running module of the model, as "Name: "; empty if there is none."""
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [type(caller).__name__ for caller in callers if isinstance(caller, nn.Module) and not _is_ours(caller)]
    return f"{names[-1]}: " if names else ""


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("motet.", "torch."))


def _first_pass(base: LoraModel, stock: Stock) -> tuple[list[LayerCall], _Watch]:
    """Run a packed pass and check its calls, logits and layers; returns the attention calls and the recorded facts."""
    watch, uneven, routers = _Watch(), Uneven(base.model), stock.routers.of(base.model)
    with base.routed(watch), routers.replayed(), uneven if base.device.type == "cpu" else contextlib.nullcontext():
        packed, calls = packed_logits(base, stock.sequences)
    for module in uneven.modules:
        take_whole_vectors(module)
    _check_calls(base, [call.layer for call in calls])
    verdict = _check_logits(base, packed, stock.logits)
    with base.routed(NoAdapters()), routers.replayed():
        worst = compare_layers(base, stock, thorough=not verdict.close)
    if worst is None and not verdict.close:
        raise _differs(base, verdict)
    if worst is not None and not worst.close:
        raise BaseModelError(f"{base.info.name}: {worst}; Motet does not understand something in it; {INSTEAD}")
    return calls, watch


def _computed(base: LoraModel, arithmetic: Arithmetic, passes: Callable[[], Found]) -> Found:
    """Run passes with an arithmetic, or with a slower one if its kernels fail; returns their result."""
    try:
        base.compute_with(arithmetic)
        found = passes()
        if arithmetic.attention == "triton":
            _backward_pass(base, proof_sequences(base.model))
    except Exception as error:  # kernels are compiled here, which can raise any exception
        if arithmetic.attention == "torch":
            raise
        base.compute_slower(replace(arithmetic, attention="torch", graphs=False), "kernels and graphs", error)
        return passes()
    return found


def _second_pass(base: LoraModel, stock: list[Tensor]) -> None:
    """Check a sharded base's logits on its device; not with experts, because rounding may change the chosen ones."""
    with base.routed(NoAdapters()):
        packed, _ = packed_logits(base, proof_sequences(base.model))
    if not base.has_experts:
        _check_logits(base, packed, stock)


def check_training(base: LoraModel, sequence: Tensor) -> None:
    """Run a training step like a job's, with a sum as the loss: a failure here would occur in every job."""
    layout = base.adapter_layout("all-linear", RANK)
    weights = AdapterWeights.from_masters(layout, 1.0, torch.full((layout.size,), 1e-3, device=base.device), base.dtype)
    rows = round_up(len(sequence), base.arithmetic.rows)
    sums = UnitSums.empty(layout.size, base.device)
    segment = TrainSegment(0, rows, weights, layout.matrices(sums.flat), sums=sums)
    routing = TrainerRouting([segment], base.device, base.products, backward=True)
    with torch.enable_grad(), base.routed(routing):
        packed_hidden(base, [sequence])[0][0].float().sum().backward()


def _backward_pass(base: LoraModel, sequences: list[Tensor]) -> None:
    """Compile the kernels of the backward pass now, while a fallback is possible, not in the first job's first step."""
    routing = TrainerRouting([], base.device, base.products, backward=True)
    with torch.enable_grad(), base.routed(routing):
        hidden, _ = packed_hidden(base, sequences)
        torch.cat(hidden).float().sum().backward()


class _Watch:
    """A routing without adapters that records facts about linear layers.

    The facts are how many rows each layer sees, and which consecutive layers read the same input.
    """

    expert_runs = ()

    def __init__(self) -> None:
        self.rows: dict[str, set[int]] = {}
        self._families: list[tuple[Tensor, list[str]]] = []
        self._outputs: dict[str, tuple[Tensor, int]] = {}
        """Each layer's latest output, and its autograd version counter."""

    def linear(self, fused: FusedLinears, x: Tensor) -> tuple[Tensor, ...]:
        """Apply the base to x [1, T, K] → [1, T, N]."""
        path = fused.leader
        self.rows.setdefault(path, set()).add(x.shape[-2])
        if self._families and self._families[-1][0] is x:
            self._families[-1][1].append(path)
        else:
            self._families.append((x, [path]))
        y = fused.frozen(x)
        self._outputs[path] = y, y._version
        return (y,)

    def mark(self, base: LoraModel) -> None:
        """Record the layers whose outputs the model changes in place."""
        for path, (y, version) in self._outputs.items():
            base.linears[path].changed = y._version != version

    def fuse(self, base: LoraModel, inside: nn.Module) -> None:
        """Fuse layers inside a module that read the same input, if each of them is called once."""
        calls = [path for _, paths in self._families for path in paths]
        within = {module.path for module in inside.modules() if isinstance(module, LoraLinear)}
        for _, paths in self._families:
            if all(path in base.linears and path in within and calls.count(path) == 1 for path in paths):
                fuse([base.linears[path] for path in paths if len(base.linears[path].fused.paths) == 1])


def _leave_out(base: LoraModel, watch: _Watch) -> None:
    """Exclude layers that are skipped or see other rows: an adapter there would have no effect, or be wrong."""
    rows = round_up(sum(LENGTHS), base.arithmetic.rows)
    unfit = [path for path in base.linears if watch.rows.get(path) != {rows}]
    for path in unfit:
        del base.linears[path]
    refused = [path for path in base.linears if refused_by_peft(base.info.model_type, path)]
    base.revise(linears=tuple(path for path in base.linears if path not in refused))
    if refused:
        base.revise(f"{len(refused)} layers get no adapter, because PEFT loads none for them: out_proj of the mixers")
    if unfit:
        names = ", ".join(sorted({path.rsplit(".", 1)[-1] for path in unfit}))
        base.revise(f"{len(unfit)} layers get no adapter, because the model does not call them row by row: {names}")


def _limit_to_window(base: LoraModel, windows: dict[int, int | None]) -> None:
    """Limit sequence length if only the mask limits attention (Llama 4's chunks): longer ones would be wrong."""
    config = base.model.config.get_text_config()
    limits = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    kinds = getattr(config, "layer_types", None)
    expected = [index for index, kind in enumerate(kinds or []) if kind in ("sliding_attention", "chunked_attention")]
    stated = [window for window in windows.values() if window]
    ignored = any(not windows.get(index) for index in expected) if kinds else not stated
    allowed = [int(limit) for limit in limits if limit]
    if allowed and ignored and min(allowed) < base.info.max_positions:
        base.revise(
            f"sequences are limited to {min(allowed)} tokens, the model's attention window: its layers do not tell their "
            "attention function of it",
            max_positions=min(allowed),
        )


def _check_calls(base: LoraModel, calls: list[int]) -> None:
    config = base.model.config.get_text_config()
    layers = range(int(config.num_hidden_layers))
    without = base.stateful | {
        index for index, kind in enumerate(getattr(config, "layer_types", None) or []) if kind in _MIX_NOTHING
    }
    silent = [layer for layer in layers if layer not in calls and layer not in without]
    if silent:
        raise BaseModelError(
            f"{base.info.name}: layers {silent} of {len(layers)} do not call the attention function that programs can "
            f"replace{_what_mixes(base, silent)}, so Motet cannot compute them; {INSTEAD}"
        )
    if len(set(calls)) < len(calls) or not set(calls) <= set(layers):
        raise BaseModelError(
            f"{base.info.name}: its {len(layers)} layers call their attention function {len(calls)} times, in layers "
            f"{sorted(calls)}; Motet keeps keys and values of one call per layer; {INSTEAD}"
        )


def _what_mixes(base: LoraModel, layers: Iterable[int]) -> str:
    """The modules that these layers use instead of attention, as part of a message."""
    kinds = {
        type(module).__name__
        for path, module in base.decoder.named_modules()
        if any(str(layer) in path.split(".")[:-1] for layer in layers)
        and any(word in path.rsplit(".", 1)[-1] for word in _MIXERS)
        and any(True for _ in module.children())
    }
    return f" (they have {', '.join(sorted(kinds))})" if kinds else ""


def _check_logits(base: LoraModel, packed: list[Tensor], stock: list[Tensor]) -> LogitsVerdict:
    """Judge a base's logits by transformers' own.

    Raises:
        BaseModelError: transformers' are not finite, or the gap is beyond reason.
    """
    if not all(logits.isfinite().all() for logits in stock):
        raise BaseModelError(
            f"{base.info.name}: transformers' own logits are not finite in {base.info.dtype}; its weights are damaged, or "
            "it needs another engine.dtype"
        )
    verdict = judge(base, torch.cat(packed), torch.cat(stock))
    if not verdict.gap <= max(REASON * verdict.accepted, MULTIPLE * base.noise):
        raise _differs(base, verdict)
    return verdict


def _differs(base: LoraModel, verdict: LogitsVerdict) -> BaseModelError:
    layers = range(int(base.model.config.get_text_config().num_hidden_layers))
    return BaseModelError(
        f"{base.info.name}: logits differ from transformers' own by {verdict}; there is something in its layers"
        f"{_what_mixes(base, layers)} that Motet does not understand; {INSTEAD}"
    )

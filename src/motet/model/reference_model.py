"""transformers' own model beside the base made of it, for the proof at load: its logits, their noise, its layers.

The copy shares all weights with the base and keeps transformers' modules while the base's are replaced. It must be
dropped before weights are fused, or they stay in memory twice.

Legend: T rows of all sequences, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from motet.model.experts import compute_experts_one_by_one
from motet.model.mixers import in_plain_torch
from motet.model.shards import layers_of
from motet.model.text_only import decoder_of
from motet.model.tolerance import gap

_log = logging.getLogger(__name__)

LENGTHS = (9, 22)
"""Tokens of the proof's sequences."""

_PADDED = 64
"""Tokens that the sequences are padded to for the noise: libraries choose other kernels for as many rows."""

_FLOAT32 = "motet_in_float32"
"""Name in transformers' `AttentionInterface`."""

_ROUTERS = ("gate", "router")

Part = tuple[int, str]
"""A layer's number, and the name of its direct child; empty for the layer's output."""


def proof_sequences(model: Any) -> list[Tensor]:
    """Two sequences of random tokens."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [torch.randint(0, vocabulary, (length,), generator=generator).to(model.device) for length in LENGTHS]


class Stock:
    """What transformers computes for the proof's sequences, each alone, with eager attention."""

    def __init__(self, model: Any) -> None:
        """Run the model, which is unchanged afterwards; its noise is measured too."""
        compute_experts_one_by_one(model)
        self.sequences = proof_sequences(model)
        self._model, is_copy = _sharing_weights(model)
        self.routers = Routers(self._model)
        self.layers = layers_of(decoder_of(self._model)) if is_copy else []
        self.parts: dict[Part, Tensor] = {}
        """Outputs […, T, D] by part."""
        self._inputs: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = [[] for _ in self.layers]
        self.logits = self._run()
        """[T, V] of each sequence."""
        self.noise = self._measured_noise()
        """Gap of the same logits by another implementation of attention, in a padded batch."""

    def _run(self) -> list[Tensor]:
        outputs: dict[Part, list[Tensor]] = {}

        def keep(layer: int) -> Callable[..., None]:
            return lambda module, args, options: self._inputs[layer].append((args, options))

        with contextlib.ExitStack() as stack:
            stack.enter_context(in_plain_torch(self._model))
            stack.enter_context(self.routers.recorded())
            stack.enter_context(parts_recorded(self.layers, outputs))
            for index, layer in enumerate(self.layers):
                stack.callback(layer.register_forward_pre_hook(keep(index), with_kwargs=True).remove)
            logits = [self._model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in self.sequences]
        self.parts = {part: torch.cat(found, -2) for part, found in outputs.items() if len(found) == len(LENGTHS)}
        return logits

    def _measured_noise(self) -> float:
        """0 if the model runs in no other way."""
        most = getattr(self._model.config.get_text_config(), "max_position_embeddings", None) or _PADDED
        width = max(*LENGTHS, min(_PADDED, int(most)))
        ids = torch.stack([torch.cat([each, each.new_zeros(width - len(each))]) for each in self.sequences])
        for attention in ("sdpa", _register_float32(), "eager"):
            try:
                self._model.set_attn_implementation(attention)
                with in_plain_torch(self._model), self.routers.replayed(width):
                    logits = self._model(input_ids=ids, use_cache=False).logits.float()
            except Exception as error:  # models raise exceptions of any kind
                _log.debug("%s: no noise with %s: %r", type(self._model).__name__, attention, error)
                continue
            finally:
                self._model.set_attn_implementation("eager")
            rows = [each[: len(own)] for each, own in zip(logits, self.sequences, strict=True)]
            return gap(torch.cat(rows), torch.cat(self.logits))
        return 0.0

    def added(self, part: Part, output: Tensor) -> Tensor:
        """What a layer adds to its input; the output of other parts."""
        layer, child = part
        inputs = [next(iter((*args, *options.values())), None) for args, options in self._inputs[layer]]
        states = [each for each in inputs if isinstance(each, Tensor)]
        if child or len(states) < len(LENGTHS):
            return output
        before = torch.cat(states, -2) if all(each.dim() >= 2 for each in states) else states[0]
        return output - before.to(output) if before.shape == output.shape else output

    def in_float32(self, layer: int) -> dict[str, Tensor]:
        """Outputs of a layer's parts with fp32 weights on the same inputs; one layer's weights are in memory."""
        module, outputs = self.layers[layer], dict[Part, list[Tensor]]()
        with contextlib.ExitStack() as stack:
            for weight in chain(module.parameters(), module.buffers()):
                stack.callback(setattr, weight, "data", weight.data)
            module.float()
            stack.enter_context(in_plain_torch(module))
            stack.enter_context(parts_recorded([module], outputs))
            for place, (args, options) in enumerate(self._inputs[layer]):
                with self.routers.replayed(only=place):
                    module(*_floats(args), **_floats(options))
        return {name: torch.cat(found, -2) for (_, name), found in outputs.items() if len(found) == len(LENGTHS)}


def _register_float32() -> str:
    """The name of eager attention in fp32, for models without `sdpa` (soft caps, sinks)."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(_FLOAT32, _attention_in_float32)
    AttentionMaskInterface.register(_FLOAT32, eager_mask)
    return _FLOAT32


def _attention_in_float32(module: nn.Module, *states: Tensor | None, **options: Any) -> tuple[Tensor, Any]:
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    output, weights = eager(module, *_floats(states), **_floats(options))
    return output.to(next(each.dtype for each in states if each is not None)), weights


def _sharing_weights(model: Any) -> tuple[Any, bool]:
    """A copy of a model's modules with the same weights, and True; the model itself if it cannot be copied."""
    shared = {id(weight): weight for weight in chain(model.parameters(), model.buffers())}
    try:
        return copy.deepcopy(model, shared), True
    except Exception as error:  # code of a model may hold anything
        _log.debug("%s cannot be copied: %r", type(model).__name__, error)
        return model, False


def _floats(value: Any) -> Any:
    """Tensors of floats in fp32, in tuples, lists and dicts too."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _floats(each) for key, each in value.items()}
    return type(value)(map(_floats, value)) if type(value) in (tuple, list) else value


# --- parts of layers --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def parts_recorded(layers: Sequence[nn.Module], outputs: dict[Part, list[Tensor]]) -> Iterator[None]:
    """Record what layers and their direct children return; of a tuple, the first tensor."""

    def record(part: Part) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor) and first.is_floating_point() and first.dim() >= 2:
                outputs.setdefault(part, []).append(first.detach())

        return hook

    with contextlib.ExitStack() as stack:
        for index, layer in enumerate(layers):
            for name, module in (("", layer), *layer.named_children()):
                stack.callback(module.register_forward_hook(record((index, name))).remove)
        yield


@contextlib.contextmanager
def outputs_replaced(layers: Sequence[nn.Module], outputs: dict[Part, Tensor]) -> Iterator[None]:
    """Make each layer return what is recorded, so that the next one reads the stock model's input; padding repeats a row."""

    def replace(recorded: Tensor) -> Callable[..., Any]:
        def hook(module: nn.Module, inputs: object, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            more = first.shape[-2] - recorded.shape[-2]
            last = recorded[..., -1:, :].expand(*recorded.shape[:-2], more, -1)
            states = torch.cat([recorded, last], -2).to(first).view_as(first)
            return (states, *output[1:]) if isinstance(output, tuple) else states

        return hook

    with contextlib.ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_hook(replace(outputs[index, ""])).remove)
        yield


# --- routers ----------------------------------------------------------------------------------------------------------


class Routers:
    """Records the outputs of a mixture's routers and replays them: rounding may change the chosen experts."""

    def __init__(self, model: nn.Module, outputs: list[list[tuple[Tensor, ...]]] | None = None) -> None:
        """Find the routers; a model without experts has none. `outputs` are those that another model recorded."""
        self._modules = [
            module
            for parent in model.modules()
            for name, module in parent.named_children()
            if name in _ROUTERS and hasattr(parent, "experts")
        ]
        self._outputs: list[list[tuple[Tensor, ...]]] = [[] for _ in self._modules] if outputs is None else outputs

    def of(self, model: nn.Module) -> Routers:
        """The routers of another model with the same modules, which replays these."""
        return Routers(model, self._outputs)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the routers' outputs for each sequence, in order."""

        def record(place: int) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: object, output: Any) -> None:
                self._outputs[place].append(output if isinstance(output, tuple) else (output,))

            return hook

        with self._hooked(record):
            yield

    @contextlib.contextmanager
    def replayed(self, width: int = 0, only: int | None = None) -> Iterator[None]:
        """Replay the recorded outputs for the packed sequences; padding rows repeat the last row.

        Args:
            width: tokens that each sequence is padded to; 0 for packed ones.
            only: the sequence, if it is alone.
        """

        def replay(place: int) -> Callable[..., Any]:
            def hook(module: nn.Module, inputs: object, output: Any) -> Any:
                parts = output if isinstance(output, tuple) else (output,)
                recorded = self._outputs[place] if only is None else [self._outputs[place][only]]
                columns = [[_padded(part, width) for part in column] for column in zip(*recorded, strict=True)]
                replayed = tuple(map(_packed, columns, parts))
                return replayed if isinstance(output, tuple) else replayed[0]

            return hook

        with self._hooked(replay):
            yield

    @contextlib.contextmanager
    def _hooked(self, hook: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for place, module in enumerate(self._modules):
                stack.callback(module.register_forward_hook(hook(place)).remove)
            yield


def _padded(recorded: Tensor, width: int) -> Tensor:
    """Rows [T, …] or [1, T, …] of one sequence, the last repeated up to `width`."""
    rows = recorded.reshape(-1, recorded.shape[-1])
    more = max(0, width - len(rows))
    return torch.cat([rows, rows[-1:].expand(more, -1)])


def _packed(recorded: Sequence[Tensor], output: Tensor) -> Tensor:
    """Recorded rows of all sequences in the shape of `output`; `output` if they do not fit."""
    rows = torch.cat(list(recorded))
    more = output.numel() // output.shape[-1] - len(rows)
    if rows.shape[-1] != output.shape[-1] or more < 0:
        return output
    return _padded(rows, len(rows) + more).to(output.dtype).view(output.shape)

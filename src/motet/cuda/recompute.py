"""The backward pass of a training pass: each layer again by torch, from the input that the kernels gave it.

Legend: T packed rows, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motet.cuda.attention import CudaPass
from motet.model.attention import AttentionBackend, AttentionPass
from motet.model.covered_decoder import rotary_of
from motet.model.lora_model import LoraModel
from motet.model.routing import TrainerRouting


@dataclass(frozen=True)
class Recomputed:
    """The layers of one pass. Gradients are those of torch's layers at the kernels' inputs."""

    base: LoraModel
    backend: AttentionBackend
    attention: CudaPass
    routing: TrainerRouting

    def backward(self, inputs: list[Tensor], grad_TD: Tensor) -> None:
        """Add the adapters' gradients to those of the routing.

        Args:
            inputs: [T, D] of every layer and of the last norm; emptied.
            grad_TD: of the final hidden states.
        """
        context, decoder = self.base.context, self.base.decoder
        before, context.routing = context.routing, self.routing
        try:
            with torch.enable_grad():
                x = inputs.pop().detach().requires_grad_()
                grad = _gradient(decoder.norm(x), x, grad_TD)  # type: ignore[operator]
                attention = self.backend.packed(*self.attention.sequences)
                while inputs:
                    x = inputs.pop().detach().requires_grad_(len(inputs) > 0)
                    grad = _gradient(self._layer(len(inputs), x, attention), x, grad)
        finally:
            context.routing, context.joint = before, None

    def _layer(self, index: int, x_TD: Tensor, attention: AttentionPass) -> Tensor:
        """A layer's output [T, D], with a graph to its input and its adapters."""
        decoder: Any = self.base.decoder
        config = self.base.model.config.get_text_config()
        positions = self.attention.positions_T.long()[None]
        output = decoder.layers[index].forward(  # not called, because it might keep its input once more
            x_TD[None],
            position_embeddings=rotary_of(decoder, config, index)(x_TD[None], positions),
            position_ids=positions,
            attention_mask=None,
            attention_pass=attention,
        )
        hidden: Tensor = (output[0] if isinstance(output, tuple) else output)[0]
        return hidden


def _gradient(output: Tensor, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x from that of the output; of x itself if it needs none."""
    torch.autograd.backward(output, grad.to(output.dtype))
    return grad if x.grad is None else x.grad

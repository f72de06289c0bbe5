"""How checkpoints pack the numbers of weights: GGUF's blocks, fp8 and MXFP4 with a scale for each block, and nf4.

Legend: K inputs, N outputs of a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_MXFP4_BLOCK = 32
_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NF4_RUN = 64
_NF4_SCALES = 256


class Form(Protocol):
    """How numbers are packed into tensors."""

    def tensors(self, n_out: int, n_in: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and type of each tensor of a weight [N, K], by the name that a checkpoint gives it."""
        ...

    def numbers(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Some rows of the weight, in fp32."""
        ...


@dataclass(frozen=True)
class GgufBlocks:
    """Blocks of one of ggml's types; a row is a whole number of blocks."""

    ggml_type: int

    def tensors(self, n_out: int, n_in: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """One row of bytes for each output."""
        from transformers.integrations.gguf.dequant import GGML_BLOCK

        n_elements, n_bytes = GGML_BLOCK[self.ggml_type]
        return {"weight": ((n_out, n_in // n_elements * n_bytes), torch.uint8)}

    def numbers(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Unpacked as transformers does it."""
        from transformers.integrations.gguf.dequant import dequantize

        chosen = tensors["weight"][rows]
        numbers: Tensor = dequantize(chosen, self.ggml_type, torch.float32)
        return numbers.view(len(chosen), -1)


@dataclass(frozen=True)
class Float8Blocks:
    """Eight-bit numbers (e4m3), with a scale for every block of rows and columns."""

    block: tuple[int, int]

    def tensors(self, n_out: int, n_in: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The numbers, and their scales; blocks at the edges may be smaller."""
        scales = (-(-n_out // self.block[0]), -(-n_in // self.block[1]))
        return {"weight": ((n_out, n_in), torch.float8_e4m3fn), "weight_scale_inv": (scales, torch.float32)}

    def numbers(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Each number times the scale of its block."""
        numbers_NK = tensors["weight"][rows].float()
        n, k = numbers_NK.shape
        at = torch.arange(rows.start, rows.start + n, device=numbers_NK.device) // self.block[0]
        scales = tensors["weight_scale_inv"][at].repeat_interleave(self.block[1], dim=1)
        return numbers_NK * scales[:, :k]


@dataclass(frozen=True)
class Mxfp4Blocks:
    """Four-bit numbers, the lower half of a byte first, with an exponent for every 32 in a row (OCP's MXFP4)."""

    def tensors(self, n_out: int, n_in: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The numbers, two in a byte, and the exponents."""
        n_blocks = n_in // _MXFP4_BLOCK
        return {
            "blocks": ((n_out, n_blocks, _MXFP4_BLOCK // 2), torch.uint8),
            "scales": ((n_out, n_blocks), torch.uint8),
        }

    def numbers(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Each number times two to the power of its block's exponent."""
        pairs, scales = tensors["blocks"][rows], tensors["scales"][rows]
        numbers = _looked_up(torch.tensor(_MXFP4, device=pairs.device), pairs & 15, pairs >> 4)
        return torch.ldexp(numbers, scales[..., None].int() - 127).flatten(1)


@dataclass(frozen=True)
class Nf4Blocks:
    """Four-bit numbers of bitsandbytes, the upper half of a byte first, with a scale for each run of 64.

    Bytes and runs continue across rows. `nested` scales are eight-bit numbers with one scale per 256 of them.
    """

    n_in: int
    """Inputs of the layer."""
    nested: bool

    def tensors(self, n_out: int, n_in: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Two numbers in a byte, the table of the sixteen values, and the scales."""
        n_runs = -(-n_out * n_in // _NF4_RUN)
        tensors = {
            "weight": ((-(-n_out * n_in // 2), 1), torch.uint8),
            "quant_map": ((16,), torch.float32),
            "absmax": ((n_runs,), torch.uint8 if self.nested else torch.float32),
        }
        if not self.nested:
            return tensors
        return tensors | {
            "nested_absmax": ((-(-n_runs // _NF4_SCALES),), torch.float32),
            "nested_quant_map": ((256,), torch.float32),
            "nested_offset": ((1,), torch.float32),
        }

    def numbers(self, tensors: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Each number times the scale of its run."""
        start, stop = rows.start * self.n_in, rows.stop * self.n_in
        pairs = tensors["weight"][start // 2 : -(-stop // 2), 0]
        numbers = _looked_up(tensors["quant_map"], pairs >> 4, pairs & 15)[start % 2 :][: stop - start]
        first = start // _NF4_RUN
        scales = self._scales(tensors, slice(first, -(-stop // _NF4_RUN)))
        return (numbers * _spread(scales, _NF4_RUN, start - first * _NF4_RUN, len(numbers))).view(-1, self.n_in)

    def _scales(self, tensors: Mapping[str, Tensor], runs: slice) -> Tensor:
        stored = tensors["absmax"][runs]
        if not self.nested:
            return stored
        first = runs.start // _NF4_SCALES
        scales = tensors["nested_absmax"][first : -(-runs.stop // _NF4_SCALES)]
        numbers = tensors["nested_quant_map"][stored.int()]
        return (
            numbers * _spread(scales, _NF4_SCALES, runs.start - first * _NF4_SCALES, len(stored))
            + tensors["nested_offset"]
        )


def _spread(scales: Tensor, run: int, skipped: int, n: int) -> Tensor:
    """The scale of each of n numbers: one for each run, the first run without its first `skipped` numbers."""
    return scales.repeat_interleave(run)[skipped : skipped + n]


def _looked_up(table: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Table values of pairs of indices: [...], [...] → [..., 2] flattened into the last dimension."""
    return table[torch.stack([first, second], dim=-1).int()].flatten(-2)

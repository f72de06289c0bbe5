"""From a head's products to logits: a model's own changes, and ids without a token.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LogitChanges:
    """What one base changes in the products of its head."""

    def __init__(self, config: Any, without_token: tuple[int, ...]) -> None:
        """`without_token`: see `ModelInfo`."""
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        self.scale, self.divide, self.cap = (getattr(config, name, None) for name in names)
        self.without = torch.tensor(without_token, dtype=torch.long)

    def finish(self, raw_NV: Tensor) -> Tensor:
        """fp32 logits, with the model's scale and soft-cap; −∞ for ids without a token. May overwrite `raw_NV`."""
        logits_NV = raw_NV.float()
        if self.scale is not None:
            logits_NV = logits_NV * self.scale
        if self.divide is not None:
            logits_NV = logits_NV / self.divide
        if self.cap is not None:
            logits_NV = torch.tanh(logits_NV / self.cap) * self.cap
        return logits_NV.index_fill_(-1, self._absent(logits_NV), -torch.inf) if len(self.without) else logits_NV

    def slope(self, raw_NV: Tensor, slope_NV: Tensor) -> Tensor:
        """Gradient with respect to raw [N, V] from that of `finish(raw)`; may be in fp32."""
        if (self.scale, self.divide, self.cap) == (None, None, None):
            return slope_NV  # it is 0 for ids without a token, as their probability is
        with torch.enable_grad():
            leaf = raw_NV.detach().requires_grad_()
            (slope_raw_NV,) = torch.autograd.grad(self.finish(leaf), leaf, slope_NV)
        return slope_raw_NV

    def of_tokens(self, logits_NV: Tensor) -> Tensor:
        """Logits to compare with others: 0 for ids without a token."""
        return logits_NV.index_fill(-1, self._absent(logits_NV), 0.0)

    def _absent(self, logits_NV: Tensor) -> Tensor:
        if self.without.device != logits_NV.device:
            self.without = self.without.to(logits_NV.device)
        return self.without

"""Gradients of an adapter as sums of whole numbers, which have the same bits in every order.

A unit is the part of a gradient that one sample gives, an fp32 sum in an order of its own. Units are added as multiples of
2⁻⁴⁴ in 64 bits, so that neither the order of samples nor the cuts between passes change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE = 2.0**44
"""Whole numbers in 1. Of gradients of means the entries are far below 1; 2⁻⁴⁴ is 4e-7 of the last bit that fp32 has of 1."""
UNFIT = 2.0**62
"""A number that is NaN, or as large as this, adds nothing, and counts as this large."""
_RANGE = 2.0**63
_SUMS, _BOUNDS = "sums", "bounds"
"""Names in files."""


@dataclass
class UnitSums:
    """The sum of the units since the last step."""

    flat: Tensor
    """int64, in the adapter's layout."""
    largest: Tensor
    """int64 [1]: the largest number of any unit, rounded up; 2⁶² if one is as large or is NaN."""
    n_units: int = 0

    @classmethod
    def empty(cls, size: int, device: torch.device) -> UnitSums:
        """No units yet, of an adapter with `size` elements."""
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        return cls(zeros, torch.zeros(1, dtype=torch.int64, device=device))

    @property
    def n_counted(self) -> int:
        """How many units as large as the largest must fit."""
        return max(self.n_units, 2)

    @property
    def bounds(self) -> Tensor:
        """The largest number, and how many units there are: int64 [2]."""
        return torch.tensor([int(self.largest), self.n_units])

    @bounds.setter
    def bounds(self, given: Tensor) -> None:
        self.largest, self.n_units = given[:1], int(given[1])

    def add(self, other: UnitSums) -> None:
        """Add the units of another sum of the same adapter in place."""
        self.flat += other.flat
        torch.maximum(self.largest, other.largest, out=self.largest)
        self.n_units += other.n_units

    def add_unit(self, to: Tensor, unit: Tensor, factor: float = 1.0) -> None:
        """Add a part of a unit times a factor to its place `to`, a view of `flat`."""
        numbers = unit.float().mul(factor).mul_(SCALE).round_()
        size = numbers.abs()
        fits = size < UNFIT
        to.add_(torch.where(fits, numbers, 0).long())
        self.largest.copy_(torch.maximum(self.largest, torch.where(fits, size, UNFIT).max().long()))

    def total(self) -> Tensor:
        """The sum in fp32, rounded once. NaN if a unit was not finite, or if so many as large as the largest would not fit."""
        fits = self.largest.double() * self.n_counted < _RANGE
        return torch.where(fits, self.flat.float().mul_(1 / SCALE), torch.nan)

    def take_out(self) -> Tensor:
        """The memory of `flat` as fp32 [2, size], to copy its bits elsewhere; `flat` is empty then."""
        flat, self.flat = self.flat, self.flat.new_empty(0)
        return flat.view(torch.float32).view(2, -1)

    def put_back(self, moved: Tensor, device: torch.device) -> Tensor:
        """Take `flat` from the last two rows of moved vectors; returns the other rows."""
        self.flat = torch.empty(moved.shape[1], dtype=torch.int64, device=device)
        self.flat.view(torch.float32).view(2, -1).copy_(moved[-2:])
        return moved[:-2]

    def saved(self) -> dict[str, Tensor]:
        """Tensors for a file, from which `of_saved` has the same sum."""
        return {_SUMS: self.flat.cpu(), _BOUNDS: self.bounds}

    @classmethod
    def of_saved(cls, tensors: dict[str, Tensor], device: torch.device) -> UnitSums | None:
        """Those of a file; None if it has none."""
        if _SUMS not in tensors:
            return None
        largest, n_units = tensors[_BOUNDS].tolist()
        return cls(tensors[_SUMS].to(device), torch.tensor([largest], device=device), n_units)


def add_part(to: Tensor, part: Tensor, factor: float, sums: UnitSums | None) -> None:
    """Add a part of a gradient times a factor to its place, which is one of `sums` if they are given."""
    if sums is None:
        to.add_(part, alpha=factor)
    else:
        sums.add_unit(to, part, factor)


def split_saved(tensors: dict[str, Tensor], size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of a file: those of `saved` for an adapter with `size` elements, and the others."""
    wanted = {_SUMS: size, _BOUNDS: 2}
    own = {name: tensors[name] for name in wanted if name in tensors}
    fits = own.keys() == wanted.keys() and all(
        own[name].dtype == torch.int64 and own[name].shape == (n,) for name, n in wanted.items()
    )
    return (own, {name: tensors[name] for name in tensors if name not in wanted}) if fits else ({}, tensors)

"""Stores layer inputs of a pass in a file instead of device memory until the backward pass needs them.

The file is unlinked, so it disappears with the process. Legend: T packed rows, D model width.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stored:
    """A tensor in the file."""

    place: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class LayerInputs:
    """The layer inputs of one pass: the only tensors that recomputed layers keep for the whole pass."""

    def __init__(self, directory: Path | None) -> None:
        """`directory` is where the file is created; None moves nothing."""
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._end = 0
        self._takes_more = directory is not None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Context for the forward and the backward pass."""
        with contextlib.ExitStack() as stack:
            if self._takes_more:
                try:
                    self._file = stack.enter_context(tempfile.TemporaryFile(dir=self._directory, buffering=0))
                except OSError as error:
                    self._stay(error)
            yield
        self._file = None

    @contextlib.contextmanager
    def moved(self, n_rows: int) -> Iterator[None]:
        """Context for the forward pass only: moves saved tensors […, T, D] with `n_rows` rows."""
        if not self._takes_more:
            yield
            return
        with saved_tensors_hooks(lambda tensor: self._write(tensor, n_rows), self._read):
            yield

    def _write(self, tensor: Tensor, n_rows: int) -> Tensor | _Stored:
        fits = tensor.dim() > 2 and tensor.shape[-2] == n_rows and tensor.is_contiguous()
        if not fits or self._file is None or not self._takes_more:
            return tensor
        left, place = _bytes(tensor.detach().cpu()), self._end
        try:
            while left:
                n_written = os.pwrite(self._file.fileno(), left, self._end)
                left, self._end = left[n_written:], self._end + n_written
        except OSError as error:  # using more memory is better than losing a step
            self._stay(error)
            return tensor
        return _Stored(place, tensor.shape, tensor.dtype, tensor.device)

    def _read(self, saved: Tensor | _Stored) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert self._file is not None
        tensor, place = torch.empty(saved.shape, dtype=saved.dtype), saved.place
        left = _bytes(tensor)
        while left:
            n_read = os.preadv(self._file.fileno(), [left], place)
            if not n_read:
                raise OSError(errno.EIO, "layer inputs that were written are not there", str(self._directory))
            left, place = left[n_read:], place + n_read
        return tensor.to(saved.device)

    def _stay(self, error: OSError) -> None:
        self._takes_more = False
        _log.warning("layer inputs stay in memory because %s cannot take them: %s", self._directory, error.strerror)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data

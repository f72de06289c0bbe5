"""The only file that queries or controls devices: CPUs, and GPUs of NVIDIA and AMD (torch calls both `cuda`)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motet.config import budgets
from motet.core.errors import BaseModelError

Replay = Callable[[], Tensor]
_WARM_UP = 2
"""Runs before a graph is captured, because libraries allocate their workspaces on first use."""


def place_of(device: str, nth: int = 0) -> torch.device:
    """The device for `engine.device` on this machine; with `nth`, the nth GPU after it.

    Raises:
        BaseModelError: the device does not exist, or Motet does not support its kind.
    """
    kind = device.partition(":")[0]
    if kind not in ("auto", "cpu", "cuda"):  # xpu, npu, mps and other kinds of torch
        raise BaseModelError(f"engine.device is {device}, but Motet does not support {kind}: use `cpu` or `cuda`")
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if kind == "auto" else device)
    if place.type == "cpu":
        return place
    number = (place.index or 0) + nth
    if number >= (count := torch.cuda.device_count()):
        seen = f"{count or 'no'} CUDA device{'s' if count > 1 else ''}"
        wanted = f", and rank {nth} needs cuda:{number}" if nth else ""
        instead = (
            "set engine.ranks and engine.shard to fewer, or engine.device to cpu" if nth else "use `cpu` or `auto`"
        )
        raise BaseModelError(f"engine.device is {device}{wanted}, but torch sees {seen}; {instead}")
    return torch.device("cuda", number) if nth else place


def take(place: torch.device) -> str:
    """Select the device for this process; returns the backend for communication between ranks on such devices."""
    if place.type == "cpu":
        return "gloo"
    torch.cuda.set_device(place.index or 0)
    return "nccl"


def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs that torch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(torch.cuda.get_device_name(number) for number in range(count))


def processor_of(place: torch.device) -> str:
    """The vector instructions of a CPU, or the name of a GPU."""
    if place.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    return torch.cuda.get_device_name(place)


def capability(place: torch.device) -> int:
    """Major compute capability of a GPU."""
    return torch.cuda.get_device_capability(place)[0]


def multiprocessors(place: torch.device) -> int:
    """Number of a GPU's multiprocessors."""
    return torch.cuda.get_device_properties(place).multi_processor_count


def cuda_versions() -> dict[str, str]:
    """Versions of the driver, and of the CUDA that torch was built with."""
    return {"driver": str(getattr(torch._C, "_cuda_getDriverVersion", int)()), "cuda": str(torch.version.cuda)}


def microseconds(run: Callable[[], object], repeats: int) -> float:
    """What a run on the current GPU takes by the GPU's own clock, of so many in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats * 1000


def free_memory(place: torch.device) -> int:
    """Free bytes of the device's memory, or of main memory for a CPU."""
    return budgets.available_memory() if place.type == "cpu" else int(torch.cuda.mem_get_info(place)[0])


def total_memory(place: torch.device) -> int:
    """Bytes of a GPU's memory; 0 for a CPU."""
    return 0 if place.type == "cpu" else int(torch.cuda.mem_get_info(place)[1])


def give_back(place: torch.device) -> None:
    """Give a GPU the memory back that torch keeps for later, so that `free_memory` counts it."""
    if place.type != "cpu":
        torch.cuda.empty_cache()


def wait_for(place: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def send(place: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """The arrays on the device, which is not waited for: a copy of memory that may be paged out would wait."""
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if place.type == "cpu":
        return tensors
    return [tensor.pin_memory().to(place, non_blocking=True) for tensor in tensors]


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Context in which kernels are launched on the tensor's device."""
    return torch.cuda.device_of(tensor)


PutBack = Callable[[], None]


class Switched:
    """Context in which torch's switches are set. For any threads at once.

    The switches hold for the whole process, which may be a user's: the last to leave puts them back.
    """

    def __init__(self, turn: Callable[[], PutBack]) -> None:
        """`turn` sets them."""
        self._turn = turn
        self._lock = threading.Lock()
        self._inside = 0
        self._put_back: PutBack

    def __enter__(self) -> None:
        """Set the switches; raises what `turn` raises."""
        with self._lock:
            if not self._inside:
                self._put_back = self._turn()
            self._inside += 1

    def __exit__(self, *_error: object) -> None:
        """Put them back."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._put_back()


def _full_precision() -> PutBack:
    """No sums of reduced precision, and one workspace per stream."""
    matmul: Any = torch.backends.cuda.matmul
    of_cpus: Any = torch.backends.mkldnn
    variable = "CUBLAS_WORKSPACE_CONFIG"
    sums, workspace = _bfloat16_sums(), os.environ.get(variable)
    products = matmul.fp32_precision, of_cpus.matmul.fp32_precision
    name = None
    with contextlib.suppress(RuntimeError):  # raised where somebody set torch's old and new switches
        name = torch.get_float32_matmul_precision()
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_tf32 = False
    os.environ[variable] = ":4096:8"

    def put_back() -> None:
        matmul.allow_bf16_reduced_precision_reduction = sums
        if name is not None:
            torch.set_float32_matmul_precision(name)  # sets those of CPUs too
        matmul.fp32_precision, of_cpus.matmul.fp32_precision = products
        if workspace is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = workspace

    return put_back


def _without_split() -> PutBack:
    """Let torch's bfloat16 products be cuBLASLt's, and add over K in one order.

    Raises:
        AttributeError, RuntimeError: this torch has no such switches, or no cuBLASLt.
    """
    matmul: Any = torch.backends.cuda.matmul
    library, sums = torch.backends.cuda.preferred_blas_library(), _bfloat16_sums()
    torch.backends.cuda.preferred_blas_library("cublaslt")  # without it, each product would raise
    matmul.allow_bf16_reduced_precision_reduction = (False, False)

    def put_back() -> None:
        matmul.allow_bf16_reduced_precision_reduction = sums
        torch.backends.cuda.preferred_blas_library(library)

    return put_back


def _bfloat16_sums() -> tuple[bool, bool]:
    """Whether sums may be in reduced precision, and whether K may be split."""
    matmul: Any = torch.backends.cuda.matmul
    return matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k


full_precision = Switched(_full_precision)
products_without_split = Switched(_without_split)


def add_in_full_precision(place: torch.device) -> None:
    """On a GPU, set the switches of `full_precision`; they stay so, unless the caller is in that context."""
    if place.type != "cpu":
        _full_precision()


class Recorder:
    """Captures work on a GPU as graphs with shared memory."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._pool: Any = None
        self._side: Any = None

    def beside(self) -> Recorder:
        """One whose graphs have memory of their own; both record on one stream, for which libraries keep a workspace."""
        other = Recorder(self._place)
        other._side = self._stream()
        return other

    def _stream(self) -> Any:
        if self._side is None and self._place.type != "cpu":
            self._side = torch.cuda.Stream(self._place)  # one for all: libraries keep a workspace per stream
        return self._side

    def capture(self, run: Replay, *, first: bool) -> Replay:
        """Record `run` as a graph; `first` if no earlier graph exists. On a CPU, returns `run` itself."""
        if self._place.type == "cpu":
            return run
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._place):
            before, side = torch.cuda.current_stream(), self._stream()
            if self._pool is None or first:
                self._pool = torch.cuda.graph_pool_handle()  # a pool is freed with its last graph
            side.wait_stream(before)
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP):
                    run()
            before.wait_stream(side)
            try:
                # another thread may copy an adapter from the device for a commit meanwhile
                with torch.cuda.graph(captured, self._pool, side, capture_error_mode="thread_local"):
                    made = run()
            except BaseException:
                torch.cuda.set_stream(before)  # a failed capture does not restore it
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(before.device_index, self._pool)
                raise

        def replay() -> Tensor:
            captured.replay()
            return made

        return replay


class WorkQueue:
    """Work and copies that a thread begins on a device; they run in this order, and the thread does not wait."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def host_memory(self, n_bytes: int) -> Tensor:
        """Bytes on the host for copies to and from the device."""
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=self._place.type != "cpu")

    def begin(self, work: Callable[[], None]) -> Callable[[], None]:
        """Begin work; returns what waits until it is done, and all that was begun before. On a CPU it is done at once."""
        if self._place.type == "cpu":
            work()
            return lambda: None
        with torch.cuda.device(self._place):
            work()
            done = torch.cuda.Event()
            done.record()  # type: ignore[no-untyped-call, unused-ignore]
        return done.synchronize

    def send(self, host: Tensor) -> Tensor:
        """A copy on the device; the host's memory must stay as it is until the work is done."""
        return host.to(self._place, non_blocking=True)

    def fetch(self, device: Tensor, host: Tensor) -> None:
        """Copy to the host."""
        host.copy_(device, non_blocking=True)


def kernel_failures() -> tuple[type[Exception], ...]:
    """What torch, Triton and the driver raise where a kernel does not compile or run; descriptors assert aligned addresses."""
    kinds = RuntimeError, AttributeError, AssertionError
    try:
        from triton.errors import TritonError  # type: ignore[import-untyped, unused-ignore]
    except ImportError:  # most machines without a GPU have no Triton
        return kinds
    return *kinds, TritonError


def cause_of(error: Exception) -> Exception:
    """Torch raises an error of its own where a recording ends that failed before."""
    before, of_torch = error.__context__, isinstance(error, RuntimeError)
    return before if of_torch and type(error) is not torch.OutOfMemoryError and isinstance(before, Exception) else error


def reason_of(error: BaseException) -> str:
    """A line that says why kernels fail. Triton's errors begin with where they are, and have what is wrong by itself."""
    text = str(getattr(error, "error_message", None) or error).strip()
    return next(iter(text.splitlines()), type(error).__name__)

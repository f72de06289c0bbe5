"""The Tinker protocol's binary messages, from descriptors built here, and their conversion to commands.

Fields match by number and kind only. A map is described as the list of entries that it is on the wire, and unused
fields (the origin of a token) are omitted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from google.protobuf import (  # type: ignore[import-untyped]
    descriptor_pb2,
    descriptor_pool,
    message,
    message_factory,
)

from motet.algorithms.client import CLIENT_LOSSES, ClientLoss
from motet.core.errors import ConfigError
from motet.core.types import FloatArray, IntArray
from motet.runtime.journal import Datum, ForwardBackward, Gradient, Tensor
from motet.service.errors import Refusal

CONTENT_TYPE = "application/x-protobuf"
SCHEMA = """
Request model_id:1:string seq_id:2:int32 data:3:*Datum loss_fn:4:string settings:5:*Number forward_only:6:bool v2:7:*Setting
Number key:1:string value:2:double
Setting key:1:string value:2:Value
Value number:1:double text:2:string
Datum model_input:1:*Chunk loss_fn_inputs:2:*Input
Chunk encoded_text:1:Text image:2:bytes dmel:3:bytes
Text tokens:1:bytes
Input key:1:string value:2:Tensor
Tensor dense:1:bytes sparse_csr:2:Sparse dtype:3:int32 shape:4:*int64
Sparse values:1:bytes crow_indices:2:bytes col_indices:3:bytes
Output loss_fn_output_type:1:string loss_fn_outputs:2:*Record metrics:3:*Number
Record type_tag:1:string fields:2:*Field num_datums:3:int64
Field key:1:string value:2:Batched
Batched data:1:bytes offsets:2:bytes dtype:3:int32 trailing_shape:4:*int64
Samples sequences:1:*Sequence prompt_logprobs:2:bytes topk_prompt_logprobs:3:Top
Top token_ids:1:bytes logprobs:2:bytes k:3:uint32 length:4:uint32
Sequence stop_reason:1:int32 tokens:2:bytes logprobs:3:bytes
"""
"""One message per line: its name, then name, number and kind of each field; `*` repeats."""
FLOAT32, INT64, INT32 = 1, 2, 3
STOP, LENGTH = 0, 1
MOST_NUMBERS = 2**22
"""Most numbers in sparse tensors of a request: a few bytes can encode any count."""
SMALL = 2**14
"""Largest request that is parsed in the service's process, in bytes; one with sparse tensors is never."""
_HEAD = 1000
"""Bytes of the longest model id and a number."""
MOST_DATA = 4096
"""Most data of one request; the client splits larger ones."""
MOST_TARGETS = 2**17
"""Most targets of a datum: the engine keeps a hidden state for each during training."""
_DTYPES = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4"}


class WireError(Refusal):
    """Invalid bytes, or an unsupported message; the message says which."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


def _messages() -> dict[str, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="motet/tinker.proto", package="motet.tinker", syntax="proto2")
    for line in SCHEMA.split("\n")[1:-1]:
        name, *fields = line.split()
        described = file.message_type.add(name=name)
        for one in fields:
            title, number, kind = one.split(":")
            label = field.LABEL_REPEATED if kind.startswith("*") else field.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            where = described.field.add(name=title, number=int(number), label=label)
            if kind[0].isupper():
                where.type, where.type_name = field.TYPE_MESSAGE, f".motet.tinker.{kind}"
            else:
                where.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [described.name for described in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"motet.tinker.{name}")) for name in names}


KINDS = _messages()


def begins_with(body: bytes) -> tuple[str, int]:
    """The model and the number of a request that takes too much to parse, which protobuf writes first; "" and 0 without."""
    for end in range(min(len(body), _HEAD)):  # it can be parsed wherever a field ends
        with contextlib.suppress(message.DecodeError, UnicodeDecodeError):
            request = KINDS["Request"].FromString(body[:end])
            if isinstance(request.model_id, str) and request.model_id and request.seq_id:
                return request.model_id, request.seq_id
    return "", 0


def tokens_of(chunks: Sequence[Any]) -> IntArray:
    """The token ids of a model input. Raises `WireError` if it has other data."""
    for chunk in chunks:
        if chunk.HasField("image") or chunk.HasField("dmel"):
            raise WireError("model_input has an image or audio; this base reads text: send only encoded_text chunks")
    tokens: IntArray = array_of(b"".join(chunk.encoded_text.tokens for chunk in chunks), INT32, "model_input")
    return tokens


def array_of(data: bytes, dtype: int, name: str) -> Any:
    """Decode numbers. Raises `WireError` if the dtype is unknown, or does not match the number of bytes."""
    if dtype not in _DTYPES:
        raise WireError(f"{name}: dtype {dtype} is unknown; send float32 or int64")
    kind = np.dtype(_DTYPES[dtype])
    if len(data) % kind.itemsize:
        raise WireError(f"{name}: {len(data)} bytes are no whole numbers of {kind.itemsize} bytes")
    return np.frombuffer(data, kind)


def shape_of(tensor: Any, name: str) -> list[int]:
    """[T] or [T, K]; empty if the numbers imply it. Raises `WireError` for another, or too large a one."""
    shape = [int(one) for one in tensor.shape[:3]]
    if len(shape) > 2 or not all(0 <= one <= MOST_NUMBERS for one in shape):
        raise WireError(f"{name}: shape {shape} is neither [T] nor [T, K] of at most {MOST_NUMBERS} numbers")
    return shape


def _dense_shape(tensor: Any, name: str) -> list[int]:
    """The shape of a tensor in dense form. Raises `WireError` as `shape_of`."""
    shape = shape_of(tensor, name)
    return shape or [len(array_of(tensor.dense, tensor.dtype, name))]


def dense(tensor: Any, name: str) -> Any:
    """A tensor [T] or [T, K] in dense form. Raises `WireError` if its parts are inconsistent."""
    shape = shape_of(tensor, name)
    if not tensor.HasField("sparse_csr"):
        values = array_of(tensor.dense, tensor.dtype, name)
        shape = shape or [len(values)]
        if math.prod(shape) != len(values):
            raise WireError(f"{name}: {len(values)} numbers do not fill its shape {shape}")
        return values.reshape(shape)
    sparse = tensor.sparse_csr
    values = array_of(sparse.values, tensor.dtype, name)
    rows, columns = (array_of(part, INT64, name) for part in (sparse.crow_indices, sparse.col_indices))
    if len(shape) != 2 or len(rows) != shape[0] + 1 or math.prod(shape) > MOST_NUMBERS or len(columns) != len(values):
        raise WireError(f"{name}: sparse parts do not fit its shape {shape}")
    if rows[0] != 0 or (rows[1:] < rows[:-1]).any() or rows[-1] != len(values):
        raise WireError(f"{name}: its row indices are not those of {len(values)} values")
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise WireError(f"{name}: a column index is outside its shape {shape}")
    whole = np.zeros(shape, values.dtype)
    whole[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return whole


def command_of(request: Any) -> ForwardBackward:
    """Convert a request to a command. Raises `WireError` if a part is not supported."""
    try:
        loss = ClientLoss.of(request.loss_fn, _settings(request))
    except ConfigError as error:
        raise WireError(str(error)) from error
    if not 0 < len(request.data) <= MOST_DATA:
        raise WireError(f"data: {len(request.data)} are not between 1 and {MOST_DATA}")
    size = sum(_sparse_numbers(index, datum) for index, datum in enumerate(request.data))
    if size > MOST_NUMBERS:
        raise WireError(
            f"data: sparse tensors of {size} numbers are more than {MOST_NUMBERS}; send fewer data at a time"
        )
    wanted = CLIENT_LOSSES[loss.name].tensors
    data = [_datum(index, datum, wanted) for index, datum in enumerate(request.data)]
    return ForwardBackward(data, loss.name, dict(loss.settings), bool(request.forward_only))


class AskedGradient(msgspec.Struct, frozen=True, array_like=True):
    """A parsed request for a gradient."""

    model_id: str
    seq_id: int
    command: bytes
    """The encoded `ForwardBackward`, as a journal keeps it; empty without one."""
    work: int  # its tokens
    outcome: int  # approximate bytes of its outcome: a logprob for each target
    reason: str
    """Why there is no command; without a model id, why the bytes are invalid."""


def read_small(body: bytes) -> bytes | None:
    """As `read_gradient`, for a request that takes little; None for another, which may be a few bytes long."""
    if len(body) > SMALL:
        return None
    with contextlib.suppress(message.DecodeError, UnicodeDecodeError):
        request = KINDS["Request"].FromString(body)
        if len(request.data) <= MOST_DATA and any(
            one.value.HasField("sparse_csr") for datum in request.data for one in datum.loss_fn_inputs
        ):
            return None
    return read_gradient(body)


def read_gradient(body: bytes) -> bytes:
    """Parse a request for a gradient into an encoded `AskedGradient`. Long ones are parsed in a separate process."""
    name, number, command, work, outcome, reason = "", 0, b"", 0, 0, ""
    try:
        request = KINDS["Request"].FromString(body)
        if not isinstance(request.model_id, str):
            raise WireError("model_id is no text in UTF-8")
        name, number = request.model_id, request.seq_id
        asked = command_of(request)
        work, outcome = sum(datum.work for datum in asked.data), sum(len(datum.targets) for datum in asked.data)
        command = msgspec.msgpack.encode(asked)
    except (message.DecodeError, UnicodeDecodeError) as error:
        reason = f"the body is not a ForwardBackwardRequest: {error}"
    except WireError as error:
        reason = error.message
    return msgspec.msgpack.encode(AskedGradient(name, number, command, work, outcome, reason))


def gradient_of(read: bytes) -> AskedGradient:
    """Decode the result of `read_gradient`. Raises `WireError` if the bytes were not a request."""
    asked = msgspec.msgpack.decode(read, type=AskedGradient)
    if not asked.model_id and asked.reason:
        raise WireError(asked.reason)
    return asked


def _settings(request: Any) -> dict[str, float]:
    given = {_text(one.key, "loss_fn_config"): float(one.value) for one in request.settings}
    for one in request.v2:
        if one.value.HasField("text"):
            raise WireError(f"loss_fn_config.{one.key} is a text; {request.loss_fn} takes numbers")
        given[_text(one.key, "loss_fn_config")] = float(one.value.number)
    return given


def _text(key: str | bytes, where: str) -> str:
    """A name; invalid UTF-8 comes as bytes."""
    if isinstance(key, bytes):
        raise WireError(f"{where}: the name {key!r:.80} is no text in UTF-8")
    return key


def _sparse_numbers(index: int, datum: Any) -> int:
    """Number of values in a datum's sparse tensors after conversion to dense form."""
    sparse = (one for one in datum.loss_fn_inputs if one.value.HasField("sparse_csr"))
    return sum(math.prod(shape_of(one.value, f"data[{index}].{one.key}")) for one in sparse)


def _datum(index: int, datum: Any, wanted: tuple[str, ...]) -> Datum:
    where = f"data[{index}]"
    tokens = tokens_of(datum.model_input)
    inputs = {_text(one.key, f"{where}.loss_fn_inputs"): one.value for one in datum.loss_fn_inputs}
    if odd := sorted(set(inputs) - {"target_tokens", *wanted}):
        raise WireError(f"{where}: loss_fn_inputs.{odd[0]} is unknown here; give target_tokens, {', '.join(wanted)}")
    if missing := [name for name in ("target_tokens", *wanted) if name not in inputs and name != "weights"]:
        raise WireError(f"{where}: loss_fn_inputs.{missing[0]} is missing")
    shape = _dense_shape(inputs["target_tokens"], f"{where}.target_tokens")  # of all, before any is made dense
    if not len(tokens) or shape[0] != len(tokens) or not math.prod(shape):
        raise WireError(f"{where}: {len(tokens)} tokens with {shape[0]} target_tokens; give as many, at least one")
    if math.prod(shape) > MOST_TARGETS:
        raise WireError(
            f"{where}: target_tokens of shape {shape} are {math.prod(shape)} targets, more than {MOST_TARGETS}; give "
            "fewer for each token, or cut the sequence"
        )
    for name in wanted:
        given = _dense_shape(inputs[name], f"{where}.{name}") if name in inputs else None
        if given is not None and given != (shape if name == "weights" else shape[:1]):
            raise WireError(f"{where}: {name} has shape {given}, target_tokens {shape}")
    targets = dense(inputs["target_tokens"], f"{where}.target_tokens")
    if targets.dtype.kind != "i" or min(tokens.min(), targets.min()) < 0 or targets.max() >= 2**31:
        raise WireError(f"{where}: token ids are whole numbers from 0 on")
    tensors: dict[str, Tensor] = {}
    for name in wanted:
        if name not in inputs:
            continue
        values = dense(inputs[name], f"{where}.{name}").astype(np.float32)
        if not np.isfinite(values).all():
            raise WireError(f"{where}: {name} has a number that is not finite")
        tensors[name] = Tensor.of(values if name != "sequence_ratio_mask" else (values != 0).astype(np.float32))
    if "weights" not in wanted and targets.ndim == 2:
        raise WireError(f"{where}: target_tokens of two dimensions are for cross_entropy")
    count = targets.shape[1] if targets.ndim == 2 else 0
    return Datum(tokens.astype("<i4").tobytes(), targets.astype("<i4").tobytes(), count, **tensors)


def write_gradient(outcome: Gradient) -> bytes:
    """Encode the outcome of a gradient: logprobs of each datum."""
    result = KINDS["Output"](loss_fn_output_type="ArrayRecord")
    for one in outcome.logprobs:  # one record each: [T] and [T, K] cannot share one
        record = result.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        field = record.fields.add(key="logprobs")
        field.value.data, field.value.dtype = one.data, FLOAT32
        field.value.offsets = np.asarray([0, len(one.data)], "<i8").tobytes()
        field.value.trailing_shape.extend(one.shape[1:])
    for name, value in outcome.metrics.items():
        result.metrics.add(key=name, value=value)
    return bytes(result.SerializeToString())


@dataclass
class SampleBytes:
    """A completion of a prompt as it is sent, because lists would take ten times the memory of an answer."""

    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    cut: bool = False
    """Whether it ended by length."""

    def add(self, token_ids: IntArray, logprobs: FloatArray) -> None:
        """Append tokens [T] and their logprobs [T]."""
        self.tokens += token_ids.astype("<i4").tobytes()
        self.logprobs += logprobs.astype("<f4").tobytes()


def write_samples(
    completions: Sequence[SampleBytes],
    prompt_logprobs: FloatArray | None,
    top: tuple[IntArray, FloatArray] | None = None,
) -> bytes:
    """Encode completions of a prompt. `top` has the top tokens [T, k] of the prompt's positions, and their logprobs."""
    result = KINDS["Samples"]()
    for each in completions:
        one = result.sequences.add(stop_reason=LENGTH if each.cut else STOP)
        one.tokens, one.logprobs = bytes(each.tokens), bytes(each.logprobs)
    if prompt_logprobs is not None:
        result.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    if top is not None:
        top_k = result.topk_prompt_logprobs
        top_k.token_ids, top_k.logprobs = top[0].astype("<i4").tobytes(), top[1].astype("<f4").tobytes()
        top_k.length, top_k.k = top[0].shape
    return bytes(result.SerializeToString())

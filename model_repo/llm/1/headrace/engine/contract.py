"""The engine contract `headrace.engine.v1` on the wire: both halves of the codec, and nothing else.

Sans-io: bytes and arrays in, values out. The engine encodes steps and replies and decodes operations; the
Scheduler does the reverse. docs/engine-contract.md is the specification. REQUEST itself is in `request.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

CONTRACT = "headrace.engine.v1"

OPS = frozenset({"events", "generate", "credit", "cancel", "list", "ping", "stats", "run"})

# The name, Triton datatype and numpy dtype of each column of a step. Triton does not check a Python model's
# output dtypes, so this table is the only guard: both halves are built from it.
COLUMNS: dict[str, tuple[str, npt.DTypeLike]] = {
    "step": ("INT64", np.int64),
    "seqs": ("INT64", np.int64),
    "token_counts": ("INT32", np.int32),
    "token_ids": ("INT32", np.int32),
    "text_lengths": ("INT32", np.int32),
    "text": ("UINT8", np.uint8),
    "logprobs": ("FP32", np.float32),
    "top_counts": ("INT32", np.int32),
    "top_ids": ("INT32", np.int32),
    "top_logprobs": ("FP32", np.float32),
}

Tensor = tuple[str, "npt.NDArray[Any]"]
RawInput = tuple[str, str, list[int], bytes]


class WireError(ValueError):
    """What came over the wire does not follow the contract; the sentence says where."""


@dataclass(slots=True)
class Part:
    """What one sequence got in one response; `text` is valid UTF-8."""

    seq: int
    token_ids: list[int]
    text: bytes
    logprobs: list[float] | None = None
    top: list[list[tuple[int, float]]] | None = None


@dataclass(slots=True)
class StepBatch:
    """One response of the event stream, as columns (the tensors of the contract, under the same names).

    `number` counts the responses of this stream from 1, `steps` the engine steps merged here, `ended_ns` is
    CLOCK_MONOTONIC of the newest one's end. `final` is Triton's FINAL flag.
    """

    number: int = 0
    steps: int = 0
    ended_ns: int = 0
    seqs: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text_lengths: list[int] = field(default_factory=list)
    text: bytes = b""
    logprobs: list[float] | None = None
    top_counts: list[int] | None = None
    top_ids: list[int] | None = None
    top_logprobs: list[float] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    final: bool = False

    def parts(self) -> Iterator[Part]:
        """The columns cut into parts, in order. Readers in a hurry use the columns themselves."""
        token = byte = alternative = 0
        for seq, count, length in zip(self.seqs, self.token_counts, self.text_lengths, strict=True):
            part = Part(seq, self.token_ids[token : token + count], self.text[byte : byte + length])
            if self.logprobs is not None:
                part.logprobs = self.logprobs[token : token + count]
                part.top = []
                for wide in (self.top_counts or [])[token : token + count]:
                    ids = (self.top_ids or [])[alternative : alternative + wide]
                    values = (self.top_logprobs or [])[alternative : alternative + wide]
                    part.top.append(list(zip(ids, values, strict=True)))
                    alternative += wide
            token += count
            byte += length
            yield part


@dataclass(slots=True)
class Reply:
    """The answer to an operation: a receipt, or `error`."""

    document: dict[str, Any]
    final: bool = True

    @property
    def ok(self) -> bool:
        """Whether the engine took the operation."""
        return self.document.get("ok") is True

    @property
    def error(self) -> dict[str, Any]:
        """The ERROR of a refused operation, empty when there is none."""
        error = self.document.get("error")
        return error if isinstance(error, dict) else {}


def merge(batches: Sequence[StepBatch]) -> StepBatch:
    """Several batches in a row as one. The order of parts and of events holds; `number` is the first one's.

    Events and columns may only be merged because the reader takes `admitted` before and `finished` after the
    columns, and an engine never says anything of a sequence that it has finished.
    """
    if len(batches) == 1:
        return batches[0]
    merged = StepBatch(number=batches[0].number)
    rich = any(batch.logprobs is not None for batch in batches)
    if rich:
        merged.logprobs, merged.top_counts, merged.top_ids, merged.top_logprobs = [], [], [], []
    for batch in batches:
        merged.steps += batch.steps
        merged.ended_ns = max(merged.ended_ns, batch.ended_ns)
        merged.seqs += batch.seqs
        merged.token_counts += batch.token_counts
        merged.token_ids += batch.token_ids
        merged.text_lengths += batch.text_lengths
        merged.events += batch.events
        merged.final = merged.final or batch.final
        if rich:
            _append_logprobs(merged, batch)
    merged.text = b"".join([batch.text for batch in batches])
    return merged


def _append_logprobs(merged: StepBatch, batch: StepBatch) -> None:
    assert merged.logprobs is not None
    assert merged.top_counts is not None
    assert merged.top_ids is not None
    assert merged.top_logprobs is not None
    plain = len(batch.token_ids)
    merged.logprobs += [math.nan] * plain if batch.logprobs is None else batch.logprobs
    merged.top_counts += [0] * plain if batch.top_counts is None else batch.top_counts
    merged.top_ids += batch.top_ids or []
    merged.top_logprobs += batch.top_logprobs or []


def encode_step(batch: StepBatch) -> list[Tensor]:
    """The tensors of one response; empty groups are left out."""
    tensors = [_column("step", [batch.number, batch.steps, batch.ended_ns])]
    if batch.seqs:
        tensors.append(_column("seqs", batch.seqs))
        tensors.append(_column("token_counts", batch.token_counts))
        tensors.append(_column("text_lengths", batch.text_lengths))
    if batch.token_ids:
        tensors.append(_column("token_ids", batch.token_ids))
    if batch.text:
        tensors.append(("text", np.frombuffer(batch.text, dtype=np.uint8)))
    if batch.token_ids and batch.logprobs is not None:
        tensors.append(_column("logprobs", batch.logprobs))
        tensors.append(_column("top_counts", batch.top_counts or [0] * len(batch.token_ids)))
        if batch.top_ids:
            tensors.append(_column("top_ids", batch.top_ids))
            tensors.append(_column("top_logprobs", batch.top_logprobs or []))
    if batch.events:
        tensors.append(("events", _document(batch.events)))
    return tensors


def encode_reply(document: Mapping[str, Any]) -> list[Tensor]:
    """The one tensor that answers an operation."""
    return [("reply", _document(document))]


def _column(name: str, values: Sequence[float]) -> Tensor:
    return name, np.array(values, dtype=COLUMNS[name][1])


def _document(value: object) -> npt.NDArray[Any]:
    return np.array([dumps(value)], dtype=np.object_)


def dumps(value: object) -> bytes:
    """JSON as this contract writes it: UTF-8, no blanks, no NaN."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def encode_op(
    op: str, request: Mapping[str, Any] | None = None, tokens: Sequence[int] | npt.NDArray[Any] | None = None
) -> list[RawInput]:
    """An operation's inputs as (name, datatype, shape, raw bytes), ready for `raw_input_contents`.

    `tokens` holds the prompts given as ids, concatenated in the order of the requests.
    """
    if op not in OPS:
        raise WireError(f"the engine contract has no operation {op!r}")
    inputs: list[RawInput] = [("op", "BYTES", [1], _bytes_element(op.encode()))]
    if request is not None:
        inputs.append(("request", "BYTES", [1], _bytes_element(dumps(request))))
    if tokens is not None and len(tokens):
        ids = np.ascontiguousarray(tokens, dtype="<i4")
        inputs.append(("tokens", "INT32", [int(ids.size)], ids.tobytes()))
    return inputs


def _bytes_element(data: bytes) -> bytes:
    """One element of a Triton BYTES tensor: its length in four little-endian bytes, then itself."""
    return len(data).to_bytes(4, "little") + data


def _one_element(raw: bytes, name: str) -> bytes:
    if len(raw) < 4 or int.from_bytes(raw[:4], "little") != len(raw) - 4:
        raise WireError(f"tensor {name} is not one BYTES element")
    return raw[4:]


def decode_response(response: Any) -> StepBatch | Reply:
    """A `ModelInferResponse` (anything with `outputs`, `raw_output_contents`, `parameters`) as a value.

    Raises `WireError` when its tensors do not follow the contract.
    """
    raw = {}
    for output, data in zip(response.outputs, response.raw_output_contents, strict=True):
        name = output.name
        expected = COLUMNS[name][0] if name in COLUMNS else "BYTES"
        if output.datatype != expected:
            raise WireError(f"tensor {name} has datatype {output.datatype}, the contract says {expected}")
        raw[name] = data
    final = is_final(response)
    if "reply" in raw:
        document = _json(_one_element(raw["reply"], "reply"), "reply")
        if not isinstance(document, dict):
            raise WireError("tensor reply is not a JSON object")
        return Reply(document, final)
    if "step" not in raw:
        if final and not raw:
            return StepBatch(final=True)
        raise WireError("a response has neither a step nor a reply")
    number, steps, ended_ns = _list(raw, "step", 3)
    batch = StepBatch(number=number, steps=steps, ended_ns=ended_ns, final=final)
    if "seqs" in raw:
        _decode_columns(raw, batch)
    if "events" in raw:
        events = _json(_one_element(raw["events"], "events"), "events")
        if not isinstance(events, list):
            raise WireError("tensor events is not a JSON array")
        batch.events = events
    return batch


def _decode_columns(raw: Mapping[str, bytes], batch: StepBatch) -> None:
    batch.seqs = _list(raw, "seqs")
    parts = len(batch.seqs)
    batch.token_counts = _list(raw, "token_counts", parts)
    batch.text_lengths = _list(raw, "text_lengths", parts)
    count = sum(batch.token_counts)
    batch.token_ids = _list(raw, "token_ids", count)
    batch.text = raw.get("text", b"")
    if len(batch.text) != sum(batch.text_lengths):
        raise WireError("tensor text is not as long as text_lengths says")
    if "logprobs" in raw:
        batch.logprobs = _list(raw, "logprobs", count)
        batch.top_counts = _list(raw, "top_counts", count)
        alternatives = sum(batch.top_counts)
        batch.top_ids = _list(raw, "top_ids", alternatives)
        batch.top_logprobs = _list(raw, "top_logprobs", alternatives)


def _list(raw: Mapping[str, bytes], name: str, length: int | None = None) -> list[Any]:
    values: list[Any] = np.frombuffer(raw.get(name, b""), dtype=COLUMNS[name][1]).tolist()
    if length is not None and len(values) != length:
        raise WireError(f"tensor {name} has {len(values)} values, expected {length}")
    return values


def _json(data: bytes, name: str) -> object:
    try:
        value: object = json.loads(data)
    except ValueError:
        raise WireError(f"tensor {name} is not JSON") from None
    return value


def is_final(response: Any) -> bool:
    """Triton's FINAL flag. A rejection by Triton's core has no parameters at all and counts as final."""
    parameters = response.parameters
    if "triton_final_response" not in parameters:
        return not response.outputs
    return bool(parameters["triton_final_response"].bool_param)

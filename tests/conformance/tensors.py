"""What a response of the contract may hold, checked from the message itself: names, datatypes, ranks, lengths.

Triton does not check what a Python model returns: a column of another dtype, or a name that config.pbtxt does not have,
goes to the client as it is. So this table is written down a second time, from docs/engine-contract.md and not from the
engine's own, and every response that the conformance suite receives passes through it.
"""

from __future__ import annotations

import json
from typing import Any

ITEM_BYTES = {"INT64": 8, "INT32": 4, "FP32": 4, "UINT8": 1}
COLUMNS = {
    "step": "INT64",
    "seqs": "INT64",
    "token_counts": "INT32",
    "token_ids": "INT32",
    "text_lengths": "INT32",
    "text": "UINT8",
    "logprobs": "FP32",
    "top_counts": "INT32",
    "top_ids": "INT32",
    "top_logprobs": "FP32",
}
DOCUMENTS = ("reply", "events")
LENGTH_OF_THE_OTHER = (
    ("seqs", "token_counts"),
    ("seqs", "text_lengths"),
    ("token_ids", "logprobs"),
    ("token_ids", "top_counts"),
    ("top_ids", "top_logprobs"),
)


def check(response: Any) -> None:
    """Assert that a ModelInferResponse has the contract's tensors and no others, each as it is declared."""
    assert response.model_name == "llm"
    outputs = {output.name: output for output in response.outputs}
    assert len(outputs) == len(response.outputs), "a tensor comes twice"
    assert len(response.raw_output_contents) == len(response.outputs)
    lengths = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        shape = list(output.shape)
        assert len(shape) == 1, f"{output.name} has rank {len(shape)}"
        lengths[output.name] = shape[0]
        if output.name in DOCUMENTS:
            _check_document(output, raw)
        else:
            assert output.name in COLUMNS, f"the contract has no tensor {output.name}"
            assert output.datatype == COLUMNS[output.name], f"{output.name} is {output.datatype}"
            assert len(raw) == shape[0] * ITEM_BYTES[output.datatype], f"{output.name} is not as long as its shape says"
            assert shape[0] > 0, f"{output.name} is empty, and empty tensors are left out"
    _check_group(lengths)


def _check_document(output: Any, raw: bytes) -> None:
    assert output.datatype == "BYTES", f"{output.name} is {output.datatype}"
    assert list(output.shape) == [1]
    assert int.from_bytes(raw[:4], "little") == len(raw) - 4, f"{output.name} is not one element"
    value = json.loads(raw[4:], parse_constant=lambda name: (_ for _ in ()).throw(AssertionError(name)))
    assert isinstance(value, dict if output.name == "reply" else list)


def _check_group(lengths: dict[str, int]) -> None:
    """One tensor for a reply; a step and its columns otherwise. The flag FINAL may come alone."""
    if not lengths:
        return
    if "reply" in lengths:
        assert lengths == {"reply": 1}
        return
    assert lengths["step"] == 3
    for one, other in LENGTH_OF_THE_OTHER:
        if other in lengths:
            assert lengths[other] == lengths.get(one), f"{other} is not as long as {one}"
    if "seqs" in lengths:
        assert {"token_counts", "text_lengths"} <= lengths.keys()
    assert ("logprobs" in lengths) == ("top_counts" in lengths)
    assert ("top_ids" in lengths) == ("top_logprobs" in lengths)

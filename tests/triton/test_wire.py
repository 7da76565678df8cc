"""What Triton's error strings mean."""

import pytest

from headrace.triton.wire import TritonFault, classify_error

SEEN = [
    ("Request for unknown model: 'llm' is not found", TritonFault.NOT_LOADED),
    ("Request for unknown model: 'llm' has no available versions", TritonFault.UNLOADING),
    ("[request id: generate-1] Exceeds maximum queue size", TritonFault.QUEUE_FULL),
    ("Request timeout expired", TritonFault.QUEUE_TIMEOUT),
    ("Stub process 'llm_0_0' is not healthy.", TritonFault.ENGINE_DEAD),
    ("Failed to process the request(s) for model 'llm_0_0'", TritonFault.INTERNAL),
    ("[request id: r] expected number of inputs between 1 and 3 but got 4", TritonFault.INVALID),
    ("parameter keys starting with 'triton_' are reserved for Triton usage", TritonFault.INVALID),
    ("GRPC server is shutting down and has stopped accepting new requests.", TritonFault.UNLOADING),
    ("something new", TritonFault.INTERNAL),
]


@pytest.mark.parametrize(("text", "fault"), SEEN)
def test_each_string_has_one_meaning(text, fault):
    assert classify_error(text) is fault


def test_what_is_fatal():
    assert {fault for fault in TritonFault if fault.is_fatal} == {
        TritonFault.ENGINE_DEAD,
        TritonFault.UNLOADING,
        TritonFault.NOT_LOADED,
    }

"""What a Dispatch says of its load, and what an engine's times are worth."""

import pytest

from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.attempt_book import Attempt
from headrace.control.deadlines import Budget
from headrace.control.priority import Priority
from headrace.scheduler import codec, queue_codec

SECOND = 1_000_000_000
TIMES = {"received": 1, "admitted": 5 * SECOND, "first_token": 7 * SECOND, "stopped": 11 * SECOND}
FINISHED = {
    "reason": "stop",
    "usage": {"prompt": 100, "cached": 60, "generated": 9, "emitted": 8},
    "timing_ns": TIMES | {"finished": 12 * SECOND},
}


def load_of(message):
    return queue_codec.with_load(codec.dispatched(message, session=1, context_tokens=1000), message)


def message(**fields):
    made = pb.Dispatch(**fields)
    made.generate.prompt = "ä" * 10
    return made


def test_a_dispatch_without_anything_ranks_in_the_middle_and_is_a_first_attempt():
    known = load_of(message())
    assert (known.priority, known.tenant, known.effort, known.is_extra) == (Priority.STANDARD, "", "", False)
    assert (known.prompt_tokens, known.is_prompt_exact) == (3, False)  # ten letters


def test_what_a_dispatch_says_is_taken():
    known = load_of(
        message(
            tenant="tenants/a",
            priority=inference_pb2.PRIORITY_CRITICAL,
            effective_effort=inference_pb2.REASONING_EFFORT_HIGH,
        )
    )
    assert (known.tenant, known.priority, known.effort) == ("tenants/a", Priority.CRITICAL, "high")
    assert known.load_class.effort == "high"


@pytest.mark.parametrize(
    ("cause", "is_extra"),
    [("UNSPECIFIED", False), ("FIRST", False), ("RETRY", True), ("HEDGE", True), ("CONTINUATION", True)],
)
def test_all_but_first_attempts_are_extra(cause, is_extra):
    number = inference_pb2.AttemptRecord.Cause.Value(f"CAUSE_{cause}")
    assert load_of(message(cause=number)).is_extra is is_extra


def test_a_priority_of_a_newer_router_ranks_in_the_middle():
    made = pb.Dispatch.FromString(message().SerializeToString() + b"\x70\x63")  # field 14, number 99
    assert made.priority == 99
    assert load_of(made).priority is Priority.STANDARD


def test_ids_are_counted_and_a_conversation_by_its_text():
    made = message()
    made.generate.tokens.ids[:] = range(1000)
    assert (load_of(made).prompt_tokens, load_of(made).is_prompt_exact) == (1000, True)
    made.generate.conversation.messages.add(role=inference_pb2.ROLE_USER, content="x" * 40)
    made.generate.conversation.messages.add(role=inference_pb2.ROLE_USER, content="x" * 41)
    assert (load_of(made).prompt_tokens, load_of(made).is_prompt_exact) == (21, False)


def attempt(**fields):
    budget = Budget(received_at=0.0, deadline_at=9.0)
    return Attempt(1, 1, "replicas/r", 1, 0, 0, budget, 10, 10, **fields)


def test_times_are_differences_of_the_engines_own_clock():
    served = queue_codec.served(FINISHED, attempt())
    assert (served.prompt_tokens, served.prefill_s, served.token_s) == (40, 2.0, 0.5)
    assert (served.output_tokens, served.hold_s) == (9, 7.0)


def test_what_was_cut_short_tells_its_pace_and_not_its_length():
    served = queue_codec.served(FINISHED | {"reason": "cancelled"}, attempt())
    assert (served.prefill_s, served.token_s, served.output_tokens, served.hold_s) == (2.0, 0.5, None, None)


@pytest.mark.parametrize(
    ("timing", "generated", "prefill_s", "token_s"),
    [
        ({"first_token": 0}, 0, None, None),  # it ended before its first token
        ({}, 1, 2.0, None),  # one token has no pace
        ({"stopped": 0}, 9, 2.0, None),
    ],
    ids=["none", "one", "no end"],
)
def test_what_did_not_happen_is_not_measured(timing, generated, prefill_s, token_s):
    event = FINISHED | {
        "timing_ns": FINISHED["timing_ns"] | timing,
        "usage": FINISHED["usage"] | {"generated": generated},
    }
    served = queue_codec.served(event, attempt())
    assert (served.prefill_s, served.token_s) == (prefill_s, token_s)


def test_one_that_never_began_or_was_preempted_measures_nothing():
    assert queue_codec.served({"reason": "cancelled"}, attempt()) is None
    assert queue_codec.served(FINISHED, attempt(preempted_last=1)) is None

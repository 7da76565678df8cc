"""The client's rules for another call, to ask again or to go on reading, as tables and as properties."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.client_retry import (
    AttemptFailure,
    BrokenStream,
    RetryPolicy,
    decide_resume,
    decide_retry,
    is_refusal,
    is_resumable,
)
from headrace.control.errors import RULES, Reason, Retry

POLICY = RetryPolicy(attempts_max=3, backoff_first_s=0.1, backoff_max_s=0.3)


def decide(
    failure: AttemptFailure,
    *,
    policy: RetryPolicy | None = POLICY,
    attempts: int = 1,
    remaining_s: float | None = 60.0,
    jitter: float = 0.5,
) -> float | None:
    return decide_retry(policy, failure, attempts=attempts, remaining_s=remaining_s, jitter=jitter)


def unavailable(**more: object) -> AttemptFailure:
    return AttemptFailure("UNAVAILABLE", None, **more)  # type: ignore[arg-type]


def overloaded(**more: object) -> AttemptFailure:
    return AttemptFailure("RESOURCE_EXHAUSTED", Reason.OVERLOADED, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        pytest.param(unavailable(), 0.05, id="a connection that fails is tried again, with jitter"),
        pytest.param(unavailable(begun=True), None, id="a connection lost after accepted is not"),
        pytest.param(unavailable(begun=True, output=True), None, id="nor after output"),
        pytest.param(AttemptFailure("INTERNAL", None), None, id="other transport failures are not"),
        pytest.param(AttemptFailure("UNKNOWN", None), None, id="nor what nobody knows"),
        pytest.param(overloaded(retry_after_s=2.0), 2.0, id="the service's delay is kept"),
        pytest.param(overloaded(retry_after_s=2.0, pushback="250"), 0.25, id="pushback is more precise"),
        pytest.param(overloaded(pushback="-1"), None, id="negative pushback: never"),
        pytest.param(overloaded(pushback="soon"), None, id="unreadable pushback: never"),
        pytest.param(overloaded(pushback="0"), 0.0, id="pushback 0: at once"),
        pytest.param(overloaded(retry_after_s=60.0), None, id="no wait that reaches the deadline"),
        pytest.param(
            AttemptFailure("UNAVAILABLE", Reason.WORKER_LOST_BEFORE_OUTPUT, retry_after_s=0.5),
            None,
            id="a worker that was lost: the Router has tried others, and the client does not multiply that",
        ),
        pytest.param(
            AttemptFailure("UNAVAILABLE", Reason.NO_HEALTHY_WORKER, begun=True),
            None,
            id="no refusal counts after the first event",
        ),
    ],
)
def test_what_follows_a_failure(failure: AttemptFailure, expected: float | None) -> None:
    assert decide(failure) == expected


@pytest.mark.parametrize("reason", list(Reason))
def test_before_acceptance_the_rules_of_the_reasons_decide(reason: Reason) -> None:
    retried = decide(AttemptFailure(RULES[reason].code, reason)) is not None
    allowed = RULES[reason].retry is Retry.CLIENT or reason is Reason.DRAINING
    assert retried == (allowed and reason not in {Reason.DEADLINE_EXCEEDED, Reason.QUOTA_EXCEEDED})
    if reason in {Reason.IDEMPOTENCY_KEY_REUSED, Reason.IDEMPOTENCY_ORIGIN_LOST}:
        assert not retried


@pytest.mark.parametrize(
    ("failure", "attempts", "expected"),
    [
        pytest.param({"retry_after_s": 7.0}, 1, 7.0, id="after the delay that the service names"),
        pytest.param({"retry_after_s": 7.0}, 2, None, id="once"),
        pytest.param({"pushback": "7000"}, 1, 7.0, id="or as push-back says"),
        pytest.param({"retry_after_s": 7.0, "pushback": "-1"}, 1, None, id="not against it"),
        pytest.param({}, 1, None, id="never by the client's own backoff"),
        pytest.param({"retry_after_s": 60.0}, 1, None, id="not past the deadline"),
    ],
)
def test_a_quota_that_is_used_up(failure: dict[str, Any], attempts: int, expected: float | None) -> None:
    quota = AttemptFailure("RESOURCE_EXHAUSTED", Reason.QUOTA_EXCEEDED, **failure)
    assert decide(quota, attempts=attempts) == expected


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        pytest.param(unavailable(begun=True), True, id="lost after accepted, before output"),
        pytest.param(AttemptFailure("INTERNAL", None, begun=True), True, id="a reset stream"),
        pytest.param(AttemptFailure("UNKNOWN", None), True, id="before any event"),
        pytest.param(unavailable(begun=True, output=True), False, id="never after output"),
        pytest.param(AttemptFailure("DEADLINE_EXCEEDED", None, begun=True), False, id="a deadline is no loss"),
        pytest.param(
            AttemptFailure("UNAVAILABLE", Reason.WORKER_LOST_BEFORE_OUTPUT, begun=True), False, id="the Router answered"
        ),
        pytest.param(AttemptFailure("ABORTED", Reason.IDEMPOTENCY_ORIGIN_LOST), False, id="nobody can tell"),
        pytest.param(AttemptFailure("INVALID_ARGUMENT", Reason.IDEMPOTENCY_KEY_REUSED), False, id="other content"),
    ],
)
def test_a_lost_router_is_failed_over(failure: AttemptFailure, expected: bool) -> None:
    def wait(policy: RetryPolicy | None, attempts: int) -> float | None:
        return decide_retry(policy, failure, attempts=attempts, remaining_s=9.0, jitter=0.5, may_fail_over=True)

    assert (wait(POLICY, 1) is not None) == expected
    assert wait(POLICY, 3) is None, "attempts_max holds"
    assert wait(None, 1) is None


def test_attempts_are_counted_with_the_first() -> None:
    assert [decide(unavailable(), attempts=n) is not None for n in (1, 2, 3, 4)] == [True, True, False, False]


def test_backoff_doubles_up_to_its_bound() -> None:
    patient = RetryPolicy(attempts_max=9, backoff_first_s=0.1, backoff_max_s=0.3)
    waits = [decide(unavailable(), policy=patient, attempts=n, jitter=1.0) for n in (1, 2, 3, 4)]
    assert waits == [0.1, 0.2, 0.3, 0.3]


def test_no_policy_means_no_retry() -> None:
    assert decide(unavailable(), policy=None) is None


def test_a_passed_deadline_ends_it_and_no_deadline_does_not() -> None:
    assert decide(unavailable(), remaining_s=0.0, jitter=0.0) is None
    assert decide(overloaded(retry_after_s=1e6), remaining_s=None) == 1e6


@given(
    st.builds(
        AttemptFailure,
        code=st.sampled_from(["UNAVAILABLE", "INTERNAL", "RESOURCE_EXHAUSTED"]),
        reason=st.none() | st.sampled_from(Reason),
        begun=st.booleans(),
        output=st.booleans(),
        retry_after_s=st.none() | st.floats(0, 10),
        pushback=st.none() | st.integers(-5, 5000).map(str),
    ),
    st.integers(1, 5),
    st.none() | st.floats(0, 5),
    st.floats(0, 1),
)
def test_a_wait_is_never_negative_never_past_the_deadline_and_never_after_output(
    failure: AttemptFailure, attempts: int, remaining_s: float | None, jitter: float
) -> None:
    wait_s = decide(failure, attempts=attempts, remaining_s=remaining_s, jitter=jitter)
    if wait_s is not None:
        assert not failure.output
        assert attempts < POLICY.attempts_max
        assert wait_s >= 0
        assert remaining_s is None or wait_s < remaining_s


@pytest.mark.parametrize(
    "wrong", [{"attempts_max": 0}, {"backoff_first_s": -1.0}, {"backoff_first_s": 2.0, "backoff_max_s": 1.0}]
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


def resume(
    code: str = "UNAVAILABLE",
    reason: Reason | None = None,
    *,
    failures: int = 1,
    broken_s: float = 0.0,
    retry_after_s: float | None = None,
    pushback: str | None = None,
    remaining_s: float | None = 60.0,
    jitter: float = 0.5,
) -> float | None:
    broken = BrokenStream(code, reason, failures, broken_s, 10.0, retry_after_s, pushback)
    return decide_resume(POLICY, broken, remaining_s=remaining_s, jitter=jitter)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        pytest.param({}, 0.05, id="a lost connection, with jitter"),
        pytest.param({"retry_after_s": 2.0, "pushback": "250"}, 0.25, id="pushback is kept"),
        pytest.param({"pushback": "-1"}, None, id="also if it says never"),
        pytest.param({"code": "INTERNAL"}, 0.05, id="a reset stream"),
        pytest.param({"code": "UNKNOWN"}, 0.05, id="a stream that gRPC has removed"),
        pytest.param({"code": "CANCELLED"}, None, id="a call that was cancelled here"),
        pytest.param({"code": "DEADLINE_EXCEEDED"}, None, id="the deadline"),
        pytest.param({"code": "UNIMPLEMENTED"}, None, id="a service that cannot"),
        pytest.param({"failures": 2, "jitter": 1.0}, 0.2, id="the wait doubles"),
        pytest.param({"failures": 9, "jitter": 1.0}, 0.3, id="up to its bound"),
        pytest.param({"failures": 10**6, "jitter": 1.0}, 0.3, id="however often"),
        pytest.param({"reason": Reason.OVERLOADED, "retry_after_s": 2.0}, 2.0, id="the service's delay is kept"),
        pytest.param({"broken_s": 9.96}, None, id="no wait that reaches the end of the window"),
        pytest.param({"retry_after_s": 10.0}, None, id="not even the service's"),
        pytest.param({"remaining_s": 0.05}, None, id="nor the deadline"),
        pytest.param({"remaining_s": None}, 0.05, id="which there need not be"),
    ],
)
def test_what_follows_a_broken_stream(broken: dict[str, object], expected: float | None) -> None:
    assert resume(**broken) == expected  # type: ignore[arg-type]


def test_only_refusals_that_say_nothing_about_the_request_are_waited_out() -> None:
    waited = {reason for reason in Reason if is_resumable(RULES[reason].code, reason)}
    assert waited == {
        Reason.OVERLOADED,
        Reason.DRAINING,
        Reason.NO_SNAPSHOT,
        Reason.STORE_UNAVAILABLE,
        Reason.IDEMPOTENCY_ORIGIN_UNREACHABLE,
    }
    assert Reason.STREAM_TAKEN_OVER not in waited, "two readers would take the stream from each other for ever"


@given(
    st.sampled_from(["UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED"]),
    st.none() | st.sampled_from(Reason),
    st.integers(1, 10_000),
    st.floats(0, 20),
    st.none() | st.floats(0, 20),
    st.none() | st.floats(0, 20),
    st.floats(0, 1),
)
def test_a_resumption_is_begun_in_the_window_and_before_the_deadline(
    code: str,
    reason: Reason | None,
    failures: int,
    broken_s: float,
    retry_after_s: float | None,
    remaining_s: float | None,
    jitter: float,
) -> None:
    wait_s = resume(
        code,
        reason,
        failures=failures,
        broken_s=broken_s,
        retry_after_s=retry_after_s,
        remaining_s=remaining_s,
        jitter=jitter,
    )
    if wait_s is not None:
        assert is_resumable(code, reason)
        assert broken_s + wait_s < 10.0
        assert remaining_s is None or wait_s < remaining_s
        assert wait_s == retry_after_s or 0 <= wait_s <= POLICY.backoff_max_s


DRAINING = AttemptFailure("UNAVAILABLE", Reason.DRAINING, retry_after_s=0.0, pushback="0")


@pytest.mark.parametrize(
    ("failure", "before", "expected"),
    [
        pytest.param(DRAINING, 0, True, id="an instance that stops says so"),
        pytest.param(unavailable(), 0, False, id="nobody is there: an ordinary failure"),
        pytest.param(unavailable(), 1, True, id="nobody is there, after one that stops: it is restarting"),
        pytest.param(unavailable(begun=True), 1, False, id="a worker had it"),
        pytest.param(overloaded(), 1, False, id="another refusal is another thing"),
    ],
)
def test_what_counts_as_a_refusal_of_a_fleet_that_restarts(
    failure: AttemptFailure, before: int, expected: bool
) -> None:
    assert is_refusal(failure, refusals=before) is expected


def test_refusals_cost_no_attempt_but_time_from_the_second_on() -> None:
    waits = []
    for refusals in range(1, 20):
        wait_s = decide_retry(POLICY, DRAINING, attempts=refusals, refusals=refusals, remaining_s=60.0, jitter=1.0)
        if wait_s is None:
            break
        waits.append(wait_s)
    assert waits == [0.0, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3], "attempts_max - 1 + refusals_max calls follow the first"

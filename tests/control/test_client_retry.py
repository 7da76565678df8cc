"""The client's retry rule, as a table and as properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.client_retry import AttemptFailure, RetryPolicy, decide_retry
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
        pytest.param(unavailable(accepted=True), None, id="a connection lost after accepted is not"),
        pytest.param(unavailable(accepted=True, output=True), None, id="nor after output"),
        pytest.param(AttemptFailure("INTERNAL", None), None, id="other transport failures are not"),
        pytest.param(AttemptFailure("UNKNOWN", None), None, id="nor what nobody knows"),
        pytest.param(overloaded(retry_after_s=2.0), 2.0, id="the service's delay is kept"),
        pytest.param(overloaded(retry_after_s=2.0, pushback="250"), 0.25, id="pushback is more precise"),
        pytest.param(overloaded(pushback="-1"), None, id="negative pushback: never"),
        pytest.param(overloaded(pushback="soon"), None, id="unreadable pushback: never"),
        pytest.param(overloaded(pushback="0"), 0.0, id="pushback 0: at once"),
        pytest.param(overloaded(retry_after_s=60.0), None, id="no wait that reaches the deadline"),
        pytest.param(
            AttemptFailure("UNAVAILABLE", Reason.WORKER_LOST_BEFORE_OUTPUT, accepted=True, retry_after_s=0.5),
            0.5,
            id="a worker that was lost before output, after accepted",
        ),
        pytest.param(
            AttemptFailure("UNAVAILABLE", Reason.NO_HEALTHY_WORKER, accepted=True),
            None,
            id="no other reason counts after accepted",
        ),
    ],
)
def test_what_follows_a_failure(failure: AttemptFailure, expected: float | None) -> None:
    assert decide(failure) == expected


@pytest.mark.parametrize("reason", list(Reason))
def test_before_acceptance_the_rules_of_the_reasons_decide(reason: Reason) -> None:
    retried = decide(AttemptFailure(RULES[reason].code, reason)) is not None
    allowed = RULES[reason].retry in (Retry.CLIENT, Retry.ROUTER) and reason is not Reason.DEADLINE_EXCEEDED
    assert retried == allowed


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
        accepted=st.booleans(),
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

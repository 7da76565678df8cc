"""What a Router refuses because its replicas have said that they would."""

from __future__ import annotations

import dataclasses

from headrace.control.doors import Closed
from headrace.control.priority import Priority
from headrace.control.router_admission import LOOKED_AT_MAX, VERDICT_S
from support.admissions import admission, demand, refusal, replica, tell

STANDARD, CRITICAL = Priority.STANDARD, Priority.CRITICAL


def test_a_tenant_that_has_its_share_everywhere_is_refused_here_and_others_are_not() -> None:
    made = admission(replica("a"), replica("b"))
    tell(made, "a", admits_from=0, room=1, closed=[Closed("greedy", STANDARD)], now=0.0)
    tell(made, "b", admits_from=CRITICAL, room=0, now=0.0)
    told = refusal(made, demand(tenant="greedy"))
    assert (told.metadata["bound"], told.metadata["of"]) == ("share", "replicas")
    made.admit(demand(tenant="modest"), 0.0)
    made.admit(demand(CRITICAL, tenant="greedy"), 0.0)


def test_what_was_sent_into_the_last_place_refuses_until_the_next_report() -> None:
    made = admission(replica("a"))
    tell(made, "a", admits_from=0, room=1, now=0.0)
    made.admit(demand(), 0.0)
    made.doors.sent("a")
    assert refusal(made, demand()).metadata["bound"] == "replicas"
    tell(made, "a", admits_from=0, room=1, now=0.1)
    made.admit(demand(), 0.1)


def test_where_very_many_refuse_that_is_believed_for_a_moment() -> None:
    many = [replica(f"r{n}") for n in range(LOOKED_AT_MAX + 1)]
    made = admission(*many)
    for one in many:
        tell(made, one.name, admits_from=CRITICAL, now=0.0)
    refusal(made, demand(tokens=5))
    made.doors.forget("r0")
    refusal(made, demand(tokens=5), VERDICT_S / 2)
    refusal(made, demand(Priority.BATCH, tokens=6), VERDICT_S / 2)
    made.admit(demand(tenant="of another nobody knows", tokens=5), VERDICT_S / 2)
    made.admit(demand(tokens=4), VERDICT_S / 2)
    made.admit(demand(tokens=5), VERDICT_S + 0.01)


def test_what_would_wait_too_long_everywhere_is_refused_here_by_its_own_limits() -> None:
    made = admission(replica("a"), replica("b"))
    for name in ("a", "b"):
        tell(made, name, admits_from=0, closed=[Closed("t", STANDARD, 40, wait_s=3.0)], now=0.0, queue_wait_s=1.5)
    limited = dataclasses.replace(demand(tenant="t", tokens=40), queue_s=2.0)
    told = refusal(made, limited)
    assert (told.metadata["bound"], told.metadata["of"], told.retry_after_s) == ("wait", "replicas", 1.5)
    made.admit(dataclasses.replace(limited, queue_s=4.0), 0.0)
    made.admit(dataclasses.replace(limited, tokens=10), 0.0)
    tell(made, "b", admits_from=0, now=0.1)
    made.admit(limited, 0.1)

"""What is told of a request's use: its record, its class in the metrics, and one log line without its text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.errors import Reason
from headrace.control.resources import Alias, AliasTarget, Effort, Replica, RequestPolicy, Revision
from router.harness import REVISION, Harness, collect, failure, running, until
from router.test_tenants import ACME, ACME_KEY, bearer, call, finish, refused

THINKER = Revision(
    "thinker",
    "",
    "",
    REVISION.execution,
    RequestPolicy(supported_efforts=frozenset({Effort.NONE, Effort.HIGH}), default_effort=Effort.LOW),
)


def publish_thinker(h: Harness) -> None:
    """Let the alias name a revision that knows efforts, served where the other is."""
    before = h.routes.snapshot
    assert before is not None
    served: list[Replica] = [replace(before.replicas[0], name="replicas/t0", revision=THINKER.name)]
    after = replace(
        before,
        version=before.version + 1,
        revisions=(THINKER,),
        aliases=(Alias("aliases/chat", (AliasTarget(THINKER.name, 1),)),),
        replicas=tuple(served),
        tenants=(ACME,),
    )
    h.routes.apply(after)


@pytest.mark.parametrize(
    ("asked", "effective", "words"),
    [
        (pb.REASONING_EFFORT_UNSPECIFIED, pb.REASONING_EFFORT_LOW, ("unset", "low")),
        (pb.REASONING_EFFORT_LOW, pb.REASONING_EFFORT_LOW, ("low", "low")),
        (pb.REASONING_EFFORT_HIGH, pb.REASONING_EFFORT_HIGH, ("high", "high")),
        (pb.REASONING_EFFORT_NONE, pb.REASONING_EFFORT_NONE, ("none", "none")),
    ],
)
async def test_requested_default_and_effective_effort_are_told_everywhere(
    asked: pb.ReasoningEffort, effective: pb.ReasoningEffort, words: tuple[str, str]
) -> None:
    async with running() as h:
        publish_thinker(h)
        with capture_logs() as logs:
            answer = call(h, *bearer(ACME_KEY), reasoning_effort=asked, prompt="secret words")
            dispatch = await h.admitted()
            assert (dispatch.effective_effort, dispatch.generate.reasoning_effort) == (effective, effective)
            events = asyncio.create_task(collect(answer))
            await finish(h, dispatch, tokens=5, prompt=3)
            told, error = await events
            assert error is None
            await until(lambda: any(line["event"] == "request_over" for line in logs))
        name = told[0].request
        record = await h.stub.GetRequest(pb.GetRequestRequest(request=name), metadata=bearer(ACME_KEY))
        expected = (asked, pb.REASONING_EFFORT_LOW, effective, pb.PRIORITY_STANDARD)
        for place in (told[0].accepted, record):
            efforts = (place.requested_effort, place.default_effort, place.effective_effort)
            assert (*efforts, place.effective_priority) == expected
        (line,) = [line for line in logs if line["event"] == "request_over"]
        said = (line["requested_effort"], line["default_effort"], line["effective_effort"])
        assert said == (words[0], "low", words[1])
        assert (line["tenant"], line["key"], line["request"]) == ("tenants/acme", "tenants/acme/keys/k", name)
        assert (line["prompt_tokens"], line["generated_tokens"], line["finish_reason"]) == (3, 5, "stop")
        assert not any(text in str(logs) for text in ("secret words", ACME_KEY))
        of_class = {"model": "thinker", "effort": words[1], "priority": "standard"}
        assert h.metrics.registry.get_sample_value("headrace_router_class_requests_total", of_class) == 1
        tokens = {**of_class, "count": "generated"}
        assert h.metrics.registry.get_sample_value("headrace_router_class_tokens_total", tokens) == 5


async def test_an_effort_that_is_not_supported_is_refused_before_anything_is_taken() -> None:
    async with running() as h:
        publish_thinker(h)
        found: Any = await refused(h, *bearer(ACME_KEY), reasoning_effort=pb.REASONING_EFFORT_MEDIUM)
        assert found.reason is Reason.EFFORT_UNSUPPORTED
        assert found.metadata["supportedEfforts"] == "none, low, high"
        assert h.scheduler.dispatches.empty()
        assert h.service.quotas.core.running("tenants/acme") == 0


async def test_the_log_can_be_switched_off() -> None:
    async with running(usage_log=False) as h:
        with capture_logs() as logs:
            answer = asyncio.create_task(collect(call(h)))
            dispatch = await h.admitted()
            await h.scheduler.end(dispatch.attempt, pb.FINISH_REASON_FAILED)
            assert failure((await answer)[1]).reason is Reason.ENGINE_FAILED
        assert not any(line["event"] == "request_over" for line in logs)

"""What each request has used, told once it is over: a log line with whose it was, and counts by its class.

A class is what capacity is planned by: model, effort in force, priority. Its labels are bounded; requests and tenants
are in the log only. Neither has anything of the prompt or the output.
"""

from __future__ import annotations

from typing import Any

import prometheus_client as prom

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control.resources import Effort
from headrace.router.session import Session
from headrace.runtime.telemetry import get_logger


class UsageReport:
    """Of one Router.

    Args:
        registry: of the Router's metrics.
        logs: whether there is a log line for each request.
    """

    def __init__(self, registry: prom.CollectorRegistry, *, logs: bool) -> None:
        make: Any = {"namespace": "headrace", "subsystem": "router", "registry": registry}
        self._logs = logs
        self._log = get_logger()
        labels = ["model", "effort", "priority"]
        self._requests = prom.Counter(
            "class_requests_total", "Requests that are over, by model, effort in force and priority.", labels, **make
        )
        self._tokens = prom.Counter(
            "class_tokens_total", "Tokens of requests that are over, by the same.", [*labels, "count"], **make
        )

    def finished(self, session: Session) -> None:
        """A request is over; once."""
        plan, usage = session.plan, session.usage()
        of_class = (session.model, _word(plan.efforts.effective), plan.priority.name.lower())
        self._requests.labels(*of_class).inc()
        for count, tokens in (
            ("prompt", usage.prompt_tokens),
            ("generated", usage.generated_tokens),
            ("reasoning", usage.reasoning_tokens),
        ):
            self._tokens.labels(*of_class, count).inc(tokens)
        if self._logs:
            self._log.info("request_over", **_facts(session, usage))


def _facts(session: Session, usage: pb.Usage) -> dict[str, Any]:
    plan, record = session.plan, session.machine.record
    ttft_s = record.time_to_first_token_s()
    facts: dict[str, Any] = {
        "request": session.name,
        "tenant": plan.caller.tenant.name,
        "key": plan.caller.key,
        "revision": plan.revision.name,
        "finish_reason": record.finish.value if record.finish is not None else "",
        "reason": record.reason.value if record.reason is not None else "",
        "attempts": record.attempts,
        "priority": plan.priority.name.lower(),
        "requested_effort": _word(plan.efforts.requested),
        "default_effort": _word(plan.efforts.default),
        "effective_effort": _word(plan.efforts.effective),
        "prompt_tokens": usage.prompt_tokens,
        "cached_prompt_tokens": usage.cached_prompt_tokens,
        "generated_tokens": usage.generated_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "sent_tokens": usage.sent_tokens,
        "acknowledged_tokens": usage.acknowledged_tokens,
    }
    if ttft_s is not None:
        facts["time_to_first_token_ms"] = round(1000 * ttft_s, 1)
    return facts


def _word(effort: Effort | None) -> str:
    return effort.value if effort is not None else "unset"

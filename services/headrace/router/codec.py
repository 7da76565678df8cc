"""A client's request read with distrust, and completed with what its revision says.

check_request       before a revision is chosen: everything that is wrong, at once, without copying anything
complete_request    after: a copy with the revision's defaults, bounds and effort, ready for a Scheduler
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.adapters.route_codec import EFFORTS
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control import validation
from headrace.control.errors import Failure, InvalidRequest, Reason, Violation
from headrace.control.guided import guide_violations
from headrace.control.idempotency import key_violations
from headrace.control.priority import Priority
from headrace.control.resources import Effort, Revision
from headrace.control.validation import RequestLimits

_PRIORITIES = frozenset(map(int, Priority))
_CHOICES = {
    "on_disconnect": {value: name for name, value in pb.OnDisconnect.items()},
    "recovery": {value: name for name, value in pb.Recovery.items()},
}
_EFFORT_OF: dict[int, Effort] = {number: effort for effort, number in EFFORTS.items()}


@dataclass(frozen=True, slots=True)
class Efforts:
    """The three efforts of a request, which never stand for one another; None where there is none."""

    requested: Effort | None
    default: Effort | None
    effective: Effort | None


def check_request(request: pb.GenerateRequest, limits: RequestLimits) -> None:
    """Refuse a request that no revision could serve.

    Raises:
        InvalidRequest: fields are missing or wrong; all of them are named.
        Failure: REQUEST_TOO_LARGE, before any field is looked at.
    """
    kind = request.WhichOneof("input")
    _check_size(request, kind, limits)
    found: list[Violation] = [*validation.model_violations(request.model)]
    if kind == "prompt":
        found += validation.prompt_violations(request.prompt)
    elif kind == "conversation":
        messages = request.conversation.messages
        found += validation.conversation_violations(messages, ((m.role, bool(m.content)) for m in messages), limits)
    elif kind == "tokens":
        found += validation.token_violations(request.tokens.ids)
    else:
        found.append(Violation("prompt", "is required: one of prompt, conversation or tokens"))
    if request.HasField("max_tokens"):
        found += validation.max_tokens_violations(request.max_tokens, limits.output_tokens_max)
    if request.HasField("sampling"):
        for descriptor, value in request.sampling.ListFields():
            if violation := validation.sampling_violation(descriptor.name, value):
                found.append(violation)
    if request.HasField("stop"):
        found += validation.stop_violations(request.stop.strings, request.stop.token_ids, limits)
    if request.HasField("top_logprobs"):
        found += validation.top_logprobs_violations(request.top_logprobs, limits)
    if request.reasoning_effort:
        found += validation.effort_violations(request.reasoning_effort)
    if request.idempotency_key:
        found += key_violations(request.idempotency_key)
    if request.affinity_key:
        found += validation.affinity_violations(request.affinity_key)
    if request.HasField("guided_decoding"):
        found += _guide_violations(request)
    if request.on_disconnect or request.recovery:
        for field, choices in _CHOICES.items():
            found += validation.choice_violations(field, getattr(request, field), choices)
    validation.refuse(found)


def complete_request(request: pb.GenerateRequest, revision: Revision, limits: RequestLimits) -> pb.GenerateRequest:
    """Return a copy of a checked request in which nothing is left to the reader's defaults.

    Unset sampling fields take the revision's; `reasoning_effort` is the effective one; `model` is cleared, since the
    revision travels beside the request. An unset `max_tokens` stays unset: what the context leaves is known to the
    engine alone, and `output_tokens_allowed` travels beside it as the bound.

    Raises:
        InvalidRequest: max_tokens is more than the revision's policy allows.
        Failure: EFFORT_UNSUPPORTED, or CONTEXT_LENGTH_EXCEEDED where the token ids already prove it.
    """
    allowed = output_tokens_allowed(revision, limits)
    if request.HasField("max_tokens"):
        validation.refuse(validation.max_tokens_violations(request.max_tokens, allowed))
    efforts = resolve_efforts(request, revision)
    _check_context(request, revision)
    completed = pb.GenerateRequest()
    completed.CopyFrom(request)
    completed.ClearField("model")
    completed.ClearField("idempotency_key")  # the Router's business
    completed.reasoning_effort = EFFORTS[efforts.effective] if efforts.effective else pb.REASONING_EFFORT_UNSPECIFIED
    defaults, sampling = revision.policy.default_sampling, completed.sampling
    for field in type(defaults).__slots__:
        value = getattr(defaults, field)
        if value is not None and not sampling.HasField(field):
            setattr(sampling, field, value)
    return completed


def priority_asked(request: pb.GenerateRequest) -> Priority | None:
    """The priority that a request asks for; None: the tenant's default.

    Raises:
        InvalidRequest: there is no such priority.
    """
    if not request.priority:
        return None
    if request.priority not in _PRIORITIES:
        raise InvalidRequest((Violation("priority", "must be a known priority"),))
    return Priority(request.priority)


def output_tokens_allowed(revision: Revision, limits: RequestLimits) -> int:
    """Most tokens that a request to `revision` may ask for."""
    return min(revision.policy.max_output_tokens or limits.output_tokens_max, limits.output_tokens_max)


def resolve_efforts(request: pb.GenerateRequest, revision: Revision) -> Efforts:
    """Tell what effort was asked for, what the revision's default is, and what is in force.

    Raises:
        Failure: EFFORT_UNSUPPORTED; an effort is refused, never lowered.
    """
    policy = revision.policy
    if not request.reasoning_effort:
        return Efforts(None, policy.default_effort, policy.default_effort)
    requested = _EFFORT_OF[request.reasoning_effort]
    if requested is not policy.default_effort and requested not in policy.supported_efforts:
        supported = policy.supported_efforts | ({policy.default_effort} if policy.default_effort else set())
        listed = ", ".join(effort.value for effort in Effort if effort in supported)
        raise Failure(
            Reason.EFFORT_UNSUPPORTED,
            f"The revision does not support the reasoning effort {requested.value}; it supports {listed or 'none'}.",
            field="reasoning_effort",
            metadata={"requestedEffort": requested.value, "supportedEfforts": listed},
        )
    return Efforts(requested, policy.default_effort, requested)


def guided_kind(request: pb.GenerateRequest) -> str:
    """Kind of guided decoding that a request asks for; "": none."""
    return str(request.guided_decoding.WhichOneof("guide") or "") if request.HasField("guided_decoding") else ""


def guide_texts(guided: pb.GuidedDecoding) -> list[tuple[str, str]]:
    """(kind, text) for each text of a guide; none where there is none."""
    kind = guided.WhichOneof("guide")
    if kind is None:
        return []
    if kind == "choice":
        return [(kind, text) for text in guided.choice.strings]
    return [(kind, "" if kind == "json_object" else getattr(guided, kind))]


def _guide_violations(request: pb.GenerateRequest) -> list[Violation]:
    guided = request.guided_decoding
    kind = guided.WhichOneof("guide")
    return guide_violations(
        kind,
        getattr(guided, kind) if kind in ("json_schema", "regex", "grammar") else "",
        guided.choice.strings,
        is_object=guided.json_object,
        continues=request.recovery == pb.RECOVERY_CONTINUE,
        ignores_end=request.stop.ignore_eos,
    )


def _check_size(request: pb.GenerateRequest, kind: str | None, limits: RequestLimits) -> None:
    limit = limits.prompt_bytes_max
    if kind == "prompt":
        if size := validation.utf8_size_above(request.prompt, limit):
            raise validation.size_refusal("prompt", size, limit, unit="Bytes")
    elif kind == "tokens":
        count = len(request.tokens.ids)
        if count > limits.prompt_tokens_max:
            raise validation.size_refusal("tokens.ids", count, limits.prompt_tokens_max, unit="Tokens")
    # The encoded size bounds the texts' size from above and is known without copying any of them.
    elif kind == "conversation" and request.conversation.ByteSize() > limit:
        size = sum(len(message.content.encode()) for message in request.conversation.messages)
        if size > limit:
            raise validation.size_refusal("conversation.messages", size, limit, unit="Bytes")


def _check_context(request: pb.GenerateRequest, revision: Revision) -> None:
    """Refuse token ids that cannot fit; a text's tokens are only known to the engine, which decides then."""
    count, context = len(request.tokens.ids), revision.execution.context_tokens
    if count > context:
        raise Failure(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"The prompt has {count} tokens; the model's context holds {context}.",
            field="tokens.ids",
            metadata={"limitTokens": str(context), "requestedTokens": str(count)},
        )

"""Between the two contracts: a Router's frames and the engine's documents.

Pure functions. Numbers and reasons that one side has and the other does not know become INTERNAL or FAILED,
never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2 as inference_pb2
from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.attempt_book import Attempt, Cause, Dispatched
from headrace.control.errors import Failure, Reason
from headrace.control.priority import Priority
from headrace.rpc import status

SEQ_MAX = 2**63 - 1
CREDIT_MAX = 2**31 - 1

_F: Any = inference_pb2.FinishReason
_FINISH: Mapping[str, int] = {
    "stop": _F.FINISH_REASON_STOP,
    "length": _F.FINISH_REASON_LENGTH,
    "cancelled": _F.FINISH_REASON_CANCELLED,
    "deadline": _F.FINISH_REASON_DEADLINE_EXCEEDED,
    "timeout": _F.FINISH_REASON_DEADLINE_EXCEEDED,
    "error": _F.FINISH_REASON_FAILED,
}
_CAUSE_FINISH: Mapping[Cause, int] = {
    Cause.CANCELLED: _F.FINISH_REASON_CANCELLED,
    Cause.DEADLINE_EXCEEDED: _F.FINISH_REASON_DEADLINE_EXCEEDED,
    Cause.QUEUE_TIMEOUT: _F.FINISH_REASON_REJECTED,
    Cause.EXECUTION_TIMEOUT: _F.FINISH_REASON_DEADLINE_EXCEEDED,
    Cause.SLOW_CONSUMER: _F.FINISH_REASON_SLOW_CONSUMER,
    Cause.DRAINED: _F.FINISH_REASON_DRAINED,
}
_CAUSE_FAILURE: Mapping[Cause, tuple[Reason, str]] = {
    Cause.CANCELLED: (Reason.CLIENT_CANCELLED, "The attempt was cancelled."),
    Cause.DEADLINE_EXCEEDED: (Reason.DEADLINE_EXCEEDED, "The deadline passed before the answer was complete."),
    Cause.QUEUE_TIMEOUT: (Reason.QUEUE_TIMEOUT, "It waited too long for a slot of the engine."),
    Cause.EXECUTION_TIMEOUT: (Reason.EXECUTION_TIMEOUT, "It ran longer than it may."),
    Cause.SLOW_CONSUMER: (Reason.SLOW_CONSUMER, "The stream was not read for too long."),
    Cause.DRAINED: (Reason.DRAINING, "The worker was drained before the answer was complete."),
}
_CAUSES: Mapping[int, Cause] = {
    _F.FINISH_REASON_CANCELLED: Cause.CANCELLED,
    _F.FINISH_REASON_DEADLINE_EXCEEDED: Cause.DEADLINE_EXCEEDED,
    _F.FINISH_REASON_SLOW_CONSUMER: Cause.SLOW_CONSUMER,
    _F.FINISH_REASON_REJECTED: Cause.QUEUE_TIMEOUT,
}
"""What a Router may say in a Cancel."""
_ROLES: Mapping[int, str] = {
    inference_pb2.ROLE_SYSTEM: "system",
    inference_pb2.ROLE_USER: "user",
    inference_pb2.ROLE_ASSISTANT: "assistant",
}

_RANKED: frozenset[int] = frozenset(Priority) - {Priority.STANDARD}
_PUBLIC_FIELDS = {
    "tokens": "tokens.ids",
    "messages": "conversation.messages",
    "stop": "stop.strings",
    "stop_token_ids": "stop.token_ids",
    "guided": "guided_decoding",
}
"""Fields that the engine contract names otherwise than headrace.api.inference.v1."""
_ID_BYTES = 6
"""Bytes of a token id of a continuation, as a Router writes it: what waits, and an operation, are bounded by size."""


def dispatched(message: pb.Dispatch, *, session: int, context_tokens: int) -> Dispatched:
    """What the ledger has to know of a Dispatch.

    Raises:
        Failure: CONTEXT_LENGTH_EXCEEDED, when it continues more than the context holds.
    """
    generate = message.generate
    known = len(message.continuation.token_ids)
    if context_tokens and known >= context_tokens:
        raise Failure(
            Reason.CONTEXT_LENGTH_EXCEEDED,
            f"The answer has {known} tokens already; with its prompt it does not fit the context of {context_tokens}.",
            metadata={"limitTokens": str(context_tokens), "requestedTokens": str(known + 1)},
        )
    return Dispatched(
        token=message.attempt,
        session=session,
        replica=message.replica,
        revision=message.revision,
        epoch=message.epoch,
        input_bytes=generate.ByteSize() + _ID_BYTES * known,
        max_tokens=generate.max_tokens
        if generate.HasField("max_tokens")
        else min(message.output_tokens_max or context_tokens, context_tokens),
        remaining_s=_seconds(message, "remaining"),
        queue_s=_seconds(message, "queue_timeout"),
        execution_s=_seconds(message, "execution_timeout"),
        credit_limit=min(message.credit_limit, CREDIT_MAX),
        record_version=message.record_version,
    )


def engine_request(message: pb.Dispatch) -> tuple[dict[str, Any], Sequence[int]]:
    """Write a Dispatch as REQUEST of the engine contract, with its prompt's token ids beside it.

    What is left of deadline and queue limit is put in when the operation is written (headrace.triton.outbox). The
    execution limit counts from the engine's admission, so nothing is taken off it on the way.

    Raises:
        Failure: INVALID_REQUEST, when it holds no input.
    """
    generate = message.generate
    request: dict[str, Any] = {
        "seq": message.attempt,
        "max_tokens": generate.max_tokens if generate.HasField("max_tokens") else None,
        "max_tokens_cap": message.output_tokens_max or None,
        "sampling": _sampling(generate.sampling),
        "stop": list(generate.stop.strings),
        "stop_token_ids": list(generate.stop.token_ids),
        "ignore_eos": generate.stop.ignore_eos,
        "top_logprobs": generate.top_logprobs if generate.HasField("top_logprobs") else None,
        "credit": min(message.credit_limit, CREDIT_MAX),
    }
    if generate.HasField("guided_decoding"):
        request["guided"] = _guided(generate.guided_decoding)
    if message.tenant:
        request["cache_salt"] = message.tenant
    if int(message.priority) in _RANKED:  # the middle one is what the engine takes where none is named
        request["priority"] = int(message.priority)
    execution_s = _seconds(message, "execution_timeout")
    if execution_s is not None:
        request["execution_ms"] = max(1, int(execution_s * 1000))
    tokens: Sequence[int] = ()
    kind = generate.WhichOneof("input")
    if kind == "prompt":
        request["prompt"] = generate.prompt
    elif kind == "conversation":
        request["messages"] = [
            {"role": _ROLES.get(m.role, ""), "content": m.content} for m in generate.conversation.messages
        ]
    elif kind == "tokens":
        tokens = generate.tokens.ids
        request["prompt_tokens"] = len(tokens)
    else:
        raise Failure(Reason.INVALID_REQUEST, "The dispatch has no input.", field="input")
    known = message.continuation
    if known.token_ids:
        request["continuation"] = {"tokens": len(known.token_ids), "text_bytes": known.text_bytes}
        tokens = [*tokens, *known.token_ids]
    return request, tokens


def finish_name(reason: int) -> str:
    """Short name of a finish reason, for labels: "STOP"."""
    name: str = inference_pb2.FinishReason.Name(reason)
    return name.removeprefix("FINISH_REASON_")


def reason_name(ended: pb.Ended) -> str:
    """Name of the reason of an end, for labels: "QUEUE_TIMEOUT"; "NONE" where nothing went wrong."""
    if not ended.HasField("error"):
        return "NONE"
    name: str = errors_pb2.Reason.Name(ended.error.reason)
    return name.removeprefix("REASON_")


def cause_of(cause: int) -> Cause:
    """Why a Router cancels; anything but the causes of the contract is a plain cancel."""
    return _CAUSES.get(cause, Cause.CANCELLED)


def admitted_message(event: Mapping[str, Any], attempt: Attempt) -> pb.Admitted:
    """Encode an `admitted` event."""
    return pb.Admitted(
        attempt=attempt.token,
        record_version=attempt.record_version,
        prompt_tokens=event.get("prompt_tokens", 0),
        cached_prompt_tokens=event.get("cached_tokens", 0),
    )


def ended_by_engine(event: Mapping[str, Any], attempt: Attempt, *, confirmed_at: float, is_local: bool) -> pb.Ended:
    """Encode a `finished` event. A cancel ends for its cause, whatever the engine calls it.

    Args:
        event: the event.
        attempt: what it ends.
        confirmed_at: monotonic seconds now.
        is_local: whether the engine's monotonic clock is ours.
    """
    reason = event.get("reason", "error")
    ended = pb.Ended(
        attempt=attempt.token,
        reason=_FINISH.get(reason, _F.FINISH_REASON_FAILED),
        record_version=attempt.record_version,
    )
    if reason == "cancelled":
        _set_cause(ended, attempt.cause or Cause.CANCELLED)
    elif reason == "deadline":
        _set_cause(ended, Cause.DEADLINE_EXCEEDED)
    elif reason == "timeout":
        _set_cause(ended, Cause.EXECUTION_TIMEOUT)
    elif reason not in ("stop", "length"):
        ended.error.CopyFrom(status.to_proto(engine_failure(event.get("error"))))
    stop = event.get("stop")
    if reason == "stop" and stop:
        _set_stop(ended.stop, stop)
    usage = event.get("usage") or {}
    ended.usage.CopyFrom(
        inference_pb2.Usage(
            prompt_tokens=usage.get("prompt", 0),
            cached_prompt_tokens=usage.get("cached", 0),
            proposed_tokens=usage.get("proposed", 0),
            generated_tokens=usage.get("generated", 0),
            reasoning_tokens=usage.get("reasoning", 0),
        )
    )
    if "emitted" in usage:
        ended.output_tokens = usage["emitted"]
    if attempt.admitted_at is not None:
        ended.queue.CopyFrom(_duration(attempt.admitted_at - attempt.received_at))
        stopped_at = ((event.get("timing_ns") or {}).get("stopped") or 0) / 1e9
        # One that lies before the attempt's arrival was read off another host's clock, whatever the address said.
        if is_local and stopped_at >= attempt.received_at:
            ended.release.CopyFrom(_duration(confirmed_at - stopped_at))
    return ended


def ended_by_refusal(token: int, record_version: int, failure: Failure) -> pb.Ended:
    """Encode the end of an attempt that was never begun."""
    late = failure.reason in (Reason.DEADLINE_EXCEEDED, Reason.EXECUTION_TIMEOUT)
    return pb.Ended(
        attempt=token,
        reason=_F.FINISH_REASON_DEADLINE_EXCEEDED if late else _F.FINISH_REASON_REJECTED,
        error=status.to_proto(failure),
        record_version=record_version,
        output_tokens=0,
    )


def ended_by_loss(attempt: Attempt, *, had_output: bool, drained: bool) -> pb.Ended:
    """Encode the end of an attempt whose worker is gone.

    One that was being cancelled ends for that cause: it is over, as asked.
    """
    cause = attempt.cause or (Cause.DRAINED if drained else None)
    ended = pb.Ended(attempt=attempt.token, record_version=attempt.record_version)
    if not had_output:
        ended.output_tokens = 0
    if cause is not None:
        ended.reason = _CAUSE_FINISH[cause]  # type: ignore[assignment]
        _set_cause(ended, cause)
    elif had_output:
        ended.reason = _F.FINISH_REASON_INTERRUPTED
        failure = Failure(Reason.STREAM_INTERRUPTED, "The worker was lost after output had been sent.")
        ended.error.CopyFrom(status.to_proto(failure))
    else:
        ended.reason = _F.FINISH_REASON_FAILED
        failure = Failure(Reason.WORKER_LOST_BEFORE_OUTPUT, "The worker was lost before any output.")
        ended.error.CopyFrom(status.to_proto(failure))
    return ended


def engine_failure(error: Mapping[str, Any] | None) -> Failure:
    """Decode ERROR of the engine contract."""
    error = error or {}
    try:
        reason = Reason(error.get("reason", ""))
    except ValueError:
        reason = Reason.ENGINE_FAILED
    metadata = {str(key): str(value) for key, value in (error.get("metadata") or {}).items()}
    message = str(error.get("message") or "The engine failed on this request.")
    return Failure(reason, message, field=_public_field(str(error.get("field") or "")), metadata=metadata)


def _public_field(field: str) -> str:
    """Path in the public request of a field of the engine contract."""
    head = re.split(r"[.\[]", field, maxsplit=1)[0]
    return _PUBLIC_FIELDS[head] + field[len(head) :] if head in _PUBLIC_FIELDS else field


def _set_cause(ended: pb.Ended, cause: Cause) -> None:
    ended.reason = _CAUSE_FINISH[cause]  # type: ignore[assignment]
    reason, sentence = _CAUSE_FAILURE[cause]
    ended.error.CopyFrom(status.to_proto(Failure(reason, sentence)))


def _set_stop(match: inference_pb2.StopMatch, stop: Mapping[str, Any]) -> None:
    kind, value = stop.get("kind"), stop.get("value")
    if kind == "eos":
        match.eos_token_id = int(value or 0)
    elif kind == "token":
        match.token_id = int(value or 0)
    elif kind == "string":
        match.string = str(value)


def _sampling(sampling: inference_pb2.SamplingParameters) -> dict[str, Any]:
    """The fields that are set. A Router has completed them; what it left open is the engine contract's default."""
    return {descriptor.name: value for descriptor, value in sampling.ListFields()}


def _guided(guided: inference_pb2.GuidedDecoding) -> dict[str, Any]:
    kind = guided.WhichOneof("guide")
    if kind is None:
        return {}  # which the engine refuses
    return {kind: list(guided.choice.strings) if kind == "choice" else getattr(guided, kind)}


def _seconds(message: pb.Dispatch, field: str) -> float | None:
    """Seconds of a Duration; None where it is unset."""
    if not message.HasField(field):
        return None
    seconds: float = getattr(message, field).ToTimedelta().total_seconds()
    return seconds


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(max(0, round(seconds * 1_000_000)))
    return duration

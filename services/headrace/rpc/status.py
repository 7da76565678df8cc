"""Failures to and from gRPC statuses: the only place that knows both.

Every status carries google.rpc.ErrorInfo; BadRequest, QuotaFailure, RetryInfo and ResourceInfo where they apply, and
the trailer `grpc-retry-pushback-ms`, which gRPC's own retry machinery reads.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from headrace.api.errors.v1 import errors_pb2
from headrace.control.errors import DOMAIN, RULES, Failure, InvalidRequest, Reason, Retry, Violation

PUSHBACK = "grpc-retry-pushback-ms"

# A status travels in HTTP/2 trailers, the details in base64. From 8 KiB on a peer may drop all of it and report
# RESOURCE_EXHAUSTED instead.
MESSAGE_CHARACTERS_MAX = 512
DETAIL_BYTES_MAX = 2048


def code_of(reason: Reason) -> grpc.StatusCode:
    """The gRPC code of a reason."""
    code: grpc.StatusCode = grpc.StatusCode[RULES[reason].code]
    return code


def to_status(failure: Failure) -> status_pb2.Status:
    """Build the google.rpc.Status of a failure, with its details; what is too long for a header is cut."""
    metadata = _cut_metadata(failure.metadata)
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=failure.reason.value, domain=DOMAIN, metadata=metadata)]
    violations: Sequence[Violation] = ()
    if isinstance(failure, InvalidRequest):
        violations = failure.violations
    elif failure.field:
        violations = (Violation(failure.field, failure.message),)
    if violations:
        details.append(_bad_request(violations))
    if failure.reason is Reason.QUOTA_EXCEEDED and "tenant" in metadata:
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=metadata["tenant"], description=_cut(failure.message, MESSAGE_CHARACTERS_MAX)
        )
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if failure.retry_after_s is not None and failure.retry_after_s >= 0:
        details.append(error_details_pb2.RetryInfo(retry_delay=_duration(failure.retry_after_s)))
    if failure.reason in (Reason.MODEL_NOT_FOUND, Reason.NOT_FOUND) and "resourceName" in metadata:
        details.append(
            error_details_pb2.ResourceInfo(resource_name=metadata["resourceName"], description="does not exist")
        )
    status = status_pb2.Status(
        code=code_of(failure.reason).value[0], message=_cut(failure.message, MESSAGE_CHARACTERS_MAX)
    )
    for detail in details:
        packed = AnyProto()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _bad_request(violations: Sequence[Violation]) -> error_details_pb2.BadRequest:
    """Name violations, the first at least, as long as there is room."""
    bad = error_details_pb2.BadRequest()
    for violation in violations:
        bad.field_violations.add(field=_cut(violation.field, 128), description=_cut(violation.description, 512))
        if bad.ByteSize() > DETAIL_BYTES_MAX:
            del bad.field_violations[max(1, len(bad.field_violations) - 1) :]
            break
    return bad


def _cut_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    kept: dict[str, str] = {}
    room = DETAIL_BYTES_MAX // 2
    for key, value in metadata.items():
        room -= len(key) + len(value)
        if room < 0:
            break
        kept[key] = value
    return kept


def _cut(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else f"{text[: characters_max - 3]}..."


async def abort(context: grpc.aio.ServicerContext[Any, Any], failure: Failure) -> NoReturn:
    """End the call with the status of `failure`.

    Raises:
        grpc.aio.AbortError: always; that is how grpc.aio ends a handler.
    """
    await context.abort(*encode(failure))
    raise AssertionError("abort returned")


def encode(failure: Failure) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Code, message and trailers of the status of `failure`: what `context.abort` takes."""
    status = rpc_status.to_status(to_status(failure))
    trailers = list(status.trailing_metadata)
    if (wait_ms := pushback_ms(failure)) is not None:
        trailers.append((PUSHBACK, str(wait_ms)))
    return status.code, status.details, tuple(trailers)


def pushback_ms(failure: Failure) -> int | None:
    """What the trailer says: the milliseconds of RetryInfo; -1 where the same call must not be made again.

    That is so where the rule says it, and where a service sets a negative delay ("everything here is overloaded").
    """
    wait_s = failure.retry_after_s
    if failure.rule.retry in (Retry.NOBODY, Retry.APPLICATION) or (wait_s is not None and wait_s < 0):
        return -1
    return None if wait_s is None else _milliseconds(wait_s)


def unmapped(error: BaseException, *, where: str) -> Failure:
    """Turn a bug into a failure that shows an error id and nothing else; the log has the rest."""
    from headrace.runtime.telemetry import get_logger  # here: the client SDK needs this module and no telemetry

    error_id = secrets.token_hex(6)
    get_logger().error("unexpected_error", where=where, error_id=error_id, exc_info=error)
    return Failure(
        Reason.INTERNAL,
        f"An internal error occurred; operators find it in the logs as {error_id}.",
        metadata={"errorId": error_id},
    )


def to_proto(failure: Failure) -> errors_pb2.Error:
    """Encode a failure for an event or a frame."""
    reason: Any = errors_pb2.Reason.Value(f"REASON_{failure.reason.value}")
    message = errors_pb2.Error(
        reason=reason,
        message=failure.message,
        field=failure.field,
        metadata=dict(failure.metadata),
    )
    if failure.retry_after_s is not None and failure.retry_after_s >= 0:
        message.retry_delay.CopyFrom(_duration(failure.retry_after_s))
    return message


def from_proto(message: errors_pb2.Error) -> Failure:
    """Decode a failure; a reason of a newer version becomes INTERNAL."""
    try:
        reason = Reason(errors_pb2.Reason.Name(message.reason).removeprefix("REASON_"))
    except ValueError:
        reason = Reason.INTERNAL
    return Failure(
        reason,
        message.message,
        field=message.field,
        metadata=dict(message.metadata),
        retry_after_s=message.retry_delay.ToTimedelta().total_seconds() if message.HasField("retry_delay") else None,
    )


def from_rpc_error(error: grpc.RpcError) -> Failure | None:
    """Read a failure out of a call's status details; None when it carries no ErrorInfo of ours."""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # the details disagree with the status, or are none: not ours
        return None
    if status is None:
        return None
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        for message in (info, bad, retry):
            if detail.Is(message.DESCRIPTOR):
                with contextlib.suppress(DecodeError):
                    detail.Unpack(message)
    if info.domain != DOMAIN:
        return None
    try:
        reason = Reason(info.reason)
    except ValueError:
        reason = Reason.INTERNAL
    retry_after_s = retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None
    violations = tuple(Violation(v.field, v.description) for v in bad.field_violations)
    if reason is Reason.INVALID_REQUEST and violations:
        failure: Failure = InvalidRequest(violations)
        failure.message, failure.metadata, failure.retry_after_s = status.message, dict(info.metadata), retry_after_s
        failure.args = (status.message,)
        return failure
    failure = Failure(
        reason, status.message, field=violations[0].field if violations else "", metadata=dict(info.metadata)
    )
    failure.retry_after_s = retry_after_s  # and not the rule's: a status without RetryInfo says that waiting is no help
    return failure


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(_milliseconds(seconds))
    return duration


def _milliseconds(seconds: float) -> int:
    """Round up, so that nobody is told to come back too early; the microsecond takes away what binary fractions add."""
    return -(-round(seconds * 1e6) // 1000)

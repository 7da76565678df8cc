"""Calls about a request, and deadlines that have passed: what both clients check and raise."""

from __future__ import annotations

from typing import Any

from headrace.client import errors
from headrace.client.errors import Facts, HeadraceError
from headrace.control.errors import Reason
from headrace.rpc import status


def check_timeout(timeout_s: float | None) -> None:
    """Refuse a deadline that has passed before any call is made.

    Raises:
        DeadlineExceeded: names timeout_s.
    """
    if timeout_s is not None and not timeout_s > 0:
        facts = Facts(code="DEADLINE_EXCEEDED", reason=Reason.DEADLINE_EXCEEDED, field="timeout_s")
        raise errors.DeadlineExceeded(f"timeout_s is {timeout_s:g}: no time is left, and no call was made.", facts)


def question_error(rpc_error: Any) -> HeadraceError:
    """Build the exception for a call about a request that failed."""
    failure = status.from_rpc_error(rpc_error)
    if failure is not None:
        error = errors.from_failure(failure, output=False)
    else:
        error = errors.from_code(rpc_error.code().name, rpc_error.details() or "", output=False)
    error.calls = 1
    error.__cause__ = rpc_error
    return error


def is_elsewhere(before: HeadraceError | None, error: HeadraceError) -> HeadraceError:
    """Judge one Router's answer to a question about a request; returns what to raise if no other one knows it.

    Raises:
        HeadraceError: another Router would say the same.
    """
    if not isinstance(error, (errors.NotFound, errors.Unavailable)):
        raise error
    return error if before is None or isinstance(error, errors.Unavailable) else before

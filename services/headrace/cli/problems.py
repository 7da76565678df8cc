"""How a command fails: one sentence, a hint, and an exit code that a script can tell apart."""

from __future__ import annotations

import grpc

from headrace.control.errors import Failure, InvalidRequest
from headrace.rpc import status

EXIT_FAILURE = 1
EXIT_USAGE = 2
"""A setting, an option or an argument is wrong; the same as click's."""
EXIT_DEGRADED = 3
"""`headrace status`: everything answers, and not everything is well."""
EXIT_INTERRUPTED = 130


class Problem(Exception):
    """Ends the command.

    Args:
        sentence: what happened.
        hint: what to do about it, if the sentence does not say it.
        code: exit code.
    """

    def __init__(self, sentence: str, *, hint: str = "", code: int = EXIT_FAILURE) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.hint = hint
        self.code = code


def from_failure(failure: Failure) -> Problem:
    """A refusal by a service, with the table's advice as the hint."""
    code = EXIT_USAGE if isinstance(failure, InvalidRequest) else EXIT_FAILURE
    return Problem(f"{failure.reason.value}: {failure.message}", hint=failure.rule.advice, code=code)


def from_rpc(error: grpc.RpcError, *, service: str, address: str) -> Problem:
    """A call that failed: by a refusal with our details, or because nobody answered."""
    failure = status.from_rpc_error(error)
    if failure is not None:
        return from_failure(failure)
    code = error.code() if isinstance(error, grpc.Call) else None
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Problem(
            f"the {service} at {address} does not answer",
            hint=f"start a stack with `headrace up`, or set HEADRACE_{service.upper()} to the address of yours",
        )
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    return Problem(f"the {service} at {address} answered {code.name if code else 'an error'}: {details}")

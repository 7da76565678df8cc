"""When an answer that lost its worker is continued by another one, and what is known of it.

    asked for     `recovery: CONTINUE`; otherwise a loss after output is INTERRUPTED
    a loss        the worker, or the way to it, is gone, or it was drained: INTERRUPTED, DRAINED. Never a refusal, a
                  fault of the request, an end that somebody asked for, or an engine that failed on it (ENGINE_FAILED)
    known         all its tokens, and no more than `known_max` of them: the new attempt begins with exactly these
    allowed       by attempts, the fleet's retry budget and the deadline, as for a retry

A continuation that fails before output of its own is tried again as a retry is; when nobody can take it, or may, the
request ends as the loss did.

Sans-io.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headrace.control.backoff import FREE_MAX
from headrace.control.lifecycle import Finish, Phase, RequestRecord
from headrace.control.steps import AttemptEnd, Terms

LOSSES = frozenset({Finish.INTERRUPTED, Finish.DRAINED})
_GIVEN_UP = frozenset({*LOSSES, Finish.REJECTED, Finish.FAILED})
"""Ends of a continuation without output of its own that leave the request as the loss did."""


class KnownAnswer:
    """The tokens of an answer so far, for the engine that may have to go on with them.

    Args:
        tokens_max: how many are kept; of a longer answer none are.
    """

    __slots__ = ("text_bytes", "token_ids", "tokens_max")

    def __init__(self, tokens_max: int) -> None:
        self.tokens_max = tokens_max
        self.token_ids = array("i")
        self.text_bytes = 0
        """Bytes of their text that arrived."""

    def add(self, token_ids: Sequence[int], text_bytes: int) -> None:
        """More of it arrived. On the hot path of requests that may be continued."""
        if len(self.token_ids) + len(token_ids) > self.tokens_max:
            self.tokens_max = 0
            self.token_ids = array("i")
            return
        self.token_ids.extend(token_ids)
        self.text_bytes += text_bytes


def is_due(record: RequestRecord, end: AttemptEnd, terms: Terms) -> bool:
    """Whether a request goes on at once behind its output, now that its attempt has ended so."""
    return (
        end.finish in LOSSES
        and 0 < record.output_tokens <= terms.known_max
        and record.attempts - record.attempts_free < terms.attempts_max
        and record.attempts_free <= FREE_MAX
    )


def is_given_up(record: RequestRecord, end: AttemptEnd) -> bool:
    """Whether a continuation came to nothing, so that the loss before it is the end."""
    return record.phase in (Phase.QUEUED, Phase.PREFILL) and end.finish in _GIVEN_UP

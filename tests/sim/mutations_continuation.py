"""Breakages of what goes on behind a lost worker's output: what is known, where it is counted, what is told again."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.control.continuation import KnownAnswer
from headrace.control.credit import CreditWindow
from headrace.control.lifecycle import RequestRecord
from headrace.engine.continuation import Delivered
from headrace.engine.text import Release
from sim.breakage import breaks

_add = KnownAnswer.add


@breaks(KnownAnswer, "add", "truth")
def the_last_batch_is_not_known(self: KnownAnswer, token_ids: Sequence[int], text_bytes: int) -> None:
    if not self.token_ids:
        _add(self, token_ids, text_bytes)


@breaks(Delivered, "strip", "truth")
def what_was_delivered_is_told_again(self: Delivered, release: Release) -> Release:
    return release


@breaks(CreditWindow, "reopen", "counts", "credit")
def credit_begins_anew(self: CreditWindow, now: float) -> int:
    return self.open()


_go_on = RequestRecord.go_on


@breaks(RequestRecord, "go_on", "notice")
def a_continuation_is_told_as_a_retry(self: RequestRecord, attempt: int, replica: str) -> bool:
    is_begun = _go_on(self, attempt, replica)
    self.known_tokens = 0
    return is_begun


@breaks(RequestRecord, "go_on", "released_early", "stale")
def the_lost_attempt_still_counts(self: RequestRecord, attempt: int, replica: str) -> bool:
    lost = self.attempt
    is_begun = _go_on(self, attempt, replica)
    self.attempt = lost
    return is_begun

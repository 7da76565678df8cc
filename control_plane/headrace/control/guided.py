"""Guided decoding: what a request may ask for, and whether anybody who serves its revision can do it.

Which kinds an engine can do it says itself, and its replica's record has them. What is in a guide is the engine's to
read, by its own dialect; here only what no engine could read is refused.

Sans-io.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from headrace.control.errors import Failure, Reason, Violation
from headrace.control.resources import Revision
from headrace.control.snapshot import RoutingSnapshot

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
BYTES_MAX = 32 * 1024
"""Of a guide's text, or of all choices."""
CHOICES_MAX = 256


def guide_violations(
    kind: str | None, text: str, choices: Sequence[str], *, is_object: bool, continues: bool, ignores_end: bool
) -> list[Violation]:
    """Check a guide.

    Args:
        kind: one of KINDS; None: there is a guide, and it says nothing.
        text: of a schema, a regular expression or a grammar.
        choices: of a choice.
        is_object: whether json_object is set.
        continues: whether the request is to be continued when its worker is lost.
        ignores_end: whether it goes on past the model's end.
    """
    if kind is None:
        return [Violation("guided_decoding", f"needs exactly one of {', '.join(KINDS)}")]
    found = _of_kind(kind, text, choices, is_object)
    if continues:
        sentence = "must not be CONTINUE with guided_decoding: a guide is followed by one engine from the beginning"
        found.append(Violation("recovery", sentence))
    if ignores_end:
        sentence = "must not be set with guided_decoding: the answer ends where it is complete"
        found.append(Violation("stop.ignore_eos", sentence))
    return found


def _of_kind(kind: str, text: str, choices: Sequence[str], is_object: bool) -> list[Violation]:
    at = f"guided_decoding.{kind}"
    if kind == "json_object":
        return [] if is_object else [Violation(at, "must be true, or unset")]
    if kind == "choice":
        return _choice_violations(f"{at}.strings", choices)
    if not text:
        return [Violation(at, "must not be empty")]
    size = len(text.encode())
    if size > BYTES_MAX:
        return [Violation(at, f"has {size} bytes; at most {BYTES_MAX} are accepted")]
    if kind == "json_schema" and not _is_object(text):
        return [Violation(at, "must be a JSON schema, as text: a JSON object")]
    return []


def _choice_violations(at: str, choices: Sequence[str]) -> list[Violation]:
    if not choices:
        return [Violation(at, "needs at least one string")]
    if len(choices) > CHOICES_MAX:
        return [Violation(at, f"has {len(choices)} entries; at most {CHOICES_MAX} are accepted")]
    empty = next((index for index, one in enumerate(choices) if not one), None)
    if empty is not None:
        return [Violation(f"{at}[{empty}]", "must not be empty")]
    size = sum(len(one.encode()) for one in choices)
    if size > BYTES_MAX:
        return [Violation(at, f"has {size} bytes in all; at most {BYTES_MAX} are accepted")]
    return []


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def check_guided(snapshot: RoutingSnapshot, revision: Revision, kind: str) -> None:
    """Refuse a guide that nobody who serves the revision can follow. While nobody serves it, that is not known.

    Raises:
        Failure: GUIDED_DECODING_UNSUPPORTED.
    """
    if not kind:
        return
    ready = snapshot.ready_of[revision.name]
    if not ready or any(kind in replica.guided for replica in ready):
        return
    can = sorted({one for replica in ready for one in replica.guided})
    known = f"they do {', '.join(can)}" if can else "they do no guided decoding"
    raise Failure(
        Reason.GUIDED_DECODING_UNSUPPORTED,
        f"The revision's workers do not guide decoding by {kind}; {known}.",
        field=f"guided_decoding.{kind}",
        metadata={"requestedKind": kind, "supportedKinds": ", ".join(can)},
    )

"""What a request may ask for: limits, ranges, and every way in which a field can be wrong.

    RequestLimits            the service's bounds; the same for all models
    *_violations(...)        all that is wrong with one part of a request, as field paths and one clause each
    size_refusal(...)        a prompt that is too large, before anything else is looked at

Sans-io. Plain values come in, so nothing here knows the wire; `headrace.router.codec` reads the message. Two laws: a
description never repeats what the caller sent, and a huge list costs one violation, not one for each entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from headrace.control import names
from headrace.control.errors import Failure, InvalidRequest, Reason, Violation

VIOLATIONS_MAX = 16
"""Violations named in one refusal: a status travels in HTTP/2 headers, which peers cut off at 8 KiB."""

Violations = tuple[Violation, ...]
NONE: Violations = ()


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of the service for any request.

    Raises:
        ValueError: a bound is below 1.
    """

    prompt_bytes_max: int = 1024 * 1024
    """UTF-8 bytes of a prompt, or of all messages of a conversation."""
    prompt_tokens_max: int = 131_072
    """Entries of a tokenized prompt."""
    output_tokens_max: int = 8192
    """Largest max_tokens of a request."""
    messages_max: int = 1024
    stop_strings_max: int = 16
    stop_string_bytes_max: int = 256
    stop_tokens_max: int = 64
    top_logprobs_max: int = 20

    def __post_init__(self) -> None:
        """Check."""
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a number may take."""

    low: float
    high: float
    low_excluded: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is finite and inside."""
        return self.low <= value <= self.high and not (self.low_excluded and value == self.low)

    def __str__(self) -> str:
        return f"above {self.low:g} up to {self.high:g}" if self.low_excluded else f"{self.low:g} to {self.high:g}"


AFFINITY_KEY_BYTES_MAX = 128

SAMPLING_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": Range(0, 10),
        "top_p": Range(0, 1, low_excluded=True),
        "min_p": Range(0, 1),
        "repetition_penalty": Range(0, 10, low_excluded=True),
        "presence_penalty": Range(-2, 2),
        "frequency_penalty": Range(-2, 2),
    }
)
"""Fields of SamplingParameters that have a range narrower than their type. top_k and seed have none."""


def refuse(violations: Sequence[Violation]) -> None:
    """Refuse the request if anything is wrong with it.

    Raises:
        InvalidRequest: names at most VIOLATIONS_MAX violations.
    """
    if violations:
        raise InvalidRequest(tuple(violations[:VIOLATIONS_MAX]))


def size_refusal(field: str, size: int, size_max: int, *, unit: str) -> Failure:
    """Build the refusal of an input that is too large.

    Args:
        field: path of the field that holds it.
        size: what was sent, in `unit`.
        size_max: what is accepted, in `unit`.
        unit: "Bytes" or "Tokens", as metadata keys end.
    """
    return Failure(
        Reason.REQUEST_TOO_LARGE,
        f"{field} has {size} {unit.lower()}; at most {size_max} are accepted.",
        field=field,
        metadata={f"limit{unit}": str(size_max), f"request{unit}": str(size)},
    )


def utf8_size_above(text: str, limit: int) -> int:
    """Bytes of `text` in UTF-8 if they are more than `limit`, else 0; encodes only when characters do not tell."""
    if 4 * len(text) <= limit:
        return 0
    size = len(text.encode("utf-8", "surrogatepass"))
    return size if size > limit else 0


def model_violations(name: str) -> Violations:
    """Check the form of `model`: "ALIAS", "aliases/ALIAS" or "models/MODEL/revisions/DIGEST12"."""
    if not name:
        return (Violation("model", "is required: an alias or a revision's name"),)
    if names.is_id(name) or names.is_id(name.removeprefix("aliases/")):
        return NONE
    try:
        names.parse_revision(name)
    except InvalidRequest:
        form = "must be ALIAS, aliases/ALIAS or models/MODEL/revisions/DIGEST12"
        return (Violation("model", f"{form}, where ALIAS is {names.ID_RULE}"),)
    return NONE


def prompt_violations(prompt: str) -> Violations:
    """Check a text prompt, whose size has been checked."""
    return NONE if prompt else (Violation("prompt", "must not be empty"),)


def conversation_violations(
    messages: Sequence[object], roles: Iterable[tuple[int, bool]], limits: RequestLimits
) -> Violations:
    """Check a conversation, whose size in bytes has been checked.

    Args:
        messages: the messages, for their number.
        roles: for each message its role's number and whether it has content; not read when there are too many.
        limits: the service's bounds.
    """
    if not messages:
        return (Violation("conversation.messages", "needs at least one message"),)
    if len(messages) > limits.messages_max:
        return (_too_many("conversation.messages", len(messages), limits.messages_max),)
    found = []
    for index, (role, has_content) in enumerate(roles):
        if not 1 <= role <= 3:
            field = f"conversation.messages[{index}].role"
            found.append(Violation(field, "must be ROLE_SYSTEM, ROLE_USER or ROLE_ASSISTANT"))
        if not has_content:
            found.append(Violation(f"conversation.messages[{index}].content", "must not be empty"))
        if len(found) >= VIOLATIONS_MAX:
            break
    return tuple(found)


def token_violations(ids: Sequence[int]) -> Violations:
    """Check a tokenized prompt, whose length has been checked; only the engine knows the vocabulary's size."""
    if not ids:
        return (Violation("tokens.ids", "must not be empty"),)
    return _negative_ids("tokens.ids", ids)


def sampling_violation(field: str, value: float) -> Violation | None:
    """Check one field of SamplingParameters that is set; NaN and infinities are outside every range."""
    allowed = SAMPLING_RANGES.get(field)
    if allowed is None or allowed.holds(value):
        return None
    got = "" if math.isfinite(value) else ", and a finite number"
    return Violation(f"sampling.{field}", f"must be {allowed}{got}")


def stop_violations(strings: Sequence[str], token_ids: Sequence[int], limits: RequestLimits) -> Violations:
    """Check the stop conditions."""
    found: list[Violation] = []
    if len(strings) > limits.stop_strings_max:
        found.append(_too_many("stop.strings", len(strings), limits.stop_strings_max))
    else:
        for index, text in enumerate(strings):
            if not text:
                found.append(Violation(f"stop.strings[{index}]", "must not be empty"))
            elif size := utf8_size_above(text, limits.stop_string_bytes_max):
                limit = limits.stop_string_bytes_max
                found.append(Violation(f"stop.strings[{index}]", f"has {size} bytes; at most {limit} are accepted"))
    if len(token_ids) > limits.stop_tokens_max:
        found.append(_too_many("stop.token_ids", len(token_ids), limits.stop_tokens_max))
    elif token_ids:
        found.extend(_negative_ids("stop.token_ids", token_ids))
    return tuple(found)


def max_tokens_violations(max_tokens: int, allowed: int) -> Violations:
    """Check max_tokens where it is set: 1 to `allowed`."""
    return NONE if 1 <= max_tokens <= allowed else (Violation("max_tokens", f"must be 1 to {allowed}"),)


def top_logprobs_violations(top_logprobs: int, limits: RequestLimits) -> Violations:
    """Check top_logprobs where it is set."""
    allowed = limits.top_logprobs_max
    return NONE if 0 <= top_logprobs <= allowed else (Violation("top_logprobs", f"must be 0 to {allowed}"),)


def effort_violations(number: int) -> Violations:
    """Check that a reasoning effort's number is one that this version knows."""
    if 0 <= number <= 4:
        return NONE
    return (Violation("reasoning_effort", "must be NONE, LOW, MEDIUM or HIGH, or unset"),)


def affinity_violations(key: str) -> Violations:
    """Check affinity_key, which every hop carries."""
    if size := utf8_size_above(key, AFFINITY_KEY_BYTES_MAX):
        return (Violation("affinity_key", f"has {size} bytes; at most {AFFINITY_KEY_BYTES_MAX} are accepted"),)
    return NONE


def choice_violations(field: str, number: int, choices: Mapping[int, str]) -> Violations:
    """Check that an enum's number is one that this version knows: what it means cannot be left out silently.

    Args:
        field: path of the field.
        number: what was sent.
        choices: names by number; 0 is unset.
    """
    if number in choices:
        return NONE
    return (Violation(field, f"must be {' or '.join(name for n, name in choices.items() if n)}, or unset"),)


def _too_many(field: str, count: int, count_max: int) -> Violation:
    return Violation(field, f"has {count} entries; at most {count_max} are accepted")


def _negative_ids(field: str, ids: Sequence[int]) -> Violations:
    if min(ids) >= 0:
        return NONE
    index = next(i for i, token in enumerate(ids) if token < 0)
    return (Violation(f"{field}[{index}]", "must not be negative"),)

"""REQUEST: what one sequence was asked to do, checked field by field.

Sans-io. The Router has validated before; this is the second line, because an engine is reachable without it.
What needs the model (vocabulary, context) is checked in `intake.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

INVALID_REQUEST = "INVALID_REQUEST"
CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
CHAT_TEMPLATE_MISSING = "CHAT_TEMPLATE_MISSING"
OVERLOADED = "OVERLOADED"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
ENGINE_FAILED = "ENGINE_FAILED"

DRAINED = "drained"
"""Reason of a cancel: another engine may go on with the answer."""
SEQ_MAX = 2**63 - 1
CACHE_SALT_CHARACTERS_MAX = 256
# Every token walks through every stop string, so both numbers bound the work per token.
STOP_MAX = 16
STOP_CHARACTERS_MAX = 256
TOP_LOGPROBS_MAX = 20
MESSAGES_MAX = 4096
TOKENS_MAX = 2**31 - 1
PRIORITY, PRIORITY_MAX = 3, 4
"""Of a request that names none, and the highest; the lowest is 1."""


class RefusalError(Exception):
    """A request or an operation that the engine does not take; `reason` is one of this module's constants."""

    def __init__(self, reason: str, message: str, field: str = "", metadata: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.metadata = dict(metadata or {})

    def document(self) -> dict[str, Any]:
        """ERROR as the contract writes it."""
        return {
            "reason": self.reason,
            "message": self.message,
            "field": self.field,
            "metadata": self.metadata,
        }


def invalid(field: str, sentence: str) -> RefusalError:
    """An INVALID_REQUEST that names `field`."""
    return RefusalError(INVALID_REQUEST, f"{field} {sentence}.", field)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. The defaults switch everything off: greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    @property
    def is_penalised(self) -> bool:
        """Whether logits change with what was said before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the likeliest token is simply taken."""
        return self.temperature == 0 and not self.is_penalised


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


GUIDES = ("json_schema", "json_object", "regex", "choice", "grammar")
GUIDE_BYTES_MAX = 32 * 1024
CHOICES_MAX = 256


@dataclass(frozen=True, slots=True)
class Guided:
    """What the answer must look like: one of `GUIDES`, with its text, or its choices."""

    kind: str
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Continuation:
    """What another engine generated of the answer before it was lost.

    `text_bytes` of the tokens' text were delivered; what follows them there has still to be told.
    """

    tokens: tuple[int, ...]
    text_bytes: int


@dataclass(frozen=True, slots=True)
class Request:
    """One REQUEST of the contract. Exactly one of `prompt`, `messages`, `prompt_tokens` is given."""

    seq: int
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    prompt_tokens: tuple[int, ...] | None = None
    max_tokens: int | None = None
    max_tokens_cap: int | None = None
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    credit: int = -1
    deadline_ms: int | None = None
    queue_ms: int | None = None
    execution_ms: int | None = None
    cache_salt: str = ""
    continuation: Continuation | None = None
    guided: Guided | None = None
    priority: int = PRIORITY


@dataclass(frozen=True, slots=True)
class Rejected:
    """A REQUEST that names its sequence but cannot be taken; it is told on the event stream."""

    seq: int
    error: RefusalError


_FIELDS = frozenset(field.name for field in fields(Request))
_SAMPLING_FIELDS = frozenset(field.name for field in fields(Sampling))


def parse_generate(document: Mapping[str, Any], tokens: Sequence[int]) -> list[Request | Rejected]:
    """The requests of one `generate`. Raises `RefusalError` when the operation as a whole is unusable.

    A faulty REQUEST spoils only itself, unless it hides its `seq` or how many of `tokens` are its own.
    """
    _no_unknown(document, frozenset({"requests"}), "")
    requests = document.get("requests")
    if not isinstance(requests, list) or not requests:
        raise invalid("requests", "must be a list with at least one request")
    parsed: list[Request | Rejected] = []
    taken = 0
    for index, item in enumerate(requests):
        where = f"requests[{index}]"
        if not isinstance(item, dict):
            raise invalid(where, "must be an object")
        seq = _integer(item.get("seq"), f"{where}.seq", 0, SEQ_MAX)
        count = _integer(item.get("prompt_tokens") or 0, f"{where}.prompt_tokens", 0, len(tokens) - taken)
        count += _continued(item, f"{where}.continuation", len(tokens) - taken - count)
        own = tokens[taken : taken + count]
        taken += count
        try:
            parsed.append(parse_request(item, own))
        except RefusalError as error:
            parsed.append(Rejected(seq, error))
    if taken != len(tokens):
        raise invalid("tokens", f"holds {len(tokens)} ids, the requests claim {taken}")
    return parsed


def parse_request(item: Mapping[str, Any], tokens: Sequence[int]) -> Request:
    """One REQUEST with its own share of `tokens`; raises `RefusalError` that names the field."""
    _no_unknown(item, _FIELDS, "")
    given = [name for name in ("prompt", "messages", "prompt_tokens") if item.get(name) is not None]
    if len(given) != 1:
        raise invalid("prompt", "or messages or prompt_tokens must be given, exactly one of them")
    top = item.get("top_logprobs")
    limit, cap = item.get("max_tokens"), item.get("max_tokens_cap")
    own = len(tokens) - _continued(item, "continuation", len(tokens))
    return Request(
        seq=_integer(item.get("seq"), "seq", 0, SEQ_MAX),
        prompt=_text(item["prompt"], "prompt") if "prompt" in given else None,
        messages=_messages(item["messages"]) if "messages" in given else None,
        prompt_tokens=tuple(tokens[:own]) if "prompt_tokens" in given else None,
        max_tokens=None if limit is None else _integer(limit, "max_tokens", 1, TOKENS_MAX),
        max_tokens_cap=None if cap is None else _integer(cap, "max_tokens_cap", 1, TOKENS_MAX),
        sampling=_sampling(item.get("sampling")),
        stop=_stop(item.get("stop")),
        stop_token_ids=_stop_token_ids(item.get("stop_token_ids")),
        ignore_eos=_flag(item.get("ignore_eos", False), "ignore_eos"),
        top_logprobs=None if top is None else _integer(top, "top_logprobs", 0, TOP_LOGPROBS_MAX),
        credit=_integer(item.get("credit", -1), "credit", -1, SEQ_MAX),
        deadline_ms=_milliseconds(item, "deadline_ms"),
        queue_ms=_milliseconds(item, "queue_ms"),
        execution_ms=_milliseconds(item, "execution_ms"),
        cache_salt=_salt(item.get("cache_salt")),
        continuation=_continuation(item.get("continuation"), tokens[own:]),
        guided=_guided(item),
        priority=PRIORITY if item.get("priority") is None else _integer(item["priority"], "priority", 1, PRIORITY_MAX),
    )


def parse_credit(document: Mapping[str, Any]) -> list[tuple[int, int]]:
    """`[[seq, limit], ...]` of a `credit` operation."""
    _no_unknown(document, frozenset({"limits"}), "")
    limits = document.get("limits")
    if not isinstance(limits, list):
        raise invalid("limits", "must be a list of [seq, limit] pairs")
    pairs = []
    for index, pair in enumerate(limits):
        if not isinstance(pair, list) or len(pair) != 2:
            raise invalid(f"limits[{index}]", "must be a [seq, limit] pair")
        seq = _integer(pair[0], f"limits[{index}][0]", 0, SEQ_MAX)
        pairs.append((seq, _integer(pair[1], f"limits[{index}][1]", -1, SEQ_MAX)))
    return pairs


def parse_cancel(document: Mapping[str, Any]) -> tuple[list[int], str]:
    """The sequences and the reason of a `cancel` operation."""
    _no_unknown(document, frozenset({"seqs", "reason"}), "")
    seqs = document.get("seqs")
    if not isinstance(seqs, list):
        raise invalid("seqs", "must be a list of sequence ids")
    reason = document.get("reason", "cancelled")
    if reason not in ("cancelled", "deadline", DRAINED):
        raise invalid("reason", "must be cancelled, deadline or drained")
    return [_integer(seq, f"seqs[{index}]", 0, SEQ_MAX) for index, seq in enumerate(seqs)], reason


def _no_unknown(item: Mapping[str, Any], known: frozenset[str], prefix: str) -> None:
    for name in item:
        if name not in known:
            raise invalid(f"{prefix}{name[:64]}", "is not a field of the engine contract")


def _integer(value: object, field: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(field, "must be an integer")
    if not low <= value <= high:
        raise invalid(field, f"must be between {low} and {high}")
    return value


def _milliseconds(item: Mapping[str, Any], field: str) -> int | None:
    value = item.get(field)
    return None if value is None else _integer(value, field, 0, SEQ_MAX)


def _number(value: object, field: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(field, "must be a number")
    if not (low <= value <= high and math.isfinite(value)):
        raise invalid(field, f"must be between {low:g} and {high:g}")
    return float(value)


def _continued(item: Mapping[str, Any], where: str, left: int) -> int:
    """How many of `left` ids a REQUEST claims for its continuation."""
    value = item.get("continuation")
    if value is None:
        return 0
    if not isinstance(value, dict):
        raise invalid(where, "must be an object with tokens and text_bytes")
    return _integer(value.get("tokens"), f"{where}.tokens", 1, left)


def _continuation(value: object, tokens: Sequence[int]) -> Continuation | None:
    """`tokens` are its own; `_continued` has looked at it before."""
    if not isinstance(value, dict):
        return None
    _no_unknown(value, frozenset({"tokens", "text_bytes"}), "continuation.")
    return Continuation(tuple(tokens), _integer(value.get("text_bytes"), "continuation.text_bytes", 0, SEQ_MAX))


def _guided(item: Mapping[str, Any]) -> Guided | None:
    value = item.get("guided")
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) != 1 or not value.keys() <= set(GUIDES):
        raise invalid("guided", f"must be an object with exactly one of {', '.join(GUIDES)}")
    if item.get("continuation") is not None:
        raise invalid("guided", "cannot be given with a continuation")
    if item.get("ignore_eos"):
        raise invalid("guided", "cannot be given with ignore_eos: the answer ends where it is complete")
    ((kind, said),) = value.items()
    at = f"guided.{kind}"
    if kind == "json_object":
        if said is not True:
            raise invalid(at, "must be true")
        return Guided(kind)
    if kind == "choice":
        if not isinstance(said, list) or not 0 < len(said) <= CHOICES_MAX:
            raise invalid(at, f"must be a list of 1 to {CHOICES_MAX} strings")
        choices = tuple(_text(one, f"{at}[{index}]") for index, one in enumerate(said))
        if not all(choices) or sum(len(one.encode()) for one in choices) > GUIDE_BYTES_MAX:
            raise invalid(at, f"must hold strings that are not empty, of {GUIDE_BYTES_MAX} bytes together at most")
        return Guided(kind, choices=choices)
    text = _text(said, at)
    if not text or len(text.encode()) > GUIDE_BYTES_MAX:
        raise invalid(at, f"must have 1 to {GUIDE_BYTES_MAX} bytes")
    return Guided(kind, text)


def _salt(value: object) -> str:
    salt = "" if value is None else _text(value, "cache_salt")
    if len(salt) > CACHE_SALT_CHARACTERS_MAX:
        raise invalid("cache_salt", f"must have at most {CACHE_SALT_CHARACTERS_MAX} characters")
    return salt


def _flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise invalid(field, "must be true or false")
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise invalid(field, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(field, "is not valid Unicode text") from None
    return value


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise invalid("messages", "must be a list with at least one message")
    if len(value) > MESSAGES_MAX:
        raise invalid("messages", f"must hold at most {MESSAGES_MAX} messages")
    messages = []
    for index, item in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(item, dict):
            raise invalid(where, "must be an object with role and content")
        _no_unknown(item, frozenset({"role", "content"}), f"{where}.")
        role = _text(item.get("role"), f"{where}.role")
        if not role:
            raise invalid(f"{where}.role", "must not be empty")
        messages.append(Message(role, _text(item.get("content"), f"{where}.content")))
    return tuple(messages)


def _sampling(value: object) -> Sampling:
    if value is None:
        return Sampling()
    if not isinstance(value, dict):
        raise invalid("sampling", "must be an object")
    _no_unknown(value, _SAMPLING_FIELDS, "sampling.")
    seed = value.get("seed")
    top_p = _number(value.get("top_p", 1.0), "sampling.top_p", 0, 1)
    penalty = _number(value.get("repetition_penalty", 1.0), "sampling.repetition_penalty", 0, 100)
    if top_p == 0:
        raise invalid("sampling.top_p", "must be above 0")
    if penalty == 0:
        raise invalid("sampling.repetition_penalty", "must be above 0")
    return Sampling(
        temperature=_number(value.get("temperature", 0.0), "sampling.temperature", 0, 100),
        top_k=_integer(value.get("top_k", 0), "sampling.top_k", 0, TOKENS_MAX),
        top_p=top_p,
        min_p=_number(value.get("min_p", 0.0), "sampling.min_p", 0, 1),
        repetition_penalty=penalty,
        presence_penalty=_number(value.get("presence_penalty", 0.0), "sampling.presence_penalty", -100, 100),
        frequency_penalty=_number(value.get("frequency_penalty", 0.0), "sampling.frequency_penalty", -100, 100),
        seed=None if seed is None else _integer(seed, "sampling.seed", 0, 2**64 - 1),
    )


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > STOP_MAX:
        raise invalid("stop", f"must be a list of at most {STOP_MAX} strings")
    strings = tuple(_text(item, f"stop[{index}]") for index, item in enumerate(value))
    for index, string in enumerate(strings):
        if not 0 < len(string) <= STOP_CHARACTERS_MAX:
            raise invalid(f"stop[{index}]", f"must have 1 to {STOP_CHARACTERS_MAX} characters")
    return strings


def _stop_token_ids(value: object) -> frozenset[int]:
    if value is None:
        return frozenset()
    if not isinstance(value, list) or len(value) > STOP_MAX:
        raise invalid("stop_token_ids", f"must be a list of at most {STOP_MAX} token ids")
    return frozenset(_integer(item, f"stop_token_ids[{i}]", 0, TOKENS_MAX) for i, item in enumerate(value))

"""Idempotency keys: one request for each key of a tenant, whoever asks how often and at which Router.

    digest of the content ─┐
                           v
    no record ──> NEW      record of a key ──> ATTACH_HERE, ATTACH_THERE   the same content: the same transcript
                 ^            │                REUSED                      other content: refused
                 │            │                ORIGIN_LOST                 its Router is gone: nothing is run again
                 └── EXPIRED, UNSTARTED

A record is written before anything is started, by a transaction that only one caller can win, and says where the
request runs. It holds no prompt, and its key neither the tenant nor what the caller sent.

Sans-io. Times are Unix milliseconds: records travel between machines, whose clocks differ by less than anyone's
expiry.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.control.errors import Violation

KEY_BYTES_MAX = 128
PREFIX = "idempotency/"

_FORM = b"headrace-idempotency-1"
"""First part of what is hashed. Only a new form of the rest may change it: a digest outlives the software."""


def key_violations(key: str) -> list[Violation]:
    """What is wrong with an idempotency key that a caller has made."""
    if 1 <= len(key) <= KEY_BYTES_MAX and key.isascii() and key.isprintable():
        return []
    return [Violation("idempotency_key", f"must be 1 to {KEY_BYTES_MAX} printable ASCII characters")]


def store_key(tenant: str, key: str) -> str:
    """Where the record of a tenant's key is kept."""
    return PREFIX + hashlib.sha256(_part("tenant", tenant.encode()) + _part("key", key.encode())).hexdigest()


# The content


@dataclass(frozen=True, slots=True)
class Content:
    """What makes two requests the same request. What was not set is None, or empty, and is left out of the digest, so
    that a field of a later version changes no older digest.

    Not here: how it is served and read (priority, window, disconnect, recovery, affinity).
    """

    tenant: str
    model: str
    """As the caller asked: an alias is not the revision that it stands for now."""
    prompt: str | None = None
    messages: Sequence[tuple[int, str]] = ()
    """(number of the role, text)."""
    token_ids: Sequence[int] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    """Only what the caller set, by field; floats as the wire has them, in 32 bits."""
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    guide: Sequence[tuple[str, str]] = ()
    """(kind, text) of what guides decoding, for each text of it."""

    def fingerprint(self) -> bytes:
        """SHA-256 of everything but the effort, which may be the default of a revision that is not known yet."""
        hashed = hashlib.sha256(_part("form", _FORM))
        for name, data in self._parts():
            hashed.update(_part(name, data))
        return hashed.digest()

    def _parts(self) -> list[tuple[str, bytes]]:
        parts = [("tenant", self.tenant.encode()), ("model", self.model.removeprefix("aliases/").encode())]
        if self.prompt is not None:
            parts.append(("prompt", self.prompt.encode()))
        for role, text in self.messages:
            parts += [("role", b"%d" % role), ("content", text.encode())]
        if self.token_ids:
            parts.append(("token_ids", struct.pack(f">{len(self.token_ids)}i", *self.token_ids)))
        if self.max_tokens is not None:
            parts.append(("max_tokens", b"%d" % self.max_tokens))
        parts += [(f"sampling.{name}", _number(value)) for name, value in sorted(self.sampling.items())]
        parts += [("stop.string", text.encode()) for text in self.stop_strings]
        parts += [("stop.token_id", b"%d" % token_id) for token_id in self.stop_token_ids]
        if self.ignore_eos:
            parts.append(("stop.ignore_eos", b"1"))
        if self.top_logprobs is not None:
            parts.append(("top_logprobs", b"%d" % self.top_logprobs))
        parts += [(f"guided.{kind}", text.encode()) for kind, text in self.guide]
        return parts


def digest(fingerprint: bytes, effective_effort: str) -> str:
    """The digest that a record holds, in hex; `effective_effort` is "" where the revision knows none."""
    return hashlib.sha256(_part("content", fingerprint) + _part("effort", effective_effort.encode())).hexdigest()


def _part(name: str, data: bytes) -> bytes:
    """One field; the lengths keep neighbours apart."""
    return b"%s:%d:%s;" % (name.encode(), len(data), data)


def _number(value: float) -> bytes:
    return b"%d" % value if isinstance(value, int) else struct.pack(">f", value + 0.0)


# The record


class BadRecord(ValueError):
    """A record cannot be understood: another version wrote it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A Router, in one run of its process."""

    router: str
    """ "routers/{r}"."""
    incarnation: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended."""

    finish: str
    """Name of its FinishReason, without the prefix."""
    reason: str = ""
    """Name of its Reason; "" if it ended well."""
    output_tokens: int = 0
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Lifetime:
    """How long keys are remembered. One never expires while its request may run, or its transcript is kept."""

    ttl_s: float
    """From the first use."""
    kept_s: float
    """How long a transcript is kept after the end."""

    def at_start(self, now_ms: int, remaining_s: float) -> int:
        """When a key expires that is used now, for a request that may run for `remaining_s` seconds."""
        return now_ms + round(max(self.ttl_s, remaining_s + self.kept_s) * 1000)

    def after_end(self, record: Record, now_ms: int) -> int:
        """When the key of a request expires that has ended now."""
        return min(
            record.expires_ms, max(record.created_ms + round(self.ttl_s * 1000), now_ms + round(self.kept_s * 1000))
        )

    def doublings(self, life_s: float) -> int:
        """By how many doublings of `ttl_s` a life of `life_s` seconds is covered: such keys share their leases."""
        return max(0, math.ceil(math.log2(life_s / self.ttl_s)))


@dataclass(slots=True)
class Slice:
    """Keys that were first used in one slice of time."""

    ends_at: float
    count: int = 0
    is_past: bool = False


class SlicedCount:
    """How many keys live, by slices of the time of their first use: constant work, and too many by a slice at most."""

    def __init__(self, ttl_s: float, slice_s: float) -> None:
        self._ttl_s = ttl_s
        self._slice_s = slice_s
        self._slices: deque[Slice] = deque()
        self._total = 0

    def add(self, now: float) -> Slice:
        """One key more; returns its slice."""
        if not self._slices or now >= self._slices[-1].ends_at:
            self._slices.append(Slice(now + self._slice_s))
        self._slices[-1].count += 1
        self._total += 1
        return self._slices[-1]

    def take_back(self, of: Slice) -> None:
        """A key of that slice is free again."""
        if not of.is_past:
            of.count -= 1
            self._total -= 1

    def total(self, now: float) -> int:
        """Keys that may live."""
        while self._slices and self._slices[0].ends_at + self._ttl_s <= now:
            past = self._slices.popleft()
            past.is_past = True
            self._total -= past.count
        return self._total


@dataclass(frozen=True, slots=True)
class Record:
    """What the store knows of a key."""

    request: str
    """ "requests/...", drawn before it is started."""
    origin: Origin
    admin_endpoint: str
    """host:port where other Routers ask for it; "": nowhere."""
    digest: str
    revision: str
    default_effort: str
    """Of that revision: the effort of every call with this key that asks for none, even if the alias has moved."""
    created_ms: int
    expires_ms: int
    ending: Ending | None = None
    """None: it runs, or its end could not be written."""

    def is_expired(self, now_ms: int) -> bool:
        """Whether the key counts as new again."""
        return now_ms >= self.expires_ms

    def ended(self, ending: Ending, lifetime: Lifetime) -> Record:
        """The record, with how it ended, and as short a life as it then needs."""
        return dataclasses.replace(self, ending=ending, expires_ms=lifetime.after_end(self, ending.at_ms))

    def encode(self) -> bytes:
        """The bytes that are stored."""
        document = {"version": 1, **dataclasses.asdict(self)}
        return json.dumps(document, separators=(",", ":")).encode()


def decode(data: bytes) -> Record:
    """A record from its bytes; fields of a later version are passed over.

    Raises:
        BadRecord: it is none of this version.
    """
    try:
        document = json.loads(data)
        if document["version"] != 1:
            raise BadRecord("another version")
        ending = document["ending"]
        return Record(
            origin=Origin(**_only(Origin, document["origin"])),
            ending=Ending(**_only(Ending, ending)) if ending is not None else None,
            **{k: v for k, v in _only(Record, document).items() if k not in ("origin", "ending")},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRecord(type(error).__name__) from None


def _only(kind: Any, document: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: document[f.name] for f in dataclasses.fields(kind) if f.name in document}


# The decision


class Decision(enum.Enum):
    """What a call with a key does."""

    NEW = "new"
    """Nobody has used it: it is this call's."""
    EXPIRED = "expired"
    """Its record is past its time: replace it, and go on as with a new one."""
    UNSTARTED = "unstarted"
    """It was refused before anything was computed, and its record was not taken back yet: replace it."""
    ATTACH_HERE = "attach_here"
    ATTACH_THERE = "attach_there"
    REUSED = "reused"
    ORIGIN_LOST = "origin_lost"

    @property
    def runs(self) -> bool:
        """Whether this call starts the request."""
        return self in (Decision.NEW, Decision.EXPIRED, Decision.UNSTARTED)


def decide(
    record: Record | None,
    *,
    digest_with: Callable[[str], str],
    here: Origin,
    unstarted: Collection[str],
    now_ms: int,
) -> Decision:
    """What a call does, given what the store says of its key.

    Args:
        record: None if there is none.
        digest_with: digest of the call's content, given the default effort that the record names.
        here: this Router.
        unstarted: names of requests that are known never to have been started, though a record says so.
        now_ms: Unix time.
    """
    if record is None:
        return Decision.NEW
    if record.is_expired(now_ms):
        return Decision.EXPIRED
    if record.request in unstarted:
        return Decision.UNSTARTED
    if record.digest != digest_with(record.default_effort):
        return Decision.REUSED
    if record.origin == here:
        return Decision.ATTACH_HERE
    return Decision.ORIGIN_LOST if record.origin.router == here.router else Decision.ATTACH_THERE


SURE_S = 1.0
"""A Router without a service record is silent for this long before it counts as gone: it may have lost etcd only."""

PATIENCE_S = 20.0
"""How long a Router may be silent before its callers are sent away; above the life of a dead Router's record."""


class Answer(enum.Enum):
    """What another Router said when it was asked for a request."""

    SILENT = "silent"
    """Nothing: refused, cut, or not in time."""
    SUCCESSOR = "successor"
    """It is another run of that Router's process."""


class Verdict(enum.Enum):
    """What is to be thought of a Router that does not give a request."""

    LOST = "lost"
    TRY_AGAIN = "try_again"
    UNREACHABLE = "unreachable"
    """It may live; the time to find out is over."""


def judge(
    origin: Origin, answer: Answer, registered: str | None, *, silent_s: float, patience_s: float | None = None
) -> Verdict:
    """Whether the Router that has a request is gone. It is never called lost only because it is silent.

    Args:
        origin: the Router, as the record names it.
        answer: what it said.
        registered: incarnation in the service record of that Router's name; "": there is no record; None: the store
            does not answer.
        silent_s: since when it has not answered, seconds.
        patience_s: how long it may; None: PATIENCE_S.
    """
    if answer is Answer.SUCCESSOR or (registered and registered != origin.incarnation):
        return Verdict.LOST
    if registered == "" and silent_s >= SURE_S:
        return Verdict.LOST
    limit_s = PATIENCE_S if patience_s is None else patience_s
    return Verdict.TRY_AGAIN if silent_s < limit_s else Verdict.UNREACHABLE

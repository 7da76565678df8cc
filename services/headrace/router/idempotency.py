"""Idempotency keys in the store: claimed before a request starts, taken back if it never did, closed when it ended.

    claim ── one transaction ──> ours: start it          opened, or released: nothing was computed
                            └──> another call's: follow what became of that (relaying.py)

Records live under leases that nobody renews, one for all keys of a slice of time, so that the store has few of them.
Without the store no request with a key is started: it could run twice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.control import idempotency
from headrace.control.errors import Failure, Reason
from headrace.control.idempotency import (
    BadRecord,
    Content,
    Decision,
    Ending,
    Lifetime,
    Origin,
    Record,
    Slice,
    SlicedCount,
)
from headrace.control.origins import tag_of
from headrace.router.codec import guide_texts
from headrace.router.metrics import RouterMetrics
from headrace.router.plan import Plan
from headrace.router.session import Session, new_name
from headrace.router.settings import RouterSettings
from headrace.runtime.ports import Compare, LeaseNotFound, Put, Store
from headrace.runtime.tasks import cancel_and_wait
from headrace.runtime.telemetry import get_logger

CLAIM_S = 2.0
"""How long a caller waits for the store, seconds."""

SLICE_S = 600.0
"""Keys of this long share a lease, seconds; less where keys live shortly."""

_TRIES = 4
_LOOK_S = 0.5
_CALL_S = 3.0
_RETRIES_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_AT_A_TIME = 16
_UNSTARTED_MAX = 65_536
_BEHIND_MAX = 65_536
_LEASE_MARGIN_S = 60
_CLOSE_S = 2.0


@dataclass(slots=True)
class Claim:
    """A key that this Router tried to make its own."""

    key: str
    """In the store."""
    record: Record
    revision: int = 0
    """Of the store, when the record was written; 0: not known."""
    slice: Slice | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is known whether the request was started."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a call with a key is to do."""

    decision: Decision
    """NEW, ATTACH_HERE, ATTACH_THERE or ORIGIN_LOST."""
    key: str
    record: Record
    revision: int
    """Of the store, of this record."""
    claim: Claim | None = None
    """If NEW."""


class Keys:
    """The keys of one Router. Belongs to the event loop.

    Args:
        settings: how long a key lives.
        here: this Router.
        metrics: what is counted.
    """

    def __init__(self, settings: RouterSettings, here: Origin, metrics: RouterMetrics) -> None:
        self.here = here
        self._tag = tag_of(here)
        self.store: Store | None = None
        """None until it is connected: keys are refused."""
        self._admin_endpoint = ""
        self._lifetime = Lifetime(settings.idempotency_ttl_s, settings.resume_window_s)
        self._slice_s = min(SLICE_S, max(1.0, settings.idempotency_ttl_s / 4))
        self._written = SlicedCount(settings.idempotency_ttl_s, self._slice_s)
        self._keys_max = settings.idempotency_keys_max
        self._claims_max = settings.requests_max
        self._asking = 0
        self._metrics = metrics
        self._claims: dict[str, Claim] = {}
        self._unstarted: OrderedDict[str, None] = OrderedDict()
        self._leases: dict[int, tuple[int, float]] = {}
        """By doublings of a key's life: a lease, and until when keys are put under it."""
        self._granting = asyncio.Lock()
        self._gate = asyncio.Semaphore(_AT_A_TIME)
        self._behind: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> int:
        """Keys that the store holds for this Router, by this process's count."""
        return self._written.total(time.monotonic())

    @property
    def pending(self) -> int:
        """Writes to the store that are still to be made."""
        return len(self._behind)

    def use(self, store: Store, admin_endpoint: str) -> None:
        """Keep keys in `store`; other Routers ask for requests at `admin_endpoint`, host:port."""
        self.store, self._admin_endpoint = store, admin_endpoint

    # Before

    async def claim(
        self, generate: pb.GenerateRequest, plan: Plan, tenant: str, timeout_s: float, free: Collection[str] = ()
    ) -> Found:
        """Make a key this call's, or find out whose it is. One transaction, unless a record is replaced.

        Args:
            generate: the caller's request.
            plan: what was made of it.
            tenant: whose it is.
            timeout_s: how long the caller may wait, seconds.
            free: names of requests that another Router says it never started.

        Raises:
            Failure: IDEMPOTENCY_KEY_REUSED; STORE_UNAVAILABLE: nothing was started, and nothing will be.
        """
        fingerprint = content_of(generate, tenant).fingerprint()
        requested, default = plan.efforts.requested, plan.efforts.default

        def digest_with(default_effort: str) -> str:
            return idempotency.digest(fingerprint, requested.value if requested is not None else default_effort)

        now_ms, default_effort = _now_ms(), default.value if default is not None else ""
        record = Record(
            new_name(self._tag), self.here, self._admin_endpoint, digest_with(default_effort), plan.revision.name,
            default_effort, now_ms, self._lifetime.at_start(now_ms, timeout_s),
        )  # fmt: skip
        claim = Claim(idempotency.store_key(tenant, generate.idempotency_key), record)
        self._refuse_more()
        self._claims[record.request] = claim
        self._asking += 1
        try:
            async with asyncio.timeout(min(CLAIM_S, timeout_s)):
                found = await self._swap(claim, digest_with, free)
        except BaseException as error:
            self.release(claim)  # it may have been written
            if isinstance(error, TimeoutError):
                raise _unavailable("The store did not answer in time") from None
            if isinstance(error, Failure) and error.reason is Reason.STORE_UNAVAILABLE:
                raise _unavailable(error.message.rstrip(".")) from None
            raise
        finally:
            self._asking -= 1
        if found.claim is None:
            self._settle(claim)
            del self._claims[record.request]
        self._metrics.idempotency(found.decision.value)
        if found.decision is Decision.REUSED:
            raise Failure(
                Reason.IDEMPOTENCY_KEY_REUSED,
                "This idempotency key was used for a request with other content.",
                field="idempotency_key",
            )
        return found

    def _refuse_more(self) -> None:
        for bound, held, limit, words in (
            ("lookups", self._asking, self._claims_max, "calls wait for the store to look up their keys"),
            ("keys", self.held, self._keys_max, "idempotency keys are kept for this Router"),
        ):
            if held >= limit:
                self._metrics.idempotency("no_room")
                raise Failure(
                    Reason.OVERLOADED,
                    f"{held} {words}, its limit; try again later, or without a key.",
                    metadata={"stage": "router", "bound": bound, "limit": str(limit), "current": str(held)},
                )

    async def _swap(self, claim: Claim, digest_with: Any, free: Collection[str]) -> Found:
        revision = 0
        for _ in range(_TRIES):
            store = self._connected()
            try:
                lease = await self._leased(claim.record)
                done = await store.swap(Put(claim.key, claim.record.encode(), lease), revision, timeout_s=CLAIM_S)
            except LeaseNotFound:
                self._leases.clear()
                continue
            if done.revision:
                claim.revision = done.revision
                claim.slice = self._written.add(time.monotonic())
                return Found(Decision.NEW, claim.key, claim.record, done.revision, claim)
            if done.found is None:
                revision = 0
                continue
            try:
                record = idempotency.decode(done.found.value)
            except BadRecord:
                raise Failure(
                    Reason.IDEMPOTENCY_ORIGIN_LOST, "The key's record was written by another version of Headrace."
                ) from None
            decision = idempotency.decide(
                record, digest_with=digest_with, here=self.here, unstarted={*free, *self._known_unstarted(record)},
                now_ms=_now_ms(),
            )  # fmt: skip
            revision = done.found.mod_revision
            if not decision.runs:
                return Found(decision, claim.key, record, revision)
        raise _unavailable("Too many calls changed this key's record at once")

    def _known_unstarted(self, record: Record) -> Collection[str]:
        return (record.request,) if record.request in self._unstarted else ()

    async def _leased(self, record: Record) -> int:
        """The lease of this slice of time, for keys that live as long as `record` does from now on."""
        doublings = self._lifetime.doublings(max(1, record.expires_ms - _now_ms()) / 1000)
        async with self._granting:
            now = time.monotonic()
            lease, until = self._leases.get(doublings, (0, 0.0))
            if now >= until:
                life_s = self._lifetime.ttl_s * 2**doublings
                ttl_s = math.ceil(life_s + self._slice_s) + _LEASE_MARGIN_S
                lease, _ = await self._connected().lease_grant(ttl_s, timeout_s=CLAIM_S)
                self._leases[doublings] = lease, now + self._slice_s
            return lease

    def _connected(self) -> Store:
        if self.store is None:
            raise _unavailable("This Router has no store yet")
        return self.store

    # After

    def opened(self, claim: Claim) -> None:
        """The claim's request runs, under the name in its record."""
        self._settle(claim)

    def release(self, claim: Claim) -> None:
        """The request was refused before anything was computed, so that a repetition may run: take the record back."""
        name = claim.record.request
        self._claims.pop(name, None)
        self._unstarted[name] = None
        if len(self._unstarted) > _UNSTARTED_MAX:
            self._unstarted.popitem(last=False)
        self._settle(claim)
        self._later(self._persist(claim, None))

    def on_over(self, session: Session) -> None:
        """A request is over, with a key or without."""
        claim = self._claims.pop(session.name, None)
        if claim is None:
            return
        record = session.machine.record
        if session.machine.sequence == 0 and record.reason is not Reason.CLIENT_CANCELLED:
            self.release(claim)  # nothing was told, and nothing will be
            return
        finish = record.finish.name if record.finish is not None else ""
        reason = record.reason.value if record.reason is not None else ""
        ending = Ending(finish, reason, record.output_tokens, _now_ms())
        self._later(self._persist(claim, claim.record.ended(ending, self._lifetime)))

    async def is_used(self, tenant: str, key: str) -> bool:
        """Whether a key has a record. A read, which costs the store far less than to claim it and take it back.

        Raises:
            Failure: STORE_UNAVAILABLE.
        """
        return await self._connected().get(idempotency.store_key(tenant, key), timeout_s=_LOOK_S) is not None

    async def unsettled(self, name: str) -> None:
        """Wait until it is known whether the request `name` was started here."""
        claim = self._claims.get(name)
        if claim is not None:
            await claim.settled.wait()

    def was_unstarted(self, name: str) -> bool:
        """Whether `name` is known never to have been started here."""
        return name in self._unstarted

    async def latest(self, found: Found) -> Found | None:
        """The record as it is now; None: the key is free, or another request's.

        Raises:
            Failure: STORE_UNAVAILABLE.
        """
        item = await self._connected().get(found.key, timeout_s=CLAIM_S)
        if item is None:
            return None
        record = idempotency.decode(item.value)
        if record.request != found.record.request:
            return None
        return Found(found.decision, found.key, record, item.mod_revision)

    async def close(self) -> None:
        """Give the writes that are under way a moment."""
        if self._behind:
            await asyncio.wait(self._behind, timeout=_CLOSE_S)
        await cancel_and_wait(*self._behind)

    def _settle(self, claim: Claim) -> None:
        claim.settled.set()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        if len(self._behind) >= _BEHIND_MAX:
            work.close()
            self._metrics.idempotency_writes_lost += 1
            return
        task = asyncio.create_task(work, name="idempotency-record")
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    async def _persist(self, claim: Claim, ended: Record | None) -> None:
        """Write how a request ended, or delete its record, if the record is still that."""
        for pause_s in _RETRIES_S:
            try:
                async with self._gate:
                    if await self._persist_once(claim, ended):
                        self._unstarted.pop(claim.record.request, None)
                    return
            except Failure as failure:
                get_logger().info("idempotency_record_delayed", why=failure.message)
                await asyncio.sleep(pause_s)
            except (LeaseNotFound, BadRecord):
                return
        self._metrics.idempotency_writes_lost += 1

    async def _persist_once(self, claim: Claim, ended: Record | None) -> bool:
        store, revision = self._connected(), claim.revision
        if not revision:
            item = await store.get(claim.key, timeout_s=_CALL_S)
            if item is None or idempotency.decode(item.value).request != claim.record.request:
                # An answer that timed out may still be on its way into the store: the name stays known.
                return False
            revision = item.mod_revision
        if ended is None:
            await store.txn([Compare(claim.key, mod_revision=revision)], deletes=[claim.key], timeout_s=_CALL_S)
            if claim.slice is not None:
                self._written.take_back(claim.slice)
        else:
            lease = await self._leased(ended)
            await store.swap(Put(claim.key, ended.encode(), lease), revision, timeout_s=_CALL_S)
        return True


def content_of(generate: pb.GenerateRequest, tenant: str) -> Content:
    """What of a request makes it the same request."""
    kind, sampling, stop = generate.WhichOneof("input"), generate.sampling, generate.stop
    return Content(
        tenant,
        generate.model,
        prompt=generate.prompt if kind == "prompt" else None,
        messages=[(message.role, message.content) for message in generate.conversation.messages],
        token_ids=generate.tokens.ids,
        max_tokens=generate.max_tokens if generate.HasField("max_tokens") else None,
        sampling={descriptor.name: value for descriptor, value in sampling.ListFields()},
        stop_strings=stop.strings,
        stop_token_ids=stop.token_ids,
        ignore_eos=stop.ignore_eos,
        top_logprobs=generate.top_logprobs if generate.HasField("top_logprobs") else None,
        guide=guide_texts(generate.guided_decoding),
    )


def _unavailable(why: str) -> Failure:
    return Failure(
        Reason.STORE_UNAVAILABLE, f"{why}: a request with an idempotency key is not started, for it could run twice."
    )


def _now_ms() -> int:
    return round(time.time() * 1000)

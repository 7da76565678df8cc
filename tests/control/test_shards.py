"""Shards: a snapshot that was cut is the same when put together, one change moves one shard, nothing false fits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.adapters.route_codec import BadRecord
from headrace.adapters.shard_codec import (
    SnapshotEncoder,
    StoredShard,
    StoredSnapshot,
    encode_root,
    parse_root,
    parse_shard,
)
from headrace.api.registry.v1 import routing_pb2
from headrace.control.resources import (
    Alias,
    AliasTarget,
    Artifact,
    ArtifactFile,
    Engine,
    Execution,
    FileKind,
    Replica,
    ReplicaState,
    Revision,
)
from headrace.control.revocation import Revocation
from headrace.control.shards import (
    BUCKET_REPLICAS,
    Root,
    Shard,
    ShardRef,
    assemble,
    bucket_count,
    bucket_counts,
    snapshot_digest,
)
from headrace.control.snapshot import InconsistentSnapshot, RoutingSnapshot
from headrace.control.tenants import ApiKey, Tenant

ARTIFACTS = tuple(
    Artifact((ArtifactFile("model.gguf", size, "ab" * 32, FileKind.WEIGHTS),), "/models", 1) for size in (1, 2)
)
REVISIONS = tuple(
    Revision(
        model,
        artifact.name if artifact else "",
        artifact.digest if artifact else "",
        Execution(Engine.LLAMACPP if artifact else Engine.SYNTHETIC, 128 * size, 1, 128 * size),
    )
    for model in ("a", "b", "c")
    for artifact in (*ARTIFACTS, None)
    for size in (1, 2)
)


def replica(number: int, revision: Revision, state: ReplicaState = ReplicaState.READY, epoch: int = 7) -> Replica:
    return Replica(f"replicas/r{number}", revision.name, "schedulers/s", f"h{number % 3}:1", state, epoch, 4, 512)


def alias(name: str, *targets: Revision) -> Alias:
    return Alias(f"aliases/{name}", tuple(AliasTarget(r.name, 1 + n) for n, r in enumerate(targets)), "3")


def tenant(number: int, **fields: Any) -> Tenant:
    key = ApiKey(f"tenants/t{number}/keys/k", number.to_bytes(32, "big"), 5, number * 1000)
    return Tenant(f"tenants/t{number}", keys=(key,), certificate_names=(f"spiffe://t{number}",), **fields)


def made(
    revisions: Iterable[Revision],
    aliases: Iterable[Alias] = (),
    replicas: Iterable[Replica] = (),
    revocations: Iterable[Revocation] = (),
    version: int = 1,
    tenants: Iterable[Tenant] = (),
) -> RoutingSnapshot:
    chosen = sorted(revisions, key=lambda r: r.name)
    used = {r.artifact for r in chosen}
    return RoutingSnapshot(
        "here",
        version,
        tuple(sorted((a for a in ARTIFACTS if a.name in used), key=lambda a: a.name)),
        tuple(chosen),
        tuple(sorted(aliases, key=lambda a: a.name)),
        tuple(sorted(replicas, key=lambda r: r.name)),
        revocations=tuple(sorted(revocations, key=lambda r: r.name)),
        publish_time_ms=version * 1000,
        tenants=tuple(sorted(tenants, key=lambda t: t.name)),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> RoutingSnapshot:
    revisions = draw(st.lists(st.sampled_from(REVISIONS), unique=True, max_size=8))
    if not revisions:
        return made(())
    of = st.sampled_from(revisions)
    numbers = draw(st.sets(st.integers(0, 500), max_size=12))
    return made(
        revisions,
        [alias(f"n{n}", *draw(st.lists(of, min_size=1, max_size=3))) for n in range(draw(st.integers(0, 3)))],
        [replica(n, draw(of), draw(st.sampled_from(ReplicaState))) for n in numbers],
        [Revocation(f"replicas/r{n}", "why", bool(n % 2), n) for n in draw(st.sets(st.integers(0, 9), max_size=3))],
        tenants=[tenant(n, concurrency=n) for n in draw(st.sets(st.integers(0, 9), max_size=3))],
    )


def decoded(stored: StoredSnapshot) -> dict[bytes, Shard]:
    return {shard.ref.digest: parse_shard(shard.ref, shard.data) for shard in stored.shards}


def by_name(snapshot: RoutingSnapshot) -> RoutingSnapshot:
    """The same with its replicas and tenants in the order of their names, made from scratch."""
    replicas, tenants = (sorted(found, key=lambda r: r.name) for found in (snapshot.replicas, snapshot.tenants))
    return replace(snapshot, replicas=tuple(replicas), tenants=tuple(tenants))


def check_same(found: RoutingSnapshot, expected: RoutingSnapshot) -> None:
    """Equal, with equal indexes: `expected` was made from scratch, with all its checks."""
    assert by_name(found) == expected
    assert found.artifact_by_name == expected.artifact_by_name
    assert found.revision_by_name == expected.revision_by_name
    assert found.alias_by_name == expected.alias_by_name
    for index in ("tenant_by_name", "tenant_by_key_digest", "tenant_by_certificate"):
        assert getattr(found, index) == getattr(expected, index)
    for index in ("replicas_of", "ready_of"):
        one, other = getattr(found, index), getattr(expected, index)
        assert {name: set(group) for name, group in one.items()} == {n: set(group) for n, group in other.items()}
        assert sum(map(len, one.values())) == sum(map(len, other.values()))


@given(snapshots(), st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from([1, 2, 8])))
def test_what_is_cut_is_the_same_when_it_is_put_together(snapshot: RoutingSnapshot, counts: dict[str, int]) -> None:
    stored = SnapshotEncoder().encode(snapshot, counts)
    root = parse_root(encode_root(stored.root))
    assert root == stored.root
    found = assemble(root, decoded(stored))
    check_same(found, snapshot)
    assert found.digest == root.digest


class Publications(RuleBasedStateMachine):
    """Random changes, each published by one encoder and assembled from the shards that a reader keeps."""

    @initialize()
    def begin(self) -> None:
        self.encoder = SnapshotEncoder()
        self.revisions: dict[str, Revision] = {}
        self.aliases: dict[str, Alias] = {}
        self.replicas: dict[str, Replica] = {}
        self.revocations: dict[str, Revocation] = {}
        self.tenants: dict[str, Tenant] = {}
        self.kept: dict[bytes, Shard] = {}
        self.counts: dict[str, int] = {}
        self.version = 0

    @rule(revision=st.sampled_from(REVISIONS))
    def add_revision(self, revision: Revision) -> None:
        self.revisions[revision.name] = revision

    @rule(revision=st.sampled_from(REVISIONS))
    def drop_revision(self, revision: Revision) -> None:
        self.revisions.pop(revision.name, None)
        self.replicas = {k: r for k, r in self.replicas.items() if r.revision != revision.name}
        self.aliases = {k: a for k, a in self.aliases.items() if all(t.revision != revision.name for t in a.targets)}

    @rule(name=st.sampled_from("xyz"), data=st.data())
    def set_alias(self, name: str, data: st.DataObject) -> None:
        if self.revisions:
            of = st.sampled_from(sorted(self.revisions.values(), key=lambda r: r.name))
            made_alias = alias(name, *data.draw(st.lists(of, min_size=1, max_size=2)))
            self.aliases[made_alias.name] = made_alias

    @rule(first=st.integers(0, 300), count=st.sampled_from([1, 1, 1, 200]), data=st.data())
    def set_replicas(self, first: int, count: int, data: st.DataObject) -> None:
        if self.revisions:
            revision = data.draw(st.sampled_from(sorted(self.revisions.values(), key=lambda r: r.name)))
            state, epoch = data.draw(st.sampled_from(ReplicaState)), data.draw(st.integers(1, 3))
            for number in range(first, first + count):
                one = replica(number, revision, state, epoch)
                self.replicas[one.name] = one

    @rule(first=st.integers(0, 300), count=st.sampled_from([1, 200]))
    def drop_replicas(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.replicas.pop(f"replicas/r{number}", None)

    @rule(number=st.integers(0, 5), lifted=st.booleans())
    def revoke(self, number: int, lifted: bool) -> None:
        name = f"replicas/r{number}"
        self.revocations.pop(name, None)
        if not lifted:
            self.revocations[name] = Revocation(name, "why")

    @rule(first=st.integers(0, 300), count=st.sampled_from([1, 200]), weight=st.integers(0, 2))
    def set_tenants(self, first: int, count: int, weight: int) -> None:
        for number in range(first, first + count):
            one = tenant(number, weight=weight)
            self.tenants.pop(one.name, None)
            if weight:
                self.tenants[one.name] = one

    @invariant()
    def a_reader_has_what_is_stored(self) -> None:
        self.version += 1
        expected = made(
            self.revisions.values(),
            self.aliases.values(),
            self.replicas.values(),
            self.revocations.values(),
            self.version,
            self.tenants.values(),
        )
        stored = self.encoder.encode(expected, self.counts)
        fresh = SnapshotEncoder().encode(expected, self.counts)
        assert stored == fresh, "what was encoded before is reused only where it is the same"
        here = {s.ref.digest: self.kept.get(s.ref.digest) or parse_shard(s.ref, s.data) for s in stored.shards}
        check_same(assemble(stored.root, here), expected)
        self.kept, self.counts = here, bucket_counts(ref.name for ref in stored.root.shards)


TestPublications = Publications.TestCase
TestPublications.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)

FLEET = tuple(replica(n, REVISIONS[n % 2]) for n in range(1000))
WHOLE = made(REVISIONS[:6], [alias("chat", *REVISIONS[:2])], FLEET)


def test_one_tenants_change_moves_one_shard() -> None:
    encoder, many = SnapshotEncoder(), [tenant(n) for n in range(500)]
    before = encoder.encode(made(REVISIONS[:1], tenants=many))
    after = encoder.encode(made(REVISIONS[:1], tenants=[*many[:99], tenant(99, concurrency=3), *many[100:]]))
    moved = {s.ref for s in after.shards} - {s.ref for s in before.shards}
    assert len(before.shards) == len(after.shards) == 5
    assert [ref.name.split("/")[0] for ref in moved] == ["tenants"]


def test_one_replicas_change_moves_one_shard_and_a_reader_shares_the_others() -> None:
    encoder = SnapshotEncoder()
    before = encoder.encode(WHOLE)
    changed = replace(FLEET[500], state=ReplicaState.DRAINING)
    after = encoder.encode(replace(WHOLE, version=2, replicas=(*FLEET[:500], changed, *FLEET[501:])))
    moved = {s.ref for s in after.shards} - {s.ref for s in before.shards}
    assert len(before.shards) == len(after.shards) == 10
    assert [ref.name.split("/")[0] for ref in moved] == ["replicas"]
    assert max(len(s.data) for s in after.shards) < 32 * 1024
    first = assemble(before.root, old := decoded(before))
    second = assemble(after.root, {**old, **{d: s for d, s in decoded(after).items() if d not in old}})
    assert len({id(r) for r in second.replicas} - {id(r) for r in first.replicas}) <= 2 * BUCKET_REPLICAS


@pytest.mark.parametrize(
    ("replicas", "before", "count"),
    [
        (0, 1, 1),
        (128, 1, 1),
        (129, 1, 2),
        (10_000, 1, 128),
        (129, 2, 2),
        (100, 2, 2),
        (33, 2, 2),
        (31, 2, 1),
        (1, 64, 1),
    ],
)
def test_buckets_are_a_power_of_two_that_does_not_go_to_and_fro(replicas: int, before: int, count: int) -> None:
    assert bucket_count(replicas, before) == count


@given(st.integers(0, 20_000), st.sampled_from([1, 2, 16, 128]))
def test_a_bucket_holds_few_and_the_count_is_stable(replicas: int, before: int) -> None:
    count = bucket_count(replicas, before)
    assert replicas <= BUCKET_REPLICAS * count
    assert bucket_count(replicas, count) == count


def test_bucket_counts_are_read_from_the_names_of_shards() -> None:
    names = ["aliases", "models/m", "replicas/m/3-of-8", "replicas/m/0-of-8", "replicas/n.o/0-of-1", "replicas/x/odd"]
    assert bucket_counts(names) == {"m": 8, "n.o": 1, "x": 1}
    assert bucket_counts(["tenants/3-of-4", "models/tenants"]) == {"tenants/": 4}


def rooted(stored: StoredSnapshot, keep: Iterable[str]) -> Root:
    """A root with a right digest that names only those shards whose names begin so."""
    refs = tuple(s.ref for s in stored.shards if s.ref.name.startswith(tuple(keep)))
    return replace(stored.root, shards=refs, digest=snapshot_digest(refs, ()))


@pytest.mark.parametrize(
    ("keep", "words"),
    [(["models", "aliases"], ""), (["aliases"], "which is not here"), (["replicas"], "which is not here")],
    ids=["without replicas it holds together", "aliases without models", "replicas without models"],
)
def test_a_root_whose_shards_do_not_fit_together_is_no_snapshot(keep: list[str], words: str) -> None:
    stored = SnapshotEncoder().encode(WHOLE)
    root = rooted(stored, keep)
    if not words:
        assert not assemble(root, decoded(stored)).replicas
        return
    with pytest.raises(InconsistentSnapshot, match=words):
        assemble(root, decoded(stored))


def test_a_replica_in_two_shards_is_refused() -> None:
    one = SnapshotEncoder().encode(made(REVISIONS[:1], replicas=FLEET[:1]))
    twice = [_renamed(s.data, "replicas/a/1-of-2") for s in one.shards if s.ref.name.startswith("replicas")]
    refs = tuple(s.ref for s in (*one.shards, *twice))
    root = replace(one.root, shards=refs, digest=snapshot_digest(refs, ()))
    with pytest.raises(InconsistentSnapshot, match="twice"):
        assemble(root, {**decoded(one), **{s.ref.digest: parse_shard(s.ref, s.data) for s in twice}})


@pytest.mark.parametrize(
    "change",
    [{"digest": "0" * 64}, {"shards": ()}, {"revocations": (Revocation("replicas/r1"),)}],
    ids=["digest", "shards", "revocations"],
)
def test_a_root_with_another_digest_is_refused(change: dict[str, object]) -> None:
    stored = SnapshotEncoder().encode(WHOLE)
    with pytest.raises(InconsistentSnapshot, match="digest"):
        assemble(replace(stored.root, **change), decoded(stored))


def _renamed(data: bytes, name: str) -> StoredShard:
    message = routing_pb2.Shard.FromString(data)
    message.name = name
    changed = message.SerializeToString(deterministic=True)
    return StoredShard(ShardRef(name, hashlib.sha256(changed).digest()), changed)


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: setattr(m.revisions[0], "digest", "0" * 64),
        lambda m: setattr(m.artifacts[0].files[0], "size", 6),
        lambda m: m.replicas.add(name="replicas/x", state=99),
        lambda m: m.aliases.add(name="aliases/other"),
        lambda m: m.revisions.add().CopyFrom(m.revisions[0]),
        lambda m: m.tenants.add(name="tenants/t").keys.add(name="tenants/t/keys/k", sha256=b"short"),
        lambda m: [m.tenants.add(name="tenants/t") for _ in "12"],
    ],
    ids=[
        "a revision's digest",
        "a file's size",
        "unknown enum",
        "alias without target",
        "twice the name",
        "a key without a digest",
        "twice a tenant",
    ],
)
def test_a_damaged_shard_is_refused_though_its_digest_is_right(damage: object) -> None:
    stored = next(s for s in SnapshotEncoder().encode(WHOLE).shards if s.ref.name == "models/a")
    message = routing_pb2.Shard.FromString(stored.data)
    damage(message)  # type: ignore[operator]
    data = message.SerializeToString()
    with pytest.raises(BadRecord):
        parse_shard(ShardRef("models/a", hashlib.sha256(data).digest()), data)
    with pytest.raises(BadRecord, match="holds models/a"):
        parse_shard(ShardRef("models/b", stored.ref.digest), stored.data)

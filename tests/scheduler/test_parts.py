"""The Scheduler's parts on their own: columns, frames, artifacts, places and the record in etcd."""

import asyncio
import hashlib
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.errors import Failure, Reason
from headrace.control.resources import Artifact, ArtifactFile, FileKind
from headrace.engine.contract import StepBatch, merge
from headrace.runtime.settings import SettingsError, load_settings
from headrace.scheduler import artifacts, session
from headrace.scheduler.artifacts import ArtifactFault, ArtifactVerifier
from headrace.scheduler.columns import split_by_owner
from headrace.scheduler.fleet import choose_workers
from headrace.scheduler.publisher import ReplicaPublisher
from headrace.scheduler.session import Session
from headrace.scheduler.settings import SchedulerSettings

# Columns


@st.composite
def batches(draw):
    rich = draw(st.booleans())
    parts = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.text(max_size=3)), max_size=8))
    batch = StepBatch(number=1, steps=1, logprobs=[] if rich else None)
    if rich:
        batch.top_counts, batch.top_ids, batch.top_logprobs = [], [], []
    for seq, count, text in parts:
        ids = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
        batch.seqs.append(seq)
        batch.token_counts.append(count)
        batch.token_ids += ids
        batch.text_lengths.append(len(text.encode()))
        batch.text += text.encode()
        if rich:
            for token in ids:
                wide = draw(st.integers(0, 2))
                batch.logprobs.append(-float(token))
                batch.top_counts.append(wide)
                batch.top_ids += list(range(wide))
                batch.top_logprobs += [-float(token) - n for n in range(wide)]
    return batch


@given(batches())
def test_split_columns_are_the_parts_of_each_owner_in_order(batch):
    found = split_by_owner(batch, lambda seq: seq % 3)
    assert set(found) == {seq % 3 for seq in batch.seqs}
    for owner, part in found.items():
        assert list(part.parts()) == [p for p in batch.parts() if p.seq % 3 == owner]


class Loads:
    load_version = 0

    def load_report(self) -> pb.LoadReport:
        return pb.LoadReport(replicas=[pb.ReplicaLoad(replica="replicas/a")])

    def attempts_of(self, session):
        return [10 * session, 10 * session + 1]


def output(seq: int, tokens: int, *, rich: bool = False) -> StepBatch:
    batch = StepBatch(
        seqs=[seq], token_counts=[tokens], token_ids=[7] * tokens, text_lengths=[tokens], text=b"x" * tokens
    )
    if rich:
        batch.logprobs, batch.top_counts = [-1.0] * tokens, [0] * tokens
        batch.top_ids, batch.top_logprobs = [], []
    return batch


async def test_what_waits_together_is_one_frame_and_ends_come_last():
    made = Session(1, "routers/r", Loads())
    made.put_admitted(pb.Admitted(attempt=5))
    for _ in range(3):
        made.put_output(output(5, 2))
    made.put_ended(pb.Ended(attempt=5))
    frame = made.take()
    assert [a.attempt for a in frame.admitted] == [5]
    assert list(frame.deltas.attempts) == [5, 5, 5]
    assert frame.deltas.text == b"x" * 6
    assert [e.attempt for e in frame.ended] == [5]
    assert frame.HasField("load")
    assert not made.take().ByteSize()


async def test_a_full_frame_leaves_the_rest_and_no_end_overtakes(monkeypatch):
    monkeypatch.setattr(session, "FRAME_BYTES_MAX", 100)
    made = Session(1, "routers/r", Loads())
    for _ in range(5):
        made.put_output(output(5, 20))
    made.put_ended(pb.Ended(attempt=5))
    frames = [made.take() for _ in range(5)]
    assert [len(f.deltas.token_ids) for f in frames] == [20] * 5
    assert [len(f.ended) for f in frames] == [0, 0, 0, 0, 1]


async def test_an_inventory_follows_the_ends_that_it_does_not_have(monkeypatch):
    monkeypatch.setattr(session, "FRAME_BYTES_MAX", 100)
    made = Session(1, "routers/r", Loads())
    made.put_output(output(5, 20))
    made.put_output(output(5, 20))
    made.put_ended(pb.Ended(attempt=5))
    made.ask_inventory(7)
    first, second, third = (made.take() for _ in range(3))
    assert not first.HasField("inventory"), "an end is still to come"
    assert [e.attempt for e in second.ended] == [5]
    assert (second.inventory.number, list(second.inventory.attempts)) == (7, [10, 11])
    assert not third.HasField("inventory"), "it is told once"


async def test_logprobs_of_one_keep_the_columns_of_all_aligned():
    made = Session(1, "routers/r", Loads())
    made.put_output(output(1, 2))
    made.put_output(output(2, 3, rich=True))
    deltas = made.take().deltas
    assert [math.isnan(v) for v in deltas.logprobs] == [True, True, False, False, False]
    assert len(deltas.top_counts) == len(deltas.token_ids) == 5
    assert merge([output(1, 2), output(2, 3, rich=True)]).token_ids == list(deltas.token_ids)


async def test_a_router_that_grants_without_end_and_does_not_read_is_told(monkeypatch):
    monkeypatch.setattr(session, "WAITING_TOKENS_MAX", 100)
    made = Session(1, "routers/r", Loads())
    for _ in range(6):
        made.put_output(output(1, 20))
    with pytest.raises(Failure) as told:
        await made.write(None)
    assert told.value.reason is Reason.SLOW_CONSUMER


# Artifacts


def artifact(folder, content: bytes, path: str = "w.gguf", size: int | None = None) -> Artifact:
    digest = hashlib.sha256(content).hexdigest()
    size = len(content) if size is None else size
    return Artifact(files=(ArtifactFile(path, size, digest, FileKind.WEIGHTS),), location=str(folder))


async def test_a_verdict_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    file = tmp_path / "w.gguf"
    file.write_bytes(b"right")
    good = artifact(tmp_path, b"right")
    hashed = []
    sha256 = artifacts._sha256
    monkeypatch.setattr(artifacts, "_sha256", lambda content, stop: hashed.append(1) or sha256(content, stop))
    await ArtifactVerifier(tmp_path / "state").verify(good)
    await ArtifactVerifier(tmp_path / "state").verify(good)  # another run of the process
    assert len(hashed) == 1
    file.write_bytes(b"wrong")
    os.utime(file, ns=(1, 1))
    with pytest.raises(ArtifactFault, match="is not what artifacts/"):
        await ArtifactVerifier(tmp_path / "state").verify(good)
    assert len(hashed) == 2


async def test_a_damaged_memory_of_verdicts_is_no_verdict(tmp_path):
    (tmp_path / "w.gguf").write_bytes(b"right")
    (tmp_path / "verified.json").write_text("{ not json")
    await ArtifactVerifier(tmp_path).verify(artifact(tmp_path, b"right"))
    with pytest.raises(ArtifactFault, match="has 5 bytes, but"):
        await ArtifactVerifier(tmp_path).verify(artifact(tmp_path, b"right", size=6))


@pytest.mark.parametrize("path", ["../w.gguf", "/etc/hostname", "a/../../w.gguf", ""])
async def test_a_file_outside_the_location_is_refused(tmp_path, path):
    with pytest.raises(ArtifactFault, match="outside its location"):
        await ArtifactVerifier(tmp_path).verify(artifact(tmp_path, b"", path=path))


# Places


@pytest.mark.parametrize(
    ("wanted", "running", "places", "chosen"),
    [
        ("abc", "", 2, "ab"),
        ("abc", "c", 2, "ca"),
        ("abc", "c", 1, "c"),
        ("abc", "x", 5, "abc"),
        ("abc", "", 0, ""),
    ],
    ids=["by name", "who runs stays", "only one place", "room for all", "no place"],
)
def test_who_gets_a_place(wanted, running, places, chosen):
    assert "".join(choose_workers(wanted, running, places)) == chosen


# The record in etcd


class Records:
    def __init__(self):
        self.down = False
        self.taken_over = False
        self.held: dict[str, tuple[int, bytes]] = {}
        self.epoch = 0
        self.calls = 0

    def _check(self):
        self.calls += 1
        if self.down:
            raise Failure(Reason.STORE_UNAVAILABLE, "etcd does not answer")

    async def register(self, key, value):
        self._check()
        self.epoch += 1
        self.held[key] = (self.epoch, value)
        return self.epoch

    async def update(self, key, value):
        self._check()
        if self.taken_over:
            raise Failure(Reason.STALE_EPOCH, "taken over")
        self.held[key] = (self.held[key][0], value)

    async def withdraw(self, key):
        self._check()
        self.held.pop(key, None)


async def eventually(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_record_follows_through_an_outage_and_each_beginning_has_its_epoch():
    records, epochs, fenced = Records(), [], []
    publisher = ReplicaPublisher(records, "replicas/a", on_epoch=epochs.append, on_fenced=lambda: fenced.append(1))
    records.down = True
    publisher.begin(b"loading")
    await eventually(lambda: records.calls >= 2)
    publisher.put(b"ready")
    records.down = False
    await eventually(lambda: records.held.get("replicas/a") == (1, b"ready"))
    assert epochs == [1]
    publisher.put(b"draining")
    await eventually(lambda: records.held["replicas/a"] == (1, b"draining"))
    publisher.begin(b"loading")
    await eventually(lambda: records.held.get("replicas/a") == (2, b"loading"))
    assert epochs == [1, 2]
    records.taken_over = True
    publisher.put(b"ready")
    await eventually(lambda: fenced)
    await publisher.end()
    assert not records.held
    await publisher.end()


async def test_a_record_that_cannot_be_withdrawn_is_left_to_its_lease():
    records = Records()
    publisher = ReplicaPublisher(records, "replicas/a", on_epoch=lambda _: None, on_fenced=lambda: None)
    publisher.begin(b"ready")
    await eventually(lambda: records.held)
    records.down = True
    await publisher.end()


# Settings


def test_lists_in_the_environment_and_a_wrong_name():
    settings = load_settings(
        SchedulerSettings,
        "scheduler",
        environ={
            "HEADRACE_SCHEDULER_ENGINES": "synthetic",
            "HEADRACE_SCHEDULER_ATTACH": "10.0.0.1:8001, 10.0.0.2:8001",
            "HEADRACE_SCHEDULER_WORKERS_MAX": "2",
        },
    )
    assert (settings.engines, settings.workers_max) == (("synthetic",), 2)
    assert settings.attach == ("10.0.0.1:8001", "10.0.0.2:8001")
    with pytest.raises(SettingsError, match="scheduler setting 'name'"):
        load_settings(SchedulerSettings, "scheduler", overrides={"name": "Not An Id"})

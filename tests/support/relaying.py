"""A relay without a network: one session, one replica, and an engine that keeps what it was asked."""

from headrace.api.scheduler.v1 import scheduler_service_pb2 as pb
from headrace.control.attempt_book import WorkerBook
from headrace.control.attempts import AttemptLedger
from headrace.control.resources import FailureDomain, Replica, ReplicaState
from headrace.engine.contract import StepBatch
from headrace.runtime.membership import LeaseState
from headrace.scheduler.metrics import make_registry
from headrace.scheduler.relay import Relay
from headrace.scheduler.vitals import Vitals
from support.scheduling import make_dispatch

REVISION = "models/m/revisions/0123456789ab"
REPLICA = Replica(
    "replicas/a",
    REVISION,
    "schedulers/s",
    "127.0.0.1:1",
    ReplicaState.READY,
    7,
    4,
    1000,
    FailureDomain("h", "r", "z"),
    "",
)


class Engine:
    """Stands for an EngineClient: keeps what it was asked."""

    is_local = True

    def __init__(self):
        self.asked = []
        self.requests = {}
        self.lists = 0

    def generate(self, request, tokens, *, input_bytes, budget):
        self.asked.append(("generate", request["seq"]))
        self.requests[request["seq"]] = request

    def credit(self, seq, limit):
        self.asked.append(("credit", seq, limit))

    def cancel(self, seqs, reason="cancelled"):
        self.asked.append(("cancel", tuple(seqs), reason))

    def list_sequences(self):
        self.lists += 1

    def condemn(self, why):
        self.asked.append(("condemn", why))


class NoFleet:
    has_snapshot, is_draining = True, False

    def __init__(self):
        self.workers, self.restarts = {}, {}


class HeldLease:
    state, age_s = LeaseState.HELD, 1.0


class Bench:
    """One relay with one session; `run` is the newest run of the only replica's engine."""

    def __init__(self):
        self.relay = Relay(AttemptLedger())
        self.session = self.relay.open_session("routers/r")
        self.run = 1_000_000  # no number of a real run
        self.open()

    def open(self):
        self.run += 1
        self.engine = Engine()
        self.relay.open_engine(
            WorkerBook("replicas/a", REVISION, (7,), slots=4, kv_cells=1000, context_tokens=100, incarnation=self.run),
            self.engine,
        )

    def dispatch(self, token, *, priority=0, cause=0, tenant="", session=None, **fields):
        message = make_dispatch(REPLICA, attempt=token, **fields)
        message.priority, message.cause, message.tenant = priority, cause, tenant
        self.relay.take(session or self.session, pb.AttachRequest(dispatches=[message]))

    def take(self, **parts):
        self.relay.take(self.session, pb.AttachRequest(**parts))

    def told(self):
        """The next frame to the Router."""
        return self.session.take()

    def tell(self, *events, run=None, seqs=(), **columns):
        batch = StepBatch(number=1, steps=1, events=list(events), seqs=list(seqs), **columns)
        self.relay.on_batch("replicas/a", self.run if run is None else run, batch)

    def say(self, seq, tokens, run=None):
        self.tell(
            run=run,
            seqs=[seq],
            token_counts=[tokens],
            token_ids=[1] * tokens,
            text_lengths=[tokens],
            text=b"x" * tokens,
        )

    def metric(self, name, **labels):
        registry = make_registry(self.relay, NoFleet(), Vitals(NoFleet(), HeldLease()))
        return registry.get_sample_value(f"headrace_scheduler_{name}", labels)

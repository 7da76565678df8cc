"""What one decision of a Router costs, over a fleet in which some replicas are tried, revoked or not reachable."""

from __future__ import annotations

import dataclasses
import gc
import random
import resource
import time

from headrace.control.filters import Demand
from headrace.control.load_view import ReplicaReport
from headrace.control.placement import resolve_revision
from headrace.control.prefix_index import salt, text_blocks
from headrace.control.resources import Alias, AliasTarget, Replica, Revision
from headrace.control.revocation import Revocation
from headrace.control.routing import Routing
from headrace.control.snapshot import RoutingSnapshot


def decisions(revision: Revision, made: list[Replica], rounds: int) -> tuple[list[float], int]:
    """Microseconds of each of `rounds` decisions: resolve the alias, choose the replica.

    And how often the machine gave the core to somebody else meanwhile: where that is one in a hundred or more, the p99
    is its doing.
    """
    replicas = [dataclasses.replace(replica, epoch=1 + n) for n, replica in enumerate(made)]
    snapshot = RoutingSnapshot(
        "bench",
        1,
        revisions=(revision,),
        aliases=(Alias("aliases/chat", (AliasTarget(revision.name, 1),)),),
        replicas=tuple(replicas),
        revocations=tuple(Revocation(r.name) for r in replicas[:100]),
    )
    draw = random.Random(1).random
    down = {r.endpoint for r in replicas[1000:2000]}
    routing = Routing()
    routing.apply(snapshot, 0.0)
    # One attempt in ten keeps a prompt that many share, and all replicas have reported.
    prompt = b"You are a helpful assistant. " * 300
    demands = [
        Demand(len(prompt), output_tokens=256, blocks=text_blocks([prompt], salt("t", revision.name)), affinity=n)
        for n in range(2)
    ]
    for n, replica in enumerate(replicas):
        routing.report(replica.name, ReplicaReport(n % 7, n % 3, 8, queue_wait_s=n % 3 / 4), n / len(replicas))
        if n % 10 == 0:
            routing.dispatched(n, replica.name, replica.epoch, replica.revision, demands[0], 1.0)
            routing.admitted(n, len(prompt) // 4, 0, 1.0)
    tried = [replicas[5000].name]
    gc.collect()
    took, switched = [], resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    for n in range(rounds):
        began = time.perf_counter_ns()
        resolved = resolve_revision(snapshot, "chat", draw)
        routing.choose(
            snapshot,
            resolved,
            demands[n % 2],
            reachable=lambda endpoint: endpoint not in down,
            tried=tried,
            random=draw,
            now=1.5,
        )
        took.append((time.perf_counter_ns() - began) / 1000)
    return took, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switched

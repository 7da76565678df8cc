"""A blocking client in a process of its own: how long a refusal takes for who has nothing else to do.

It asks both Routers in turn, some times a second, each time from a thread that waits for the first word only: what is
accepted is cancelled at once. In turn with them it asks a server that does nothing but refuse (floor.py): what that
takes is the machine's and gRPC's. A job as JSON on stdin; `[milliseconds, what was said]` of each call on stdout.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.api.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from headrace.client.connect import OPTIONS
from headrace.rpc import status
from overload.floor import FLOOR

Seen = list[tuple[float, str]]


def ask(stub: InferenceServiceStub, job: dict[str, Any], seen: Seen) -> None:
    """One call up to its first word."""
    message = pb.GenerateRequest(model=job["model"], prompt="probe", max_tokens=job["tokens"])
    began = time.perf_counter()
    call = stub.Generate(message, timeout=10.0, metadata=((job["tenant_key"], "probe"),))
    try:
        next(call)
        took_s, said = time.perf_counter() - began, "accepted"
        call.cancel()
    except grpc.RpcError as error:
        took_s = time.perf_counter() - began
        failure = status.from_rpc_error(error)
        said = failure.reason.value if failure is not None else error.code().name
        if error.details() == FLOOR:
            said = FLOOR
        if failure is not None:
            said += f" {failure.metadata.get('bound') or failure.metadata.get('stage') or ''}".rstrip()
    seen.append((1000 * took_s, said))


def main() -> None:
    """Ask until the time is over."""
    job: dict[str, Any] = json.load(sys.stdin)
    chance = random.Random(job["seed"])
    stubs = []
    for router in [*job["routers"], job["floor"]]:
        channel = grpc.insecure_channel(router, options=OPTIONS)
        grpc.channel_ready_future(channel).result(10)
        stubs.append(InferenceServiceStub(channel))
    gc.freeze()
    seen: Seen = []
    asking: list[threading.Thread] = []
    ends = time.perf_counter() + job["seconds"]
    while time.perf_counter() < ends:
        time.sleep(chance.expovariate(job["rate"]))
        thread = threading.Thread(target=ask, args=(stubs[len(asking) % len(stubs)], job, seen))
        thread.start()
        asking.append(thread)
    for thread in asking:
        thread.join()
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()

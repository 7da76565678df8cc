"""A server that refuses each request and does nothing else: what that takes is the least that any could take here.

It is gRPC's asyncio server on the services' event loop, as the Routers are. Its address goes to stdout; it ends with
its input. With an argument it goes before ordinary threads, where that is allowed.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc

from headrace.api.inference.v1 import inference_service_pb2_grpc as pb_grpc
from headrace.runtime.loop import ServiceLoop
from overload.realtime import go_first

FLOOR = "floor"


class Floor(pb_grpc.InferenceServiceServicer):
    """See the module."""

    async def Generate(self, request: Any, context: Any) -> None:
        """Refuse."""
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, FLOOR)


async def main() -> None:
    """Serve until stdin is closed."""
    server = grpc.aio.server()
    pb_grpc.add_InferenceServiceServicer_to_server(Floor(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    if sys.argv[1:]:
        go_first()
    gc.freeze()
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        runner.run(main())

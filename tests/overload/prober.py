"""A caller apart, in a process of its own: how long a refusal takes, from its sending to the answer's last byte.

It speaks HTTP/2 itself, in one thread: gRPC's Python client takes about as long as a refusal, in three threads that
wait for cores like everybody's. It asks both Routers in turn, some times a second; what is accepted is reset at its
first word. In turn with them it asks a server that does nothing but refuse (floor.py): what that takes is the machine's
and gRPC's. A job as JSON on stdin; `[milliseconds, what was said]` of each call on stdout.
"""

from __future__ import annotations

import base64
import gc
import json
import random
import selectors
import socket
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, ResponseReceived, StreamReset, TrailersReceived

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.rpc import status
from overload.floor import FLOOR
from overload.realtime import go_first

Seen = list[tuple[float, str]]
PATH = f"/{pb.DESCRIPTOR.services_by_name['InferenceService'].full_name}/Generate"
LIMIT_S = 10.0
"""For one call."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Trailers(grpc.RpcError):
    """The end of a call, as gRPC tells it in headers."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def code(self) -> grpc.StatusCode:
        return _CODES.get(int(self._headers.get("grpc-status", "2")), grpc.StatusCode.UNKNOWN)

    def details(self) -> str:
        return urllib.parse.unquote(self._headers.get("grpc-message", ""))

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return tuple(
            (name, base64.b64decode(text + "==") if name.endswith("-bin") else text)
            for name, text in self._headers.items()
        )

    @property
    def said(self) -> str:
        """In a word or two, as the generator says it."""
        if self.details() == FLOOR:
            return FLOOR
        failure = status.from_rpc_error(self)
        if failure is None:
            return self.code().name
        return f"{failure.reason.value} {failure.metadata.get('bound') or failure.metadata.get('stage') or ''}".rstrip()


class Connection:
    """One connection to one server, and the calls that run on it."""

    def __init__(self, address: str, job: dict[str, Any], seen: Seen) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.began: dict[int, float] = {}
        """By stream, of calls that have no word yet."""
        self._seen = seen
        message = pb.GenerateRequest(model=job["model"], prompt="probe", max_tokens=job["tokens"]).SerializeToString()
        self._body = b"\0" + len(message).to_bytes(4, "big") + message
        self._headers = [
            (":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", address), ("te", "trailers"),
            ("content-type", "application/grpc"), ("grpc-timeout", f"{LIMIT_S:.0f}S"), (job["tenant_key"], "probe"),
        ]  # fmt: skip
        self._http = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._http.initiate_connection()
        self._send()

    def ask(self) -> None:
        """Begin a call."""
        stream = self._http.get_next_available_stream_id()
        self._http.send_headers(stream, self._headers)
        self._http.send_data(stream, self._body, end_stream=True)
        self.began[stream] = time.perf_counter()
        self._send()

    def read(self) -> None:
        """Take what has come; all of it has come now, whatever reading it takes."""
        data, now = self.socket.recv(1 << 16), time.perf_counter()
        if not data:
            raise ConnectionError(f"{self.socket.getpeername()} has closed the connection")
        for event in self._http.receive_data(data):
            self._take(event, now)
        self._send()

    def _take(self, event: Event, now: float) -> None:
        if isinstance(event, DataReceived):
            self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if self._ended(event.stream_id, now, "accepted"):
                self._http.reset_stream(event.stream_id, ErrorCodes.CANCEL)
        elif isinstance(event, ResponseReceived | TrailersReceived) and event.stream_ended is not None:
            self._ended(event.stream_id, now, Trailers(dict(event.headers)).said)
        elif isinstance(event, StreamReset):
            self._ended(event.stream_id, now, "reset")

    def _ended(self, stream: int, now: float, said: str) -> bool:
        began = self.began.pop(stream, None)
        if began is not None:
            self._seen.append((1000 * (now - began), said))
        return began is not None

    def _send(self) -> None:
        data = self._http.data_to_send()
        if data:
            self.socket.sendall(data)


def main() -> None:
    """Ask until the time is over, and wait for what was asked."""
    job: dict[str, Any] = json.load(sys.stdin)
    if job["realtime"]:
        go_first()
    chance, seen = random.Random(job["seed"]), Seen()
    waiting = selectors.DefaultSelector()
    connections = [Connection(address, job, seen) for address in (*job["routers"], job["floor"])]
    for connection in connections:
        waiting.register(connection.socket, selectors.EVENT_READ, connection)
    gc.freeze()
    asked, due = 0, time.perf_counter()
    ends = due + job["seconds"]
    while due < ends or any(connection.began for connection in connections):
        left_s = (due if due < ends else ends + LIMIT_S) - time.perf_counter()
        if due < ends and left_s <= 0:
            connections[asked % len(connections)].ask()
            asked, due = asked + 1, due + chance.expovariate(job["rate"])
            continue
        if left_s <= 0:
            break
        for key, _ in waiting.select(left_s):
            key.data.read()
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()

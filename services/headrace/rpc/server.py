"""A gRPC server as every service runs it: bounded requests, mapped errors, health, reflection, an orderly stop.

Handlers are coroutines `method(request, context)` that raise `Failure`; streaming ones are async generators or
coroutines that write to the context. How they end is in headrace.rpc.calls: each call is observed once, exception
texts never reach a caller, and an internal CancelledError never leaves a client hanging.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.control.errors import Reason
from headrace.rpc.calls import Context, Observe, streaming, unary
from headrace.rpc.channels import MESSAGE_BYTES_MAX, SERVER_OPTIONS
from headrace.rpc.guard import Guard
from headrace.rpc.reflection import enable_reflection
from headrace.rpc.requests import Refused, bounded
from headrace.runtime.settings import SettingsError

__all__ = ["Context", "Observe", "Server"]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_RECEIVE_BYTES_MAX = 4 * MESSAGE_BYTES_MAX
"""What grpc itself accepts; our own limit, with a precise refusal, is below."""


class Server:
    """One listening server.

    Args:
        address: host:port; port 0 takes any.
        setting: name of the setting that `address` came from, for the error text.
        options: channel arguments beside the common ones.
        observe: told of each finished call.
        credentials: of TLS; None: without.
        guard: refuses callers who may not call; None: everybody may.
    """

    def __init__(
        self,
        address: str,
        *,
        setting: str = "listen",
        options: list[tuple[str, int | str]] | None = None,
        observe: Observe | None = None,
        credentials: grpc.ServerCredentials | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._address = address
        self._setting = setting
        self._observe_call = observe or (lambda method, outcome: None)
        self._credentials = credentials
        self._cut = False
        self._server = grpc.aio.server(
            options=[
                *SERVER_OPTIONS,
                ("grpc.max_receive_message_length", _RECEIVE_BYTES_MAX),
                *(options or []),
            ],
            interceptors=[guard] if guard is not None else [],
        )
        self._names: list[str] = []
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = 0

    def add(
        self,
        service: ServiceDescriptor,
        servicer: object,
        *,
        request_bytes_max: int = MESSAGE_BYTES_MAX,
        serializers: Mapping[str, Callable[[Any], bytes]] | None = None,
    ) -> None:
        """Serve the methods of `service` by those of the same name of `servicer`.

        Args:
            service: from the generated module's DESCRIPTOR.services_by_name.
            servicer: its methods.
            request_bytes_max: larger requests are refused before they are parsed.
            serializers: by method, what turns its responses into bytes; default: the message's own.
        """
        handlers = {}
        for method in service.methods:
            implementation = getattr(servicer, method.name)
            handlers[method.name] = _method_handler(
                method,
                implementation,
                bounded(GetMessageClass(method.input_type), request_bytes_max),
                (serializers or {}).get(method.name, _serialize),
                self._observe,
            )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        self._names.append(service.full_name)

    async def start(self) -> None:
        """Listen. Health is NOT_SERVING until `set_serving`.

        Raises:
            SettingsError: the address cannot be bound; names the setting.
        """
        enable_reflection([*self._names, health.SERVICE_NAME], self._server)
        await self.set_serving(False)
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(self._address)
            else:
                self.port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise SettingsError(
                f"setting '{self._setting}': cannot listen on {self._address}; the port is in use or the address is "
                f"not of this machine. Stop what uses it, or choose another one."
            )
        await self._server.start()

    @property
    def endpoint(self) -> str:
        """host:port bound."""
        return f"{self._address.rpartition(':')[0]}:{self.port}"

    async def set_serving(self, serving: bool) -> None:
        """Set the health of every service here, and of the server as a whole (the empty name)."""
        for name in ["", *self._names]:
            await self._health.set(name, SERVING if serving else NOT_SERVING)

    async def set_health(self, name: str, serving: bool) -> None:
        """Set the health that `name` answers, for a signal beside those of the services."""
        await self._health.set(name, SERVING if serving else NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then end them; those are observed as DRAINING."""
        await self._health.enter_graceful_shutdown()
        cut = asyncio.get_running_loop().call_later(grace_s, self._begin_cut)
        await self._server.stop(grace_s)
        cut.cancel()

    def _begin_cut(self) -> None:
        self._cut = True

    def _observe(self, method: str, outcome: str) -> None:
        # gRPC ends a handler in the same way whether its client left or the server has no more time for it.
        left = outcome == Reason.CLIENT_CANCELLED.value
        self._observe_call(method, Reason.DRAINING.value if left and self._cut else outcome)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _method_handler(
    method: Any,
    implementation: Callable[..., Any],
    deserialize: Callable[[bytes], Message | Refused],
    serialize: Callable[[Any], bytes],
    observe: Observe,
) -> grpc.RpcMethodHandler[Any, Any]:
    wrap = streaming if method.server_streaming else unary
    behavior = wrap(method.name, implementation, observe)
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    return make(behavior, request_deserializer=deserialize, response_serializer=serialize)

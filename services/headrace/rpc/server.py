"""A gRPC server as every service runs it: bounded requests, mapped errors, health, reflection, an orderly stop.

Handlers are coroutines `method(request, context)` that raise `Failure`; streaming ones are async generators or
coroutines that write to the context. Whatever else a handler raises becomes INTERNAL with an error id: exception
texts never reach a caller, and an internal CancelledError never leaves a client hanging.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.control.errors import Failure
from headrace.rpc import status
from headrace.rpc.channels import MESSAGE_BYTES_MAX, SERVER_OPTIONS
from headrace.rpc.reflection import enable_reflection
from headrace.rpc.requests import Refused, bounded
from headrace.runtime.settings import SettingsError

Context = grpc.aio.ServicerContext[Any, Any]
Observe = Callable[[str, str], None]
"""Called with (method name, outcome) once a call is over; outcome is OK or a Reason."""

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
    """

    def __init__(
        self,
        address: str,
        *,
        setting: str = "listen",
        options: list[tuple[str, int | str]] | None = None,
        observe: Observe | None = None,
    ) -> None:
        self._address = address
        self._setting = setting
        self._observe = observe or (lambda method, outcome: None)
        self._server = grpc.aio.server(
            options=[
                *SERVER_OPTIONS,
                ("grpc.max_receive_message_length", _RECEIVE_BYTES_MAX),
                *(options or []),
            ]
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
            self.port = self._server.add_insecure_port(self._address)
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

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then end them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _method_handler(
    method: Any,
    implementation: Callable[..., Any],
    deserialize: Callable[[bytes], Message | Refused],
    serialize: Callable[[Any], bytes],
    observe: Observe,
) -> grpc.RpcMethodHandler[Any, Any]:
    wrap = _wrap_streaming if method.server_streaming else _wrap_unary
    behavior = wrap(method.name, implementation, observe, checked=not method.client_streaming)
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    return make(behavior, request_deserializer=deserialize, response_serializer=serialize)


def _wrap_unary(
    name: str, implementation: Callable[..., Any], observe: Observe, *, checked: bool
) -> Callable[[Any, Context], Any]:
    async def call(request: Any, context: Context) -> Any:
        async with _Mapped(name, context, observe) as mapped:
            if checked and isinstance(request, Refused):
                raise request.failure
            result = await implementation(request, context)
            mapped.outcome = "OK"
            return result

    return call


def _wrap_streaming(
    name: str, implementation: Callable[..., Any], observe: Observe, *, checked: bool
) -> Callable[[Any, Context], Any]:
    if inspect.isasyncgenfunction(implementation):

        async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
            async with _Mapped(name, context, observe) as mapped:
                if checked and isinstance(request, Refused):
                    raise request.failure
                async for response in implementation(request, context):
                    yield response
                mapped.outcome = "OK"

        return generate

    async def write(request: Any, context: Context) -> None:
        async with _Mapped(name, context, observe) as mapped:
            if checked and isinstance(request, Refused):
                raise request.failure
            await implementation(request, context)
            mapped.outcome = "OK"

    return write


class _Mapped:
    """Maps every way in which a handler can end to one status and one outcome."""

    def __init__(self, name: str, context: Context, observe: Observe) -> None:
        self._name = name
        self._context = context
        self._observe = observe
        self.outcome = ""

    async def __aenter__(self) -> _Mapped:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, GeneratorExit):
            # grpc drops a generator only when it cannot write what was yielded: the client went away.
            self._observe(self._name, "CLIENT_CANCELLED")
            return
        if error is None or isinstance(error, grpc.aio.AbortError):
            self._observe(self._name, self.outcome or "ABORTED")
            return
        if isinstance(error, asyncio.CancelledError) and _is_cancelled(self._context):
            self._observe(self._name, "CLIENT_CANCELLED")
            return
        if isinstance(error, Failure):
            failure = error
        elif _is_cancelled(self._context):
            # A write that was blocked when its client went away raises ExecuteBatchError, not CancelledError.
            self._observe(self._name, "CLIENT_CANCELLED")
            return
        else:
            failure = status.unmapped(error, where=self._name)
        self._observe(self._name, failure.reason.value)
        await status.abort(self._context, failure)


def _is_cancelled(context: Context) -> bool:
    """Whether the call itself is over or being cancelled, rather than something that its handler awaited.

    The context learns of a cancel only after the handler does (0.1 ms later, measured); the task knows at once.
    """
    task = asyncio.current_task()
    return context.cancelled() or context.done() or (task is not None and task.cancelling() > 0)

"""Who may call: checks before handlers, by method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from headrace.control.errors import Failure
from headrace.rpc import status
from headrace.rpc.calls import Context

Check = Callable[[Context], None]
"""Raises Failure for a caller who may not."""

_HEALTH_AND_REFLECTION = ("/grpc.health.", "/grpc.reflection.")


def health_and_reflection(check: Check) -> Callable[[str], Check | None]:
    """For Guard: `check` decides who may ask for health and reflection; everything else is open."""
    return lambda method: check if method.startswith(_HEALTH_AND_REFLECTION) else None


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls that their method's check refuses.

    Args:
        check_of: the check of a method, "/package.Service/Method"; None: its calls pass untouched.
    """

    def __init__(self, check_of: Callable[[str], Check | None]) -> None:
        self._check_of = check_of

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        check = self._check_of(str(handler_call_details.method))
        if handler is None or check is None:
            return handler
        make, inner = _parts(handler)
        return make(
            _guarded(inner, check),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guarded(inner: Callable[[Any, Context], Any], check: Check) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        try:
            check(context)
        except Failure as failure:
            await status.abort(context, failure)
        answer = inner(request, context)
        if not hasattr(answer, "__aiter__"):
            return await answer
        async for message in answer:
            await context.write(message)
        return None

    return call


def _parts(handler: Any) -> tuple[Callable[..., Any], Callable[[Any, Context], Any]]:
    if handler.request_streaming:
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler, handler.stream_stream
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary

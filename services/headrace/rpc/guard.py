"""Who may ask for health and reflection: everybody, or those whom a check lets pass."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from headrace.control.errors import Failure
from headrace.rpc import status
from headrace.rpc.calls import Context

Check = Callable[[Context], None]
"""Raises Failure for a caller who may not."""

_GUARDED = ("/grpc.health.", "/grpc.reflection.")


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls of health and reflection that `check` refuses; others pass untouched."""

    def __init__(self, check: Check) -> None:
        self._check = check

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or not str(handler_call_details.method).startswith(_GUARDED):
            return handler
        make, inner = _parts(handler)
        return make(
            self._guarded(inner),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, inner: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Awaitable[Any]]:
        async def call(request: Any, context: Context) -> Any:
            try:
                self._check(context)
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

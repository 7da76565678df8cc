"""How a handler's call ends: every way is mapped to one status and one outcome.

What was measured of grpc.aio 1.85.3, and what is made of it here; tests/rpc/test_traps.py shows each:

- A client that leaves cancels the handler's task; but a handler that is inside `write` gets an ExecuteBatchError
  first, an Exception, with nothing on the task or the context that tells of the end, and the CancelledError at its
  next await, which may be one of its cleanup. Here both are the same end of the call.
- A CancelledError that is not the call's own, once it leaves a handler, leaves the client without a status until its
  deadline. Here it becomes INTERNAL.
- The text of whatever a handler raises is sent to the client. Here only that of a Failure is.
- A write that a reader holds up can be broken off by cancelling the handler's task from outside (catch the
  CancelledError at the write, `uncancel`, raise a Failure). The message stays in gRPC's hands: a client that reads on
  gets all messages, the broken one too, and then the status. A further write fails with ExecuteBatchError
  (TOO_MANY_OPERATIONS). `abort` waits behind the message until the client reads, leaves, or its deadline or
  connection ends; so the handler's exception is dropped before, and what the handler held with it: two tasks and
  18 kB wait along (1,000 such calls), and nothing is left of them. `server.stop` ends them after its grace.
- Only if the *first* write is broken off can no status follow at all (it carries the headers, and gRPC would send
  them twice): the client would hang. Here the first write runs in a task of its own, which no cancel reaches, and the
  status waits for it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc

from headrace.control.errors import Failure, Reason
from headrace.rpc import status
from headrace.rpc.requests import Refused

Context = grpc.aio.ServicerContext[Any, Any]
Observe = Callable[[str, str], None]
"""Called with (method name, outcome) once a call is over; outcome is OK or a Reason."""
Handler = Callable[[Any, Context], Awaitable[Any]]

_DEADLINE_SHARE = 0.011
_DEADLINE_S = 0.005


def unary(name: str, implementation: Callable[..., Any], observe: Observe) -> Handler:
    """Wrap a handler that returns its response."""

    async def call(request: Any, context: Context) -> Any:
        running = _refuse(request) if isinstance(request, Refused) else implementation(request, context)
        return await _run(name, context, observe, running)

    return call


def streaming(name: str, implementation: Callable[..., Any], observe: Observe) -> Handler:
    """Wrap a handler that writes its responses, or a generator of them."""
    handler = _writing(implementation) if inspect.isasyncgenfunction(implementation) else implementation

    async def call(request: Any, context: Context) -> None:
        responding = cast("Context", _Responding(context))
        running = _refuse(request) if isinstance(request, Refused) else handler(request, responding)
        await _run(name, context, observe, running, responding)

    return call


def is_call_over(error: BaseException) -> bool:
    """Whether `error`, raised by a read or write of a call, says that the call has ended: its client has left, its
    deadline has passed, its connection is lost, or the server has stopped.
    """
    return (
        isinstance(error, grpc.aio.BaseError)
        and not isinstance(error, (grpc.aio.UsageError, grpc.aio.AbortError))
        # The call goes on, but was used wrongly: by two writes at once, for one.
        and "grpc_call_start_batch" not in str(error)
    )


def has_written(context: Context) -> bool:
    """Whether a streaming handler has begun to write."""
    return getattr(context, "first", None) is not None


class _Responding:
    """The context of a streaming call, with a first write that a cancel of the handler does not cut."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.first: asyncio.Task[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def is_over(self) -> bool:
        """Wait for the first write, if there is one; whether the call had ended before it was through."""
        if self.first is None:
            return False
        await asyncio.wait({self.first})
        error = self.first.exception()
        return error is not None and is_call_over(error)

    async def write(self, message: Any) -> None:
        """See grpc.aio.ServicerContext.write."""
        if self.first is None:
            self.first = asyncio.ensure_future(self._context.write(message))
            self.first.add_done_callback(_retrieve)
            await asyncio.shield(self.first)
            self.write = self._context.write  # type: ignore[method-assign]  # nothing between it and all further ones
        else:
            await self._context.write(message)


async def _run(name: str, context: Context, observe: Observe, running: Awaitable[Any], responding: Any = None) -> Any:
    whole_s = context.time_remaining()
    try:
        result = await running
    except (KeyboardInterrupt, SystemExit):
        raise
    except grpc.aio.AbortError:
        observe(name, "ABORTED")
        raise
    except BaseException as caught:
        error = _leaf(caught)
        if is_call_over(error) or (isinstance(error, asyncio.CancelledError) and _is_cancelled(context)):
            observe(name, _why_over(context, whole_s).value)
            # What is not a CancelledError is logged by gRPC, and nothing went wrong here.
            raise asyncio.CancelledError from None
        failure = error if isinstance(error, Failure) else status.unmapped(error, where=name)
        reason, ending = failure.reason.value, status.encode(failure)
        del error, failure
    else:
        observe(name, "OK")
        return result
    # Here, where the exception is gone and with it all that the handler held: to send a status can take long.
    del running
    observe(name, reason)
    if responding is not None and await responding.is_over():
        raise asyncio.CancelledError
    try:
        await context.abort(*ending)
    except grpc.aio.InternalError as late:
        if not is_call_over(late):
            raise
        raise asyncio.CancelledError from None  # the client left before it had read the status


async def _refuse(request: Refused) -> None:
    raise request.failure


def _writing(generator: Callable[..., Any]) -> Handler:
    async def write_all(request: Any, context: Context) -> None:
        async with aclosing(generator(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


def _leaf(error: BaseException) -> BaseException:
    """What a TaskGroup of the handler wraps: a Failure if there is one, otherwise the first error."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [_leaf(inner) for inner in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, Failure)), leaves[0])


def _is_cancelled(context: Context) -> bool:
    """Whether the call itself is over or being cancelled, rather than something that its handler awaited.

    The context learns of a cancel only after the handler does (0.1 ms later, measured); the task knows at once.
    """
    task = asyncio.current_task()
    return context.cancelled() or context.done() or (task is not None and task.cancelling() > 0)


def _why_over(context: Context, whole_s: float | None) -> Reason:
    """Tell a deadline from a client that left: at its deadline a client says no more than that it cancels.

    gRPC rounds a deadline up when it sends it, by 1 % at most, so that the client's own timer ends the call a little
    before ours.
    """
    remaining_s = context.time_remaining()
    if whole_s is None or remaining_s is None:
        return Reason.CLIENT_CANCELLED
    return (
        Reason.DEADLINE_EXCEEDED if remaining_s <= _DEADLINE_S + _DEADLINE_SHARE * whole_s else Reason.CLIENT_CANCELLED
    )


def _retrieve(task: asyncio.Task[None]) -> None:
    """Take the error of a first write, also when nobody waits for it any more."""
    if not task.cancelled():
        task.exception()

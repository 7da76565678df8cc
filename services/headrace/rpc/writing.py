"""Writes to a call as its client, beside a reader that is told how the call ends."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc


def keep_status(call: Any) -> Any:
    """Let no late write of a streaming request hide how the call ended; returns `call`.

    A client of grpc.aio that writes after its server has ended the call, before it has read that, turns the status of
    the call into INTERNAL "Internal error from Core" and may lose the responses that it has not read yet (grpc#43486;
    measured: most calls whose client wrote at the very end). Acknowledgements are such writes. With this, a write to a
    call that has ended is dropped, and the reader gets all responses and the true status. It holds for `call.write`
    and for an iterator of requests; apply it where the call is made, before anything is awaited.

    A grpcio that is built differently inside is left as it is.
    """
    core: Any = getattr(call, "_cython_call", None)
    serialize = getattr(call, "_request_serializer", None)
    if not hasattr(call, "_write") or not hasattr(core, "send_serialized_message"):
        return call

    async def write(frame: Any) -> None:
        if call.done():
            return
        await call.wait_for_connection()
        with contextlib.suppress(grpc.aio.InternalError):  # the call is over, and its reader is told how
            await core.send_serialized_message(serialize(frame) if serialize is not None else frame)

    call._write = write
    return call


async def half_close(call: Any) -> None:
    """Say that nothing more is written, unless the call has ended: grpc.aio's own way would then cancel it."""
    core: Any = getattr(call, "_cython_call", None)
    if call.done() or not hasattr(core, "send_receive_close"):
        return
    with contextlib.suppress(grpc.aio.InternalError):
        await core.send_receive_close()

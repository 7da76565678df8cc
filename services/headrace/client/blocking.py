"""The blocking client: the same surface as the asyncio one, on gRPC's own threads and no hidden event loop.

    with Client("127.0.0.1:50051") as client:
        for text in client.generate("The river", model="demo").text():
            print(text, end="", flush=True)
        answer = client.generate(messages=[{"role": "user", "content": "Hi"}], model="demo").read()

A client may be shared between threads. A stream has one reader; `cancel()` may come from any thread.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any, Self, Unpack

import grpc

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client.blocking_stream import Stream, confirmed
from headrace.client.calls import ASK_S, CANCEL_REQUEST, GET_REQUEST, serialize
from headrace.client.connect import DEFAULT_TARGET, DEFAULT_TIMEOUT_S, OPTIONS, Channels, key_metadata
from headrace.client.decoding import request_from_proto
from headrace.client.errors import HeadraceError
from headrace.client.events import RequestInfo
from headrace.client.questions import check_timeout, is_elsewhere, question_error
from headrace.client.request import GenerateOptions, build_name, build_request, build_resume
from headrace.client.session import Session
from headrace.client.targets import Targets
from headrace.control.client_retry import RetryPolicy
from headrace.control.client_throttle import ThrottlePolicy

_DEFAULT_RETRY = RetryPolicy()
_DEFAULT_THROTTLE = ThrottlePolicy()


class Client:
    """Generates text with a Headrace service.

    Args:
        target: host:port of a Router, or several of one fleet, as a sequence or with commas between them: requests
            take turns, and one whose Router is lost before the first output goes to another one, once, with an
            idempotency key that is made for it.
        credentials: for TLS; None connects in plain text.
        api_key: says who calls; sent in the metadata of each call.
        allow_plaintext_key: whether the key may be sent to another machine without TLS.
        default_timeout_s: for requests that name none, seconds; None for no deadline.
        retry: None switches retries off.
        throttle: holds requests back while the service refuses most of them; None never does.
        interactive: whether streams acknowledge what was read, so that nothing is generated far ahead of a reader.
            False asks for the plain form, where what the transport holds counts as read.

    Raises:
        ValueError: there is no target, or the key cannot be sent, or not there in plain text.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        allow_plaintext_key: bool = False,
        default_timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = _DEFAULT_RETRY,
        throttle: ThrottlePolicy | None = _DEFAULT_THROTTLE,
        interactive: bool = True,
    ) -> None:
        check_timeout(default_timeout_s)
        self._credentials = credentials
        self._default_timeout_s = default_timeout_s
        self._retry = retry
        self._interactive = interactive
        self._links: Channels[grpc.Channel] = Channels(target, self._open)
        self._metadata = key_metadata(api_key, self._links.names, credentials, allow_plaintext=allow_plaintext_key)
        self._targets = Targets(len(self._links.names), throttle, time.monotonic, random.random)
        self._links.open()
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def generate(self, prompt: str | None = None, *, model: str, **options: Unpack[GenerateOptions]) -> Stream:
        """Ask for one answer. Nothing is sent before the stream is first read.

        Args:
            prompt: text given to the model as it is; or pass `messages` or `token_ids`.
            model: an alias or an exact revision.
            options: see GenerateOptions.

        Raises:
            InvalidRequest: a value cannot be sent; names the field.
            DeadlineExceeded: timeout_s is 0 or less.
            TypeError: not exactly one input, or an unknown option.
        """
        timeout_s = options.pop("timeout_s", None)
        interactive = options.pop("interactive", None)
        return self._stream(build_request(model, prompt, options), timeout_s, interactive)

    def resume(
        self,
        request: str,
        after_sequence: int = 0,
        *,
        timeout_s: float | None = None,
        interactive: bool | None = None,
    ) -> Stream:
        """Go on with a request that was made with on_disconnect="continue", here or in another process.

        The stream is taken over from whoever reads it. Nothing is sent before it is first read.

        Args:
            request: its name, from `accepted` or `resume_point`.
            after_sequence: of the last event that was read; 0 repeats all of them.
            timeout_s: how long to read; the request has a deadline of its own.
            interactive: default: the client's.

        Raises:
            InvalidRequest: a value cannot be sent; names the field.
            DeadlineExceeded: timeout_s is 0 or less.
        """
        return self._stream(build_resume(request, after_sequence), timeout_s, interactive)

    def get_request(self, request: str, *, timeout_s: float = ASK_S) -> RequestInfo:
        """Look up a request that runs, or ended lately.

        Raises:
            NotFound: no Router knows it.
            HeadraceError: it could not be asked.
        """
        return self._question(GET_REQUEST, build_name(pb.GetRequestRequest(), request), timeout_s)

    def cancel_request(self, request: str, *, timeout_s: float = ASK_S) -> RequestInfo:
        """End a request, whoever reads it; one that has ended is returned unchanged.

        Raises:
            NotFound: no Router knows it.
            HeadraceError: it could not be asked.
        """
        return self._question(CANCEL_REQUEST, build_name(pb.CancelRequestRequest(), request), timeout_s)

    def close(self) -> None:
        """End what still runs (it raises Cancelled) and close the connections."""
        self._closed = True
        with self._lock:
            streams = list(self._streams)
        asked = [stream.client_closes() for stream in streams]
        for asking in asked:
            confirmed(asking)
        for channel in self._links.opened:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(
        self,
        request: pb.GenerateRequest | pb.ResumeGenerateRequest,
        timeout_s: float | None,
        interactive: bool | None,
    ) -> Stream:
        timeout_s = self._default_timeout_s if timeout_s is None else timeout_s
        check_timeout(timeout_s)
        fails_over = self._retry is not None and self._retry.fails_over and len(self._targets) > 1
        session = Session(
            request,
            is_interactive=self._interactive if interactive is None else interactive,
            timeout_s=timeout_s,
            retry=self._retry,
            clock=time.monotonic,
            draw=random.random,
            turn=self._targets.turn(),
            own_key=str(uuid.uuid4()) if fails_over else "",
        )
        stream = Stream(session, self._channels, self._metadata)
        with self._lock:
            self._streams.add(stream)
        return stream

    def _question(self, method: str, message: Any, timeout_s: float) -> RequestInfo:
        """Ask one Router after another, until one knows the request."""
        check_timeout(timeout_s)
        channels, turn = self._channels(), self._targets.turn()
        worst: HeadraceError | None = None
        start = turn.next()
        for step in range(len(channels)):
            channel = channels[(start + step) % len(channels)]
            ask = channel.unary_unary(method, serialize, pb.Request.FromString)
            try:
                return request_from_proto(ask(message, timeout=timeout_s, metadata=self._metadata))
            except grpc.RpcError as rpc_error:
                worst = is_elsewhere(worst, question_error(rpc_error))
        assert worst is not None
        raise worst

    def _channels(self) -> list[grpc.Channel]:
        if self._closed:
            raise RuntimeError("the client is closed")
        return self._links.open()

    def _open(self, target: str) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(target, options=OPTIONS)
        return grpc.secure_channel(target, self._credentials, options=OPTIONS)

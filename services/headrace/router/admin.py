"""RouterService: what operators and other Routers ask this one, on a port of its own (`admin_listen`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.api.inference.v1 import inference_service_pb2 as inference_pb
from headrace.api.router.v1 import router_service_pb2 as pb
from headrace.control.errors import InvalidRequest, Violation
from headrace.control.idempotency import Origin
from headrace.control.request import CONFIRM_S
from headrace.router.explaining import Explainer
from headrace.router.lookups import Lookups
from headrace.router.peers import ANSWER_S, RELAYED, stale
from headrace.router.relaying import Sharing
from headrace.rpc.calls import Context
from headrace.rpc.reading import FrameReader


def _relayed(event: bytes) -> bytes:
    return pb.RelayRequestResponse(event=event).SerializeToString()


def _resumed(event: bytes) -> bytes:
    return pb.ResumeRequestResponse(event=event).SerializeToString()


SERIALIZERS: Mapping[str, Callable[[Any], bytes]] = {"RelayRequest": _relayed, "ResumeRequest": _resumed}
"""Events are bytes already: the same that the event log keeps."""


class RouterService:
    """Serves headrace.api.router.v1.RouterService.

    Args:
        here: this Router.
        sharing: its requests with keys.
        lookups: all its requests, by name.
        explainer: its decisions.
    """

    def __init__(self, here: Origin, sharing: Sharing, lookups: Lookups, explainer: Explainer) -> None:
        self._here = here
        self._sharing = sharing
        self._lookups = lookups
        self._explainer = explainer

    async def ExplainRoute(self, request: pb.ExplainRouteRequest, context: Context) -> pb.ExplainRouteResponse:  # noqa: N802
        """See the proto."""
        return self._explainer.explain(request)

    async def RelayRequest(self, request: pb.RelayRequestRequest, context: Context) -> None:  # noqa: N802
        """See the proto."""
        await self._sharing.relay(request, context)

    async def LookUpRequest(  # noqa: N802
        self, request: pb.LookUpRequestRequest, context: Context
    ) -> pb.LookUpRequestResponse:
        """See the proto."""
        self._check(request.incarnation)
        left_s = context.time_remaining()
        record = await self._lookups.record(
            request.request, request.tenant, cancel=request.cancel, left_s=CONFIRM_S if left_s is None else left_s
        )
        return pb.LookUpRequestResponse(request=record)

    async def ResumeRequest(self, _frames: Any, context: Context) -> None:  # noqa: N802
        """See the proto."""
        try:
            frame = await FrameReader(context).next(ANSWER_S)
        except TimeoutError:
            frame = None
        if frame is None or frame.WhichOneof("frame") != "resume":
            raise InvalidRequest((Violation("frame", "the first one must be resume"),))
        asked: pb.Resumption = frame.resume
        self._check(asked.incarnation)
        await self._lookups.resume(
            inference_pb.ResumeGenerateRequest(request=asked.request, after_sequence=asked.after_sequence),
            asked.tenant,
            context,
            interactive=asked.interactive,
            begin=lambda: context.send_initial_metadata(((RELAYED, asked.request),)),
        )

    def _check(self, incarnation: str) -> None:
        if incarnation != self._here.incarnation:
            raise stale(self._here)

"""RouterService: what operators and other Routers ask this one, on a port of its own (`admin_listen`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.api.router.v1 import router_service_pb2 as pb
from headrace.router.explaining import Explainer
from headrace.router.relaying import Sharing
from headrace.rpc.server import Context


def _relayed(event: bytes) -> bytes:
    return pb.RelayRequestResponse(event=event).SerializeToString()


SERIALIZERS: Mapping[str, Callable[[Any], bytes]] = {"RelayRequest": _relayed}
"""Events are bytes already: the same that the event log keeps."""


class RouterService:
    """Serves headrace.api.router.v1.RouterService."""

    def __init__(self, sharing: Sharing, explainer: Explainer) -> None:
        self._sharing = sharing
        self._explainer = explainer

    async def ExplainRoute(self, request: pb.ExplainRouteRequest, context: Context) -> pb.ExplainRouteResponse:  # noqa: N802
        """See the proto."""
        return self._explainer.explain(request)

    async def RelayRequest(self, request: pb.RelayRequestRequest, context: Context) -> None:  # noqa: N802
        """See the proto."""
        await self._sharing.relay(request, context)

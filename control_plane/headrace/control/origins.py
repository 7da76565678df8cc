"""Which Router a request is from, by its name; and which Routers there are, so that any of them finds that one.

    requests/{tag: 12 hex}{drawn: 32 hex}

The tag is a one-way digest of a Router's name and incarnation: it tells nobody a name or an address, and no two runs of
a process share one. What cannot be guessed is the drawn part, 128 bits.

Sans-io.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.control.idempotency import Origin

TAG_CHARS = 12
"""Two of 10,000 runs of Routers share one with a probability of 2 in 10 million; then one's requests are not found."""

DEPARTED_MAX = 1024
_NAME = re.compile(rf"requests/([0-9a-f]{{{TAG_CHARS}}})[0-9a-f]{{32}}")


def tag_of(origin: Origin) -> str:
    """What marks the names of a Router's requests."""
    hashed = hashlib.sha256(b"headrace origin\0%s\0%s" % (origin.router.encode(), origin.incarnation.encode()))
    return hashed.hexdigest()[:TAG_CHARS]


def request_name(tag: str, drawn: str) -> str:
    """Name of a new request.

    Args:
        tag: of the Router where it is.
        drawn: 32 random hex digits.
    """
    return f"requests/{tag}{drawn}"


def tag_in(name: str) -> str:
    """The tag in a request's name; "" if there is none: an older Router gave it, or nobody did."""
    found = _NAME.fullmatch(name)
    return found.group(1) if found is not None else ""


@dataclass(frozen=True, slots=True)
class Peer:
    """A Router as its service record has it."""

    origin: Origin
    admin_endpoint: str
    """host:port where other Routers ask for requests; "": nowhere."""


class Directory:
    """Routers by their tags: those with a service record, and the latest ones that had one.

    A Router without a record may have lost the store only. So it stays known, and is asked, until `departed_max` others
    have left after it.
    """

    def __init__(self, departed_max: int = DEPARTED_MAX) -> None:
        self._departed_max = departed_max
        self._listed: dict[str, Peer] = {}
        """By name of the Router."""
        self._known: dict[str, Peer] = {}
        """By tag."""
        self._departed: OrderedDict[str, None] = OrderedDict()
        """Tags without a record, those that left first at the front."""

    def __len__(self) -> int:
        return len(self._known)

    def replace(self, peers: Iterable[Peer]) -> None:
        """These are all that have a record now."""
        listed = {peer.origin.router: peer for peer in peers}
        for router in [router for router in self._listed if router not in listed]:
            self.remove(router)
        for peer in listed.values():
            self.put(peer)

    def put(self, peer: Peer) -> None:
        """A record was written; a process that had the Router's name before has none any more."""
        before = self._listed.get(peer.origin.router)
        if before is not None and before.origin != peer.origin:
            self.remove(peer.origin.router)
        tag = tag_of(peer.origin)
        self._listed[peer.origin.router] = self._known[tag] = peer
        self._departed.pop(tag, None)

    def remove(self, router: str) -> None:
        """A Router's record was deleted."""
        peer = self._listed.pop(router, None)
        if peer is None:
            return
        self._departed[tag_of(peer.origin)] = None
        while len(self._departed) > self._departed_max:
            tag, _ = self._departed.popitem(last=False)
            del self._known[tag]

    def find(self, tag: str) -> Peer | None:
        """The Router whose requests have this tag; None: it is not known, or no longer."""
        return self._known.get(tag)

    def incarnation(self, router: str) -> str:
        """Of the process that has a record under this name; "" if none has."""
        peer = self._listed.get(router)
        return peer.origin.incarnation if peer is not None else ""

"""Pages of a listing: how large they are, and the token that continues behind one.

A token holds the last key that was returned, and a digest over that key and the request's filters. It means nothing in
another listing, or under other filters; it never expires, because a key can be continued behind even when it is gone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping

from headrace.control.errors import InvalidRequest, Violation

PAGE_SIZE = 100
"""Resources on a page when the request does not say."""

PAGE_SIZE_MAX = 1000

PAGE_BYTES_MAX = 4 * 1024 * 1024
"""A page ends early here: an answer must fit into one message."""

_DIGEST_BYTES = 12


def page_size(asked: int) -> int:
    """How many resources the page may hold."""
    return min(asked or PAGE_SIZE, PAGE_SIZE_MAX)


def make_token(listing: str, filters: Mapping[str, object], last_key: str) -> str:
    """The token that continues behind `last_key`.

    Args:
        listing: which one, as its method ("ListAliases").
        filters: of the request.
        last_key: the last key that was returned.
    """
    token = _digest(listing, filters, last_key) + last_key.encode()
    return base64.urlsafe_b64encode(token).decode().rstrip("=")


def read_token(token: str, listing: str, filters: Mapping[str, object]) -> str:
    """The key behind which to continue; "" for an empty token: from the beginning.

    Raises:
        InvalidRequest: it is not a token of this listing with these filters.
    """
    if not token:
        return ""
    try:
        padded = token + "=" * (-len(token) % 4)
        last_key = base64.b64decode(padded, altchars=b"-_", validate=True)[_DIGEST_BYTES:].decode()
    except (binascii.Error, ValueError):
        last_key = ""
    if not last_key or make_token(listing, filters, last_key) != token:  # base64 can spell the same bytes in other ways
        rule = "must be the next_page_token of a page of the same request; only page_size may change"
        raise InvalidRequest((Violation("page_token", rule),))
    return last_key


def _digest(listing: str, filters: Mapping[str, object], last_key: str) -> bytes:
    text = json.dumps([listing, filters, last_key], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]

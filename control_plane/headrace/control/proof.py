"""Proof that a call comes from one who has the fleet's secret; the secret itself is never sent.

    headrace-proof: {Unix time, ms}.{HMAC-SHA256 of the method and that time, hex}

A proof is good for one method and for WINDOW_S around its time. It says nothing of the request's content: who can read
and write on the network can use one again in that time.

Sans-io.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

HEADER = "headrace-proof"
WINDOW_S = 120
SECRET_CHARS_MIN = 32
_PROOF = re.compile(r"([0-9]{1,15})\.([0-9a-f]{64})", re.ASCII)


class BadSecret(ValueError):
    """A secret cannot be used; the text says why, without it."""


def secrets_in(text: str) -> tuple[str, ...]:
    """The secrets of a file, one a line: calls are proven with the first, and each is accepted, so that a new one can
    be brought in beside the old one.

    Raises:
        BadSecret: there is none, or one is too short.
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        secret = line.strip()
        if secret and len(secret) < SECRET_CHARS_MIN:
            raise BadSecret(f"line {number} has less than {SECRET_CHARS_MIN} characters")
        if secret:
            found.append(secret)
    if not found:
        raise BadSecret("it is empty")
    return tuple(found)


def prove(secret: str, method: str, now_ms: int) -> str:
    """The value of HEADER for a call of `method`, "/package.Service/Method"."""
    return f"{now_ms}.{_mac(secret, method, now_ms)}"


def fault(values: Sequence[str | bytes], secrets: Sequence[str], method: str, now_ms: int) -> str:
    """What is wrong with the proof of a call, as its caller may be told; "" if nothing is.

    Args:
        values: of all the call's HEADER metadata.
        secrets: those that are accepted.
        method: that is called.
        now_ms: Unix time.
    """
    if len(values) != 1:
        return f"The call must be proven, by one {HEADER}."
    found = _PROOF.fullmatch(values[0]) if isinstance(values[0], str) else None
    if found is None:
        return f"{HEADER} has another form."
    told_ms = int(found.group(1))
    # All of them, whichever is right: what a comparison could tell by its time is of the digest, not of the secret.
    right = [hmac.compare_digest(_mac(secret, method, told_ms), found.group(2)) for secret in secrets]
    if not any(right):
        return "The call is proven with another secret, or for another method."
    if abs(now_ms - told_ms) > WINDOW_S * 1000:
        ago_s = (now_ms - told_ms) / 1000
        return f"The call was proven {ago_s:.0f} s ago by this clock; at most {WINDOW_S} s may differ."
    return ""


def _mac(secret: str, method: str, now_ms: int) -> str:
    text = b"headrace proof 1\0%s\0%d" % (method.encode(), now_ms)
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()

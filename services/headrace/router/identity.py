"""Whose call it is: a key, a client certificate, what a trusted proxy says, or nobody's.

    tenant_metadata        (where the settings name it) the proxy in front has checked the caller: its word counts
    authorization: Bearer  a key; one that is sent must be good
    client certificate     its names, where the port asks for certificates
    nothing                tenants/anonymous, unless `authentication` is "required"

Keys are looked up by their SHA-256: what a comparison could tell by its time is of the digest, not of the key. Nothing
that a caller sends as a credential is logged or repeated in an error.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.control.errors import Failure, Reason
from headrace.control.tenants import ANONYMOUS, Tenant, key_digest, unlimited
from headrace.router.routes import Routes
from headrace.router.settings import RouterSettings
from headrace.rpc.calls import Context

SCHEME = "bearer "
NAME_MAX = 63
"""Characters of a tenant's name that a proxy may give, "tenants/" not counted."""
_KEY_MAX = 512


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call it is."""

    tenant: Tenant
    by: Literal["key", "certificate", "proxy", "nothing"]
    """What showed it."""
    key: str = ""
    """Name of the key, "tenants/{t}/keys/{k}"."""


NOBODY = Caller(unlimited(ANONYMOUS), "nothing")
"""Who calls without credentials, where no such tenant is registered."""


class Identities:
    """Tells callers apart.

    Args:
        settings: what is asked of callers.
        routes: has the snapshot in use, and knows whether it is past its hard age.
        now_ms: Unix time in milliseconds, for the end of keys.
    """

    def __init__(
        self,
        settings: RouterSettings,
        routes: Routes,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._is_required = settings.authentication == "required"
        self._proxy_key = settings.tenant_metadata
        self._has_certificates = bool(settings.tls_client_ca)
        self._routes = routes
        self._now_ms = now_ms

    def caller(self, context: Context, *, starts: bool = False) -> Caller:
        """Whose call this is.

        Args:
            context: of the call.
            starts: whether it starts something new. Past the snapshot's hard age a revocation may have been missed:
                then credentials start nothing, whatever `past_hard_age` says; what runs may be read and cancelled.

        Raises:
            Failure: UNAUTHENTICATED; PERMISSION_DENIED: its certificate is of two tenants; NO_SNAPSHOT,
                SNAPSHOT_TOO_OLD: it cannot be told.
        """
        found = self._found(context)
        if starts and found.by in ("key", "certificate") and self._routes.is_too_old():
            raise Failure(
                Reason.SNAPSHOT_TOO_OLD,
                "This Router has not heard the store for too long to trust credentials; use another Router.",
            )
        if self._is_required and found.by == "nothing":
            raise Failure(
                Reason.UNAUTHENTICATED,
                "The call has no credentials; send metadata `authorization: Bearer KEY`, or a client certificate that "
                "a tenant names.",
            )
        return found

    def check_known(self, context: Context) -> None:
        """Refuse a caller without credentials, also where calls without are taken.

        Raises:
            Failure: as `caller`.
        """
        if self.caller(context).by == "nothing":
            raise Failure(Reason.UNAUTHENTICATED, "Health and reflection answer callers with credentials only.")

    def _found(self, context: Context) -> Caller:
        metadata = context.invocation_metadata() or ()
        if self._proxy_key:
            said = [value for name, value in metadata if name == self._proxy_key]
            if said:
                return self._of_proxy(said)
        sent = [value for name, value in metadata if name == "authorization"]
        if sent:
            return self._of_key(sent)
        if self._has_certificates:
            tenant = self._of_certificate(context.auth_context())
            if tenant is not None:
                return Caller(tenant, "certificate")
        snapshot = self._routes.snapshot
        anonymous = snapshot.tenant_by_name.get(ANONYMOUS) if snapshot is not None else None
        return Caller(anonymous, "nothing") if anonymous is not None else NOBODY

    def _of_proxy(self, said: Sequence[str | bytes]) -> Caller:
        name = said[0].removeprefix("tenants/") if isinstance(said[0], str) else ""
        if len(said) != 1 or not 0 < len(name) <= NAME_MAX or not name.isprintable():
            text = f"The metadata {self._proxy_key} must name one tenant, in 1 to {NAME_MAX} characters."
            raise Failure(Reason.UNAUTHENTICATED, text)
        full, snapshot = f"tenants/{name}", self._routes.snapshot
        tenant = snapshot.tenant_by_name.get(full) if snapshot is not None else None
        if tenant is None and self._is_required:
            if snapshot is None:
                raise _no_snapshot()
            raise Failure(Reason.UNAUTHENTICATED, "The tenant that the proxy names is not registered.")
        return Caller(tenant or unlimited(full), "proxy")

    def _of_key(self, sent: Sequence[str | bytes]) -> Caller:
        text = sent[0]
        secret = text[len(SCHEME) :].strip() if isinstance(text, str) and text[: len(SCHEME)].lower() == SCHEME else ""
        if len(sent) != 1 or not 0 < len(secret) <= _KEY_MAX:
            raise Failure(Reason.UNAUTHENTICATED, "The metadata authorization must be `Bearer KEY`, once.")
        snapshot = self._routes.snapshot
        if snapshot is None:
            raise _no_snapshot()
        digest = key_digest(secret)
        tenant, key = snapshot.tenant_by_key_digest.get(digest, (None, None))
        if tenant is None or key is None or not hmac.compare_digest(key.sha256, digest):
            raise Failure(Reason.UNAUTHENTICATED, "The key is not known; operators make one: `headrace tenant key`.")
        if key.is_expired(self._now_ms()):
            raise Failure(Reason.UNAUTHENTICATED, "The key has expired.", metadata={"key": key.name})
        if snapshot.is_revoked(key.name):
            raise Failure(Reason.UNAUTHENTICATED, "The key was revoked.", metadata={"key": key.name})
        return Caller(tenant, "key", key.name)

    def _of_certificate(self, seen: Mapping[str, Any]) -> Tenant | None:
        """Whose certificate it is: by the URIs and DNS names in it, or by the common name if it has neither."""
        found = certificate_names(seen)
        if not found:
            return None
        snapshot = self._routes.snapshot
        if snapshot is None:
            raise _no_snapshot()
        tenants = {t.name: t for name in found if (t := snapshot.tenant_by_certificate.get(name)) is not None}
        if len(tenants) > 1:
            raise Failure(
                Reason.PERMISSION_DENIED,
                "The client certificate has names of more than one tenant.",
                metadata={"tenants": ",".join(sorted(tenants))},
            )
        return next(iter(tenants.values()), None)


def certificate_names(seen: Mapping[str, Any]) -> list[str]:
    """Names in a client certificate that can be a tenant's, of gRPC's auth context."""
    for kinds in (("peer_uri", "peer_dns"), ("x509_common_name",)):
        found = [raw.decode("utf-8", "replace") for kind in kinds for raw in seen.get(kind, ())]
        if found:
            return found
    return []


def _no_snapshot() -> Failure:
    return Failure(
        Reason.NO_SNAPSHOT, "This Router has no routing snapshot yet, so it knows no tenants; try again shortly."
    )

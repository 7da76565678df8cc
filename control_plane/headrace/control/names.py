"""Resource names: one spelling, checked in one place.

    models/{m}/revisions/{digest12}    aliases/{a}    artifacts/{digest12}
    replicas/{r}    requests/{r}    routers|schedulers|registries/{s}

Sans-io.
"""

from __future__ import annotations

import re

from headrace.control.errors import InvalidRequest, Violation

_ID = re.compile(r"[a-z]([a-z0-9.-]{0,61}[a-z0-9])?")
_DIGEST12 = re.compile(r"[0-9a-f]{12}")

ID_RULE = "1 to 63 characters of a-z, 0-9, '-' and '.', beginning with a letter and not ending in '-' or '.'"


def is_id(text: str) -> bool:
    """Whether `text` can be the last part of a name."""
    return _ID.fullmatch(text) is not None


def parse(name: str, collection: str, *, field: str = "name") -> str:
    """Return the id in "collection/id".

    Raises:
        InvalidRequest: `name` is not of that form.
    """
    head, _, tail = name.partition("/")
    wants_digest = collection == "artifacts"
    good = _DIGEST12.fullmatch(tail) if wants_digest else _ID.fullmatch(tail)
    if head != collection or good is None:
        rule = "12 hex digits" if wants_digest else ID_RULE
        raise InvalidRequest((Violation(field, f"must be {collection}/ID, where ID is {rule}"),))
    return tail


def parse_revision(name: str, *, field: str = "revision") -> tuple[str, str]:
    """Return (model id, digest12) of "models/{m}/revisions/{digest12}".

    Raises:
        InvalidRequest: `name` is not of that form.
    """
    parts = name.split("/")
    if (
        len(parts) == 4
        and (parts[0], parts[2]) == ("models", "revisions")
        and is_id(parts[1])
        and _DIGEST12.fullmatch(parts[3])
    ):
        return parts[1], parts[3]
    raise InvalidRequest((Violation(field, "must be models/MODEL/revisions/DIGEST12"),))


def revision(model: str, digest: str) -> str:
    """Name of the revision of `model` (an id) with this hex digest."""
    return f"models/{model}/revisions/{digest[:12]}"


def artifact(digest: str) -> str:
    """Name of the artifact with this hex digest."""
    return f"artifacts/{digest[:12]}"


def id_from_text(text: str) -> str:
    """Make an id out of any text, for a file's name: "Gemma 3_270M.gguf" -> "gemma-3-270m.gguf"."""
    cleaned = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    cleaned = re.sub(r"^[^a-z]+", "", cleaned)[:63].rstrip("-.")
    return cleaned or "model"

"""Aliases of the RegistryService: what clients change, so each write is over a state that was read."""

from __future__ import annotations

import dataclasses
from typing import Any

from google.protobuf.message import DecodeError

from headrace.adapters import route_codec
from headrace.api.registry.v1 import registry_service_pb2 as pb
from headrace.api.registry.v1 import resources_pb2
from headrace.control import names
from headrace.control.errors import Failure, Reason
from headrace.control.resources import Alias
from headrace.registry.audit import Change
from headrace.registry.catalogue import revision_key
from headrace.registry.checks import checked_alias, checked_filter
from headrace.registry.records import TRIES, Listed, Records, busy, not_found, to_bytes
from headrace.runtime.ports import Compare, KeyValue, Put


class AliasCalls(Records):
    """The methods that are about aliases."""

    async def SetAlias(self, request: pb.SetAliasRequest, context: Any) -> pb.SetAliasResponse:  # noqa: N802
        """Write an alias; with an etag only over that state of it. What is set already is not written again."""
        alias = checked_alias(request.alias, self._now_ms())
        stored = dataclasses.replace(alias, etag="")
        value = to_bytes(route_codec.alias_to_proto(stored))
        targets = [Compare(revision_key(target.revision), exists=True) for target in alias.targets]
        for _ in range(TRIES):
            found = await self._store.get(alias.name)
            check_etag(alias.name, alias.etag, found)
            before = _read_or_none(found)
            if found is not None and before is not None and _says_the_same(before, stored):
                return pb.SetAliasResponse(alias=before)
            state = Compare(alias.name, mod_revision=found.mod_revision if found else 0)
            change = Change("SetAlias", alias.name, before, route_codec.alias_to_proto(stored))
            done = await self._commit(context, change, [*targets, state], [Put(alias.name, value)])
            if done.succeeded:
                made = dataclasses.replace(alias, etag=str(done.revision))
                return pb.SetAliasResponse(alias=route_codec.alias_to_proto(made))
            for index, target in enumerate(alias.targets):
                if await self._store.get(revision_key(target.revision)) is None:
                    raise not_found(target.revision, f"alias.targets[{index}].revision")
        raise busy(alias.name)

    async def DeleteAlias(self, request: pb.DeleteAliasRequest, context: Any) -> pb.DeleteAliasResponse:  # noqa: N802
        """Delete an alias; with an etag only that state of it."""
        names.parse(request.name, "aliases")
        for _ in range(TRIES):
            found = await self._store.get(request.name)
            if found is None:
                raise not_found(request.name)
            check_etag(request.name, request.etag, found)
            same = Compare(request.name, mod_revision=found.mod_revision)
            change = Change("DeleteAlias", request.name, _read_or_none(found), None)
            if (await self._commit(context, change, [same], deletes=[request.name])).succeeded:
                return pb.DeleteAliasResponse()
        raise busy(request.name)

    async def ListAliases(self, request: pb.ListAliasesRequest, context: Any) -> pb.ListAliasesResponse:  # noqa: N802
        """List by name."""
        labels = checked_filter(request.labels)
        found, token = await self._list(request, Listed("ListAliases", "aliases/", read_alias, labels=labels))
        return pb.ListAliasesResponse(aliases=found, next_page_token=token)


def check_etag(name: str, etag: str, found: KeyValue | None) -> None:
    """Refuse to write over another state than the one that was read.

    Raises:
        Failure: ETAG_MISMATCH.
    """
    if etag and (found is None or etag != str(found.mod_revision)):
        raise Failure(
            Reason.ETAG_MISMATCH,
            f"{name} is not in the state that the etag stands for; read it again and repeat the change.",
            metadata={"resourceName": name},
        )


def read_alias(found: KeyValue) -> resources_pb2.Alias:
    """A stored alias; its etag is the revision of its last write.

    Raises:
        DecodeError: it is none.
    """
    message = resources_pb2.Alias.FromString(found.value)
    message.etag = str(found.mod_revision)
    return message


def _read_or_none(found: KeyValue | None) -> resources_pb2.Alias | None:
    """A damaged alias is as good as none: it is written over."""
    try:
        return None if found is None else read_alias(found)
    except DecodeError:
        return None


def _says_the_same(stored: resources_pb2.Alias, wanted: Alias) -> bool:
    said = route_codec.alias_from_proto(stored)
    return (said.name, said.targets, said.labels) == (wanted.name, wanted.targets, wanted.labels)

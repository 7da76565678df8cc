"""A mutation: what is broken, and which laws have to notice. Modules of mutations register theirs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True, slots=True)
class Mutation:
    """`changes` are (class, name of its attribute, what it becomes)."""

    name: str
    changes: tuple[tuple[type, str, Any], ...]
    laws: frozenset[str]
    """One of these has to be the first that is broken."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The classes, broken."""
        with ExitStack() as stack:
            for owner, name, value in self.changes:
                stack.enter_context(patch.object(owner, name, value))
            yield


MUTATIONS: list[Mutation] = []


def breaks(owner: type, attribute: str, *laws: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as what `attribute` becomes; its name is the mutation's."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        MUTATIONS.append(Mutation(function.__name__, ((owner, attribute, function),), frozenset(laws)))
        return function

    return register

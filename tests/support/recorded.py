"""Recorded signatures, and calls that take exactly what was recorded."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "engine" / "recorded"
_KINDS = {"positional": inspect.Parameter.POSITIONAL_OR_KEYWORD, "keyword": inspect.Parameter.KEYWORD_ONLY}


@lru_cache
def record(engine: str) -> dict[str, Any]:
    """What was recorded of an engine."""
    document: dict[str, Any] = json.loads((FOLDER / f"{engine}.json").read_text(encoding="utf-8"))
    return document


@lru_cache
def signature(engine: str, symbol: str) -> inspect.Signature:
    """A recorded signature; a default is its source text, and only tells that there is one."""
    parameters = []
    for one in record(engine)["symbols"][symbol]["parameters"]:
        if one["kind"] == "rest":
            kind = inspect.Parameter.VAR_KEYWORD if one["name"] == "**" else inspect.Parameter.VAR_POSITIONAL
            parameters.append(inspect.Parameter("rest" if one["name"] == "**" else "more", kind))
        else:
            default = inspect.Parameter.empty if one["default"] is None else one["default"]
            parameters.append(inspect.Parameter(one["name"], _KINDS[one["kind"]], default=default))
    required = [one for one in parameters if one.default is one.empty]
    optional = [one for one in parameters if one.default is not one.empty]
    return inspect.Signature(sorted([*required, *optional], key=lambda one: one.kind))


def bound(engine: str, symbol: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments by name; raises `TypeError` for what the recorded signature does not take."""
    return dict(signature(engine, symbol).bind(*args, **kwargs).arguments)


def as_recorded(engine: str, symbol: str) -> Callable[[Callable[..., Any]], Any]:
    """A method of a fake that refuses what was not recorded, and shows the recorded signature."""

    def wrap(call: Callable[..., Any]) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return call(self, **bound(engine, symbol, *args, **kwargs))

        own = signature(engine, symbol)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        method.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
        method.__name__ = call.__name__
        return method

    return wrap


class Recorded:
    """A fake's class whose instances hold what they were made with. Subclasses set `RECORD`."""

    RECORD: tuple[str, str]

    def __init_subclass__(cls) -> None:
        cls.__signature__ = signature(*cls.RECORD)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = bound(*self.RECORD, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "given":
            raise AttributeError(name)
        return self.given.get(name)

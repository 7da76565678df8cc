"""What a callable of an engine takes: releases differ, and each is asked at start instead of being remembered."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from headrace.engine.config import ConfigError


@functools.lru_cache(maxsize=64)
def parameters(call: Callable[..., Any]) -> frozenset[str] | None:
    """The names that can be given as keywords; None where everything is taken."""
    names = set()
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return None
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            names.add(parameter.name)
    return frozenset(names)


def supported(call: Callable[..., Any], needed: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `call`: all of `needed`, and of `wanted` those that this release takes.

    Raises `ConfigError` where a needed one is not taken: without it an answer would mean something else.
    """
    known = parameters(call)
    if known is None:
        return {**needed, **wanted}
    missing = sorted(set(needed) - known)
    if missing:
        name = getattr(call, "__qualname__", type(call).__name__)
        raise ConfigError(
            f"This release's {name} does not take {', '.join(missing)}; docs/engines.md names the tested ones."
        )
    return {**needed, **{name: value for name, value in wanted.items() if name in known}}

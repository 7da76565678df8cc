"""Whole numbers between two bounds, as a part of an automaton."""

from __future__ import annotations

from headrace.engine.automaton import Builder, Fragment

DIGITS_MAX = 18
_LIMIT = 10**DIGITS_MAX - 1


def digits(builder: Builder, count: int) -> Fragment:
    """A whole number without a sign, of at most `count` digits, and no needless zero before it."""
    more = builder.repeat(lambda: _digit(builder, 0, 9), 0, count - 1)
    return builder.either([builder.literal("0"), builder.sequence(_digit(builder, 1, 9), more)])


def integer_between(builder: Builder, low: int | None, high: int | None) -> Fragment | None:
    """A whole number from `low` to `high`, of at most `DIGITS_MAX` digits; None where there is none."""
    low = -_LIMIT if low is None else max(low, -_LIMIT)
    high = _LIMIT if high is None else min(high, _LIMIT)
    if low > high:
        return None
    parts = []
    if high >= 0:
        parts += [_pattern(builder, one) for one in patterns(max(low, 0), high)]
    if low < 0:
        below = [_pattern(builder, one) for one in patterns(max(-high, 1), -low)]
        parts.append(builder.sequence(builder.literal("-"), builder.either(below)))
    return builder.either(parts)


def patterns(low: int, high: int) -> list[list[tuple[int, int]]]:
    """The numbers from `low` to `high`, 0 or more, as sequences of ranges of digits."""
    found = []
    for count in range(len(str(low)), len(str(high)) + 1):
        least = 10 ** (count - 1) if count > 1 else 0
        found += _same_length(max(low, least), min(high, 10**count - 1))
    return found


def _same_length(low: int, high: int) -> list[list[tuple[int, int]]]:
    for tail in range(1, len(str(low))):
        size = 10**tail
        if low // size != high // size:
            if low % size:
                edge = low - low % size + size
                return _same_length(low, edge - 1) + _same_length(edge, high)
            if high % size != size - 1:
                edge = high - high % size
                return _same_length(low, edge - 1) + _same_length(edge, high)
    return [[(int(a), int(b)) for a, b in zip(str(low), str(high), strict=True)]]


def _pattern(builder: Builder, ranges: list[tuple[int, int]]) -> Fragment:
    return builder.sequence(*[_digit(builder, low, high) for low, high in ranges])


def _digit(builder: Builder, low: int, high: int) -> Fragment:
    return builder.bytes_in(sum(1 << 0x30 + digit for digit in range(low, high + 1)))

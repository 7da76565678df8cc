"""Which bytes may follow: a recogniser of answers, built from parts, that does bounded work for each byte.

`Builder` puts an automaton together: states with transitions over bytes, and rules that call each other, so that what
is nested can be recognised. `Matcher` walks it; it keeps all ways in which the bytes so far can be read, each a state
and a stack of places to return to. What was worked out once is remembered, so that a text costs a look-up a byte.

Sans-io. Nothing here knows what a token or a schema is. An automaton that is too large, or that can read a text in too
many ways, is refused or given up: whoever wrote it must not be able to stop the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

STATES_MAX = 20_000
CONFIGURATIONS_MAX = 1024
"""Ways to read a text that are kept at a time, and looked at for one byte."""
MEMORY_MAX = 20_000
"""Sets of ways that a matcher remembers."""
DEAD = -1
ANY_BYTE = (1 << 256) - 1
CHARACTER_MAX = 0x10FFFF

Fragment = tuple[int, int]
"""Where a part begins and where it ends."""
Ranges = tuple[tuple[int, int], ...]
"""Characters, by code point, both ends included."""


class TooLarge(Exception):
    """The automaton has too many states, or reads a text in too many ways."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """By state: transitions (a set of bytes as bits, where to), free moves, calls (rule, where to return).

    A rule has a beginning and an end; rule 0 is the whole answer.
    """

    moves: Sequence[Sequence[tuple[int, int]]]
    skips: Sequence[Sequence[int]]
    calls: Sequence[Sequence[tuple[int, int]]]
    rules: Sequence[Fragment]
    ends: frozenset[int]


class Builder:
    """Makes an automaton. A fragment is used once; `rule` is for what is used again, or refers to itself.

    Raises `TooLarge` from whatever adds a state.
    """

    def __init__(self) -> None:
        self._moves: list[list[tuple[int, int]]] = []
        self._skips: list[list[int]] = []
        self._calls: list[list[tuple[int, int]]] = []
        self._rules: list[Fragment] = []
        self._names: dict[object, int] = {}
        self.reserve("answer")

    def build(self, whole: Fragment) -> Automaton:
        """The automaton whose answers are those of `whole`."""
        self.define("answer", whole)
        ends = frozenset(end for _, end in self._rules)
        return Automaton(self._moves, self._skips, self._calls, self._rules, ends)

    # Rules

    def knows(self, name: object) -> bool:
        """Whether there is a rule of that name."""
        return name in self._names

    def reserve(self, name: object) -> None:
        """A rule that can be called before it is defined."""
        self._names[name] = len(self._rules)
        self._rules.append((self.place(), self.place()))

    def define(self, name: object, body: Fragment) -> None:
        """What a reserved rule is."""
        begin, end = self._rules[self._names[name]]
        self.link(begin, body[0])
        self.link(body[1], end)

    def rule(self, name: object, make: Callable[[], Fragment]) -> Fragment:
        """A call of the rule, which is made where it is not known."""
        if name not in self._names:
            self.reserve(name)
            self.define(name, make())
        return self.call(name)

    def call(self, name: object) -> Fragment:
        """A call of a rule that is known."""
        begin, end = self.place(), self.place()
        self._calls[begin].append((self._names[name], end))
        return begin, end

    # Parts

    def bytes_in(self, allowed: int) -> Fragment:
        """One byte of a set."""
        begin, end = self.place(), self.place()
        self._moves[begin].append((allowed, end))
        return begin, end

    def literal(self, text: str | bytes) -> Fragment:
        """Exactly this."""
        begin = end = self.place()
        for byte in text.encode() if isinstance(text, str) else text:
            after = self.place()
            self._moves[end].append((1 << byte, after))
            end = after
        return begin, end

    def literals(self, texts: Iterable[bytes]) -> Fragment:
        """One of these; what they begin with alike is shared."""
        begin, end = self.place(), self.place()
        known: dict[bytes, int] = {b"": begin}
        for text in dict.fromkeys(texts):
            for size in range(1, len(text) + 1):
                if text[:size] not in known:
                    known[text[:size]] = self.place()
                    self._moves[known[text[: size - 1]]].append((1 << text[size - 1], known[text[:size]]))
            self.link(known[text], end)
        return begin, end

    def character(self, ranges: Ranges) -> Fragment:
        """One character of some ranges, as UTF-8."""
        if ranges and ranges[-1][1] < 0x80:
            return self.bytes_in(_bits(ranges))
        return self.rule(("character", ranges), lambda: self._wide(ranges))

    def _wide(self, ranges: Ranges) -> Fragment:
        begin, end = self.place(), self.place()
        for low, high in ranges:
            for sequence in utf8_ranges(low, high):
                at = begin
                for first, last in sequence[:-1]:
                    after = self.place()
                    self._moves[at].append((_bits(((first, last),)), after))
                    at = after
                self._moves[at].append((_bits((sequence[-1],)), end))
        return begin, end

    def sequence(self, *parts: Fragment) -> Fragment:
        """One after the other."""
        begin = end = self.place()
        for part in parts:
            self.link(end, part[0])
            end = part[1]
        return begin, end

    def either(self, parts: Iterable[Fragment]) -> Fragment:
        """Any one of them."""
        begin, end = self.place(), self.place()
        for part in parts:
            self.join(begin, part, end)
        return begin, end

    def repeat(self, make: Callable[[], Fragment], low: int, high: int | None) -> Fragment:
        """`low` to `high` of what `make` makes anew each time; None: any number."""
        begin = end = self.place()
        for _ in range(low):
            part = make()
            self.link(end, part[0])
            end = part[1]
        if high is None:
            part = make()
            after = self.place()
            self.link(end, after)
            self.link(after, part[0])
            self.link(part[1], after)
            return begin, after
        last = self.place()
        for _ in range(high - low):
            self.link(end, last)
            part = make()
            self.link(end, part[0])
            end = part[1]
        self.link(end, last)
        return begin, last

    def optional(self, part: Fragment) -> Fragment:
        """It, or nothing."""
        self.link(*part)
        return self.sequence(part)

    def link(self, origin: int, target: int) -> None:
        """A free move."""
        self._skips[origin].append(target)

    def join(self, origin: int, part: Fragment, target: int) -> None:
        """From one place to another by way of a part."""
        self.link(origin, part[0])
        self.link(part[1], target)

    def place(self) -> int:
        """A new state."""
        if len(self._moves) >= STATES_MAX:
            raise TooLarge
        self._moves.append([])
        self._skips.append([])
        self._calls.append([])
        return len(self._moves) - 1


def _bits(ranges: Iterable[tuple[int, int]]) -> int:
    return sum((1 << high + 1) - (1 << low) for low, high in ranges)


def utf8_ranges(low: int, high: int) -> list[list[tuple[int, int]]]:
    """The characters from `low` to `high` as sequences of ranges of bytes; no surrogates, which UTF-8 has not."""
    if low <= 0xDFFF and high >= 0xD800:
        before = utf8_ranges(low, 0xD7FF) if low < 0xD800 else []
        return before + (utf8_ranges(0xE000, high) if high > 0xDFFF else [])
    for edge in (0x7F, 0x7FF, 0xFFFF):  # of one length in bytes
        if low <= edge < high:
            return utf8_ranges(low, edge) + utf8_ranges(edge + 1, high)
    first, last = chr(low).encode(), chr(high).encode()
    for tail in range(1, len(first)):  # of ranges that are whole in their last bytes
        size = 1 << 6 * tail
        if low // size != high // size:
            if low % size:
                return utf8_ranges(low, low | size - 1) + utf8_ranges((low | size - 1) + 1, high)
            if high % size != size - 1:
                return utf8_ranges(low, high - high % size - 1) + utf8_ranges(high - high % size, high)
    return [list(zip(first, last, strict=True))]


Configuration = tuple[int, int]


class Matcher:
    """All ways to read one text. A state of it is a number; `DEAD` is that of a text that cannot be one any more.

    `work` counts what was looked at since it was last set to 0; beyond `work_max`, `TooLarge` is raised.
    """

    def __init__(self, automaton: Automaton, work_max: int) -> None:
        self._automaton = automaton
        self._work_max = work_max
        self.work = 0
        self._stacks: list[tuple[int, int]] = [(-1, -1)]
        self._stack_ids: dict[tuple[int, int], int] = {}
        self._clear()
        self.start = self._keep([(automaton.rules[0][0], 0)])

    def _clear(self) -> None:
        self._sets: list[tuple[Configuration, ...]] = []
        self._accepting: list[bool] = []
        self._ids: dict[tuple[frozenset[Configuration], bool], int] = {}
        self._next: dict[int, int] = {}
        self._first: dict[int, int] = {}

    def tidy(self, state: int) -> int:
        """Forgets what it remembers where that is much; the number that `state` has from then on."""
        if len(self._sets) < MEMORY_MAX:
            return state
        kept, accepting = self._sets[state], self._accepting[state]
        self._clear()
        return self._number(frozenset(kept), accepting)

    def count(self, work: int) -> None:
        """So much more was looked at. Raises `TooLarge`."""
        self.work += work
        if self.work > self._work_max:
            raise TooLarge

    def accepts(self, state: int) -> bool:
        """Whether the text may end here."""
        return self._accepting[state]

    def first_bytes(self, state: int) -> int:
        """The bytes that may follow, as bits."""
        known = self._first.get(state)
        if known is None:
            known = 0
            for at, _ in self._sets[state]:
                for allowed, _ in self._automaton.moves[at]:
                    known |= allowed
            self._first[state] = known
        return known

    def advance(self, state: int, data: bytes) -> int:
        """The state behind `data`, or `DEAD`."""
        known = self._next
        for byte in data:
            key = state << 8 | byte
            found = known.get(key)
            if found is None:
                found = self._step(state, byte)
                known[key] = found
            if found < 0:
                return DEAD
            state = found
        return state

    def _step(self, state: int, byte: int) -> int:
        moves = self._automaton.moves
        seed = [
            (target, stack) for at, stack in self._sets[state] for allowed, target in moves[at] if allowed >> byte & 1
        ]
        return self._keep(seed) if seed else DEAD

    def _keep(self, seed: Iterable[Configuration]) -> int:
        """What can be reached for free from the seed, as a set with a number."""
        automaton = self._automaton
        todo = list(seed)
        seen = set(todo)
        kept = set()
        accepting = False
        while todo:
            if len(seen) > CONFIGURATIONS_MAX:
                raise TooLarge
            configuration = todo.pop()
            at, stack = configuration
            if automaton.moves[at]:
                kept.add(configuration)
            reached = [(target, stack) for target in automaton.skips[at]]
            for rule, after in automaton.calls[at]:
                reached.append((automaton.rules[rule][0], self._stack(after, stack)))
            if at in automaton.ends:
                if stack:
                    reached.append(self._stacks[stack])
                else:
                    accepting = True
            for one in reached:
                if one not in seen:
                    seen.add(one)
                    todo.append(one)
        self.count(len(seen))
        return self._number(frozenset(kept), accepting)

    def _number(self, kept: frozenset[Configuration], accepting: bool) -> int:
        found = self._ids.get((kept, accepting))
        if found is None:
            found = len(self._sets)
            self._ids[kept, accepting] = found
            self._sets.append(tuple(kept))
            self._accepting.append(accepting)
        return found

    def _stack(self, after: int, parent: int) -> int:
        """The number of a stack; one entry is (where to return, the stack below)."""
        found = self._stack_ids.get((after, parent))
        if found is None:
            found = len(self._stacks)
            self._stacks.append((after, parent))
            self._stack_ids[after, parent] = found
        return found

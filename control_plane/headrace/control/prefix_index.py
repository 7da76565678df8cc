"""Which replica keeps the beginning of which prompts: chained hashes of blocks, learned from where requests went.

Equal hashes mean equal text from the first block on, for one tenant, revision and adapter: the salt keeps others apart,
as the engines do. A Router does not tokenize, so a block is some token ids where the request has ids, and some bytes of
its text otherwise. What is remembered is a guess at another process's cache: engines say how much of each prompt they
had, and the guess is cut back to that. A wrong guess costs a cache hit, never correctness. So the hash is Python's own
of bytes, 64 bits with a secret of this process: nobody else reads it, and hashing is most of what a long prompt costs a
Router before it is sent on.

Sans-io.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice

BLOCK_BYTES = 256
BLOCK_TOKENS = 64
BLOCKS_PER_PROMPT = 256
"""What is behind them is not looked at."""

BLOCKS_PER_REPLICA = 4096
BLOCKS_MAX = 400_000
"""Over all replicas; those used longest ago forget first."""
ASKED_MAX = 32
"""Keepers of one beginning that are looked at for one that may take a request."""

_LEARN = 0.2
_TRUST = 0.8
"""Belief in a guess, until engines have answered."""

_DOUBT = 0.1
"""Below this a replica is not believed to keep anything."""


def salt(tenant: str, revision: str, adapter: str = "") -> int:
    """What a chain of hashes begins with."""
    return hash((tenant, revision, adapter))


def text_blocks(parts: Iterable[bytes], chain: int, *, size: int = BLOCK_BYTES) -> tuple[int, ...]:
    """Hashes of the whole blocks of a text that is laid end to end; its last, shorter part has none."""
    found: list[int] = []
    rest = b""
    for part in parts:
        rest = rest + part if rest else part
        whole = min(len(rest) // size, BLOCKS_PER_PROMPT - len(found)) * size
        for at in range(0, whole, size):
            chain = hash((chain, rest[at : at + size]))
            found.append(chain)
        if len(found) == BLOCKS_PER_PROMPT:
            break
        rest = rest[whole:]
    return tuple(found)


def token_blocks(ids: Sequence[int], chain: int, *, size: int = BLOCK_TOKENS) -> tuple[int, ...]:
    """Hashes of the whole blocks of token ids."""
    packed = array("i", ids[: size * BLOCKS_PER_PROMPT])  # as bytes: Python hashes those with a secret, numbers not
    return text_blocks((packed.tobytes(),), chain, size=size * packed.itemsize)


class _Shelf:
    """Blocks of one replica, the ones used longest ago first; of a prompt's blocks the last first."""

    __slots__ = ("blocks", "trust")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.trust = _TRUST


class PrefixIndex:
    """Guesses of one Router, bounded by replica and over all."""

    def __init__(self, blocks_max: int = BLOCKS_MAX, blocks_per_replica: int = BLOCKS_PER_REPLICA) -> None:
        self._blocks_max = blocks_max
        self._per_replica = blocks_per_replica
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        """Replicas, the one used longest ago first."""
        self._holders: dict[int, dict[str, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def keeper(self, blocks: tuple[int, ...], may_take: Callable[[str], bool] | None = None) -> str:
        """The replica that keeps the longest beginning of a prompt: the latest to use it that may take the request.

        Args:
            blocks: of the prompt.
            may_take: asked of the latest first, of `ASKED_MAX` at most; None: each may.

        Returns:
            "": none keeps any of it, or none that does may.
        """
        holders = self._holders
        if not blocks or blocks[0] not in holders:
            return ""
        found = holders.get(blocks[-1])  # all of it: the usual end of a search, and much the dearest
        if found is None:
            low, high = 1, len(blocks)
            while low < high:
                middle = (low + high + 1) // 2
                if blocks[middle - 1] in holders:
                    low = middle
                else:
                    high = middle - 1
            found = holders[blocks[low - 1]]
        return next(filter(may_take, islice(reversed(found), ASKED_MAX)), "")

    def keepers(self, blocks: tuple[int, ...]) -> Container[str]:
        """Replicas that keep any beginning of a prompt; of others `believed` need not be asked."""
        return self._holders.get(blocks[0], ()) if blocks else ()

    def depth(self, replica: str, blocks: tuple[int, ...]) -> int:
        """Blocks of a prompt's beginning that a replica is believed to keep."""
        shelf = self._shelves.get(replica)
        return _depth(shelf.blocks, blocks) if shelf is not None else 0

    def believed(self, replica: str, blocks: tuple[int, ...]) -> float:
        """Blocks of a prompt's beginning that one may count on: the depth, times the trust."""
        shelf = self._shelves.get(replica)
        if shelf is None or shelf.trust < _DOUBT:
            return 0.0
        return _depth(shelf.blocks, blocks) * shelf.trust

    def trust(self, replica: str) -> float:
        """How much of what was expected of a replica's cache came true lately, 0 to 1."""
        shelf = self._shelves.get(replica)
        if shelf is None:
            return _TRUST
        return shelf.trust if shelf.trust >= _DOUBT else 0.0

    def keep(self, replica: str, blocks: tuple[int, ...]) -> None:
        """A replica has computed a prompt, and keeps it."""
        if not blocks:
            return
        shelf = self._shelves.get(replica)
        if shelf is None:
            shelf = self._shelves[replica] = _Shelf()
        self._shelves.move_to_end(replica)
        for block in reversed(blocks):  # the last block goes first: a chain is never without its beginning
            if block in shelf.blocks:
                shelf.blocks.move_to_end(block)
            else:
                shelf.blocks[block] = None
                self._count += 1
            holders = self._holders.setdefault(block, {})
            holders.pop(replica, None)
            holders[replica] = None
        while len(shelf.blocks) > self._per_replica:
            self._drop_oldest(replica, shelf)
        while self._count > self._blocks_max:
            name, oldest = next(iter(self._shelves.items()))
            if oldest.blocks:
                self._drop_oldest(name, oldest)
            else:
                del self._shelves[name]

    def correct(self, replica: str, blocks: tuple[int, ...], expected: int, found_share: float) -> None:
        """An engine said how much of a prompt it had: `found_share` of it, where `expected` blocks were believed.

        What was believed and is gone tells of more: whatever was used before it is gone, too.
        """
        shelf = self._shelves.get(replica)
        if shelf is None or not expected or not blocks:
            return
        found = min(expected, round(found_share * len(blocks)))
        shelf.trust += _LEARN * (found / expected - shelf.trust)
        if found >= expected or (gone := blocks[found]) not in shelf.blocks:
            return
        # Of one prompt the last block is the oldest: those from `found` on go, and all that is older than the first.
        while shelf.blocks:
            if self._drop_oldest(replica, shelf) == gone:
                return

    def size(self, replica: str) -> int:
        """Blocks that a replica is believed to keep."""
        shelf = self._shelves.get(replica)
        return len(shelf.blocks) if shelf is not None else 0

    def fade(self, replica: str, count: int) -> None:
        """Its engine made room: as many of its blocks are gone, those used longest ago."""
        shelf = self._shelves.get(replica)
        while shelf is not None and shelf.blocks and count > 0:
            self._drop_oldest(replica, shelf)
            count -= 1

    def forget(self, replica: str) -> None:
        """It is gone, or another process is behind it, with an empty cache."""
        shelf = self._shelves.pop(replica, None)
        while shelf is not None and shelf.blocks:
            self._drop_oldest(replica, shelf)

    def _drop_oldest(self, replica: str, shelf: _Shelf) -> int:
        block, _ = shelf.blocks.popitem(last=False)
        self._count -= 1
        holders = self._holders[block]
        del holders[replica]
        if not holders:
            del self._holders[block]
        return block


def _depth(kept: Container[int], blocks: tuple[int, ...]) -> int:
    """Blocks of a prompt's beginning that are kept; a chain is never without its beginning."""
    if not blocks or blocks[0] not in kept:
        return 0
    low, high = 1, len(blocks)
    if blocks[-1] in kept:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[middle - 1] in kept:
            low = middle
        else:
            high = middle - 1
    return low

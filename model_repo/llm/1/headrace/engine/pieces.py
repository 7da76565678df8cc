"""Which tokens can go straight out: the table behind the loop's fast path."""

from __future__ import annotations

from collections.abc import Callable


class PieceTable(dict[int, bytes | None]):
    """Each token's bytes where they are whole characters and the token ends nothing; None sends it the slow way.

    Filled as tokens occur: a vocabulary has hundreds of thousands, an engine's life uses a part of them.
    """

    def __init__(self, piece: Callable[[int], bytes], end_tokens: frozenset[int]) -> None:
        super().__init__()
        self._piece = piece
        self._end_tokens = end_tokens
        self[-1] = None  # no token: a guide allows none

    def __missing__(self, token: int) -> bytes | None:
        piece: bytes | None = None if token in self._end_tokens else self._piece(token)
        if piece is not None:
            try:
                piece.decode()
            except UnicodeDecodeError:
                piece = None
        self[token] = piece
        return piece

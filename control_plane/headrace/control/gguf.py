"""The metadata at the head of a GGUF file: keys and values, out of bytes that nobody has vouched for.

    magic, version, tensors, keys | key, type, value | key, type, value | ...

Sans-io. Bounded: work and memory grow with the bytes given, never with a number that stands in them, and
whatever they hold, the outcome is the metadata or `BadGguf`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

HEAD_BYTES_MAX = 64 * 1024 * 1024
"""As much of a file as is read: vocabularies of 262,144 tokens take about 10 MB."""
MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_KEYS_MAX = 10_000
_KEY_BYTES_MAX = 65_535
_STRING_BYTES_MAX = 1024 * 1024
_STRINGS_MAX = 4_000_000

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class BadGguf(ValueError):
    """The bytes are not the head of a GGUF file; the message says what is wrong with them."""


class _Truncated(BadGguf):
    """The bytes end too early."""


@dataclass(frozen=True, slots=True)
class ArraySize:
    """An array, of which only the number of elements is kept."""

    count: int


Value = str | int | float | bool | ArraySize


def read_metadata(head: bytes, *, whole: bool = True) -> Mapping[str, Value]:
    """Read the keys and values of a GGUF file.

    A string above a megabyte is left out: no fact of a model is that long.

    Args:
        head: the file's first bytes.
        whole: whether all keys must be there; False takes those before the end of `head`.

    Raises:
        BadGguf: it is not one, not of a version that is in use, or damaged.
    """
    reader = _Reader(head)
    found: dict[str, Value] = {}
    try:
        if reader.take(4) != MAGIC:
            raise BadGguf("it does not begin with GGUF")
        version = reader.number(_U32)
        if version not in _VERSIONS:
            raise BadGguf(f"it is of GGUF version {version}, and 2 and 3 are read")
        reader.number(_U64)  # tensors
        keys = reader.number(_U64)
        if keys > _KEYS_MAX:
            raise BadGguf(f"it says that it has {keys} keys, and more than {_KEYS_MAX} are not believed")
        for _ in range(keys):
            key = reader.key()
            if key in found:
                raise BadGguf(f"the key {key[:80]!r} occurs twice")
            value = reader.value(reader.number(_U32))
            if value is not None:
                found[key] = value
    except _Truncated:
        if whole:
            raise
    return found


class _Reader:
    """A place in bytes, which only moves forward and never past their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def skip(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise _Truncated("it ends in the middle of its metadata")
        self._at += count

    def take(self, count: int) -> bytes:
        begin = self._at
        self.skip(count)
        return self._data[begin : self._at]

    def number(self, form: struct.Struct) -> int:
        return int(self.scalar(form))

    def scalar(self, form: struct.Struct) -> int | float | bool:
        begin = self._at
        self.skip(form.size)
        value: int | float | bool = form.unpack_from(self._data, begin)[0]
        return value

    def key(self) -> str:
        length = self.number(_U64)
        if length > _KEY_BYTES_MAX:
            raise BadGguf(f"a key has {length} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise BadGguf("a key is not UTF-8 text") from None

    def value(self, kind: int) -> Value | None:
        """The value of that type, or None for a string that is too long to keep."""
        if kind == _STRING:
            length = self.number(_U64)
            if length > _STRING_BYTES_MAX:
                self.skip(length)
                return None
            return self.take(length).decode("utf-8", "replace")
        if kind == _ARRAY:
            return self._array(self.number(_U32), self.number(_U64))
        if kind not in _SCALARS:
            raise BadGguf(f"a value has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> ArraySize:
        if kind in _SCALARS:
            self.skip(count * _SCALARS[kind].size)
        elif kind == _STRING:
            self._skip_strings(count)
        else:
            raise BadGguf(f"an array has elements of type {kind}, which are not read")
        return ArraySize(count)

    def _skip_strings(self, count: int) -> None:
        if count > _STRINGS_MAX:
            raise BadGguf(f"an array says that it has {count} strings")
        data, at, end, unpack = self._data, self._at, len(self._data), _U64.unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise _Truncated("it ends in the middle of its metadata")
            at += 8 + unpack(data, at)[0]
        if at > end:
            raise _Truncated("it ends in the middle of its metadata")
        self._at = at

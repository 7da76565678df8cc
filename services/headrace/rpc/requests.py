"""Requests before they are trusted: size first, then bytes, then UTF-8, each with a precise refusal.

grpc answers a request that its deserializer cannot read with INTERNAL and no details. So the deserializer here
never fails: it returns a `Refused` that the handler turns into a status naming the field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace.control.errors import Failure, InvalidRequest, Reason, Violation

_LENGTH_DELIMITED = 2
_DEPTH_MAX = 16


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that could not be read, and why."""

    failure: Failure


def bounded(message_class: type[Message], bytes_max: int) -> Callable[[bytes], Message | Refused]:
    """Return a deserializer for `message_class` that refuses more than `bytes_max` bytes before parsing."""

    def deserialize(data: bytes) -> Message | Refused:
        if len(data) > bytes_max:
            return Refused(
                Failure(
                    Reason.REQUEST_TOO_LARGE,
                    f"The request has {len(data)} bytes; at most {bytes_max} are accepted.",
                    field=largest_field(data, message_class.DESCRIPTOR),
                    metadata={"limitBytes": str(bytes_max), "requestBytes": str(len(data))},
                )
            )
        try:
            return message_class.FromString(data)
        except DecodeError:
            field = invalid_utf8_field(data, message_class.DESCRIPTOR)
            if field:
                return Refused(InvalidRequest((Violation(field, "must be valid UTF-8"),)))
            return Refused(
                Failure(Reason.INVALID_REQUEST, f"The request is not a {message_class.DESCRIPTOR.full_name}.")
            )

    return deserialize


def invalid_utf8_field(data: bytes, descriptor: Any, *, depth: int = 0) -> str:
    """Path of the first string field of `data` that is not UTF-8; "" if none is or it cannot be told."""
    for field, value in _length_delimited(data, descriptor):
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                value.decode("utf-8")
            except UnicodeDecodeError:
                return str(field.name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and depth < _DEPTH_MAX:
            inner = invalid_utf8_field(value, field.message_type, depth=depth + 1)
            if inner:
                return f"{field.name}.{inner}"
    return ""


def largest_field(data: bytes, descriptor: Any) -> str:
    """Name of the field that holds the most of a message that is too large; "" if it cannot be told.

    Reads tags and lengths only: nothing of the message is copied.
    """
    sizes: dict[int, int] = {}
    position = 0
    try:
        while position < len(data):
            tag, position = _varint(data, position)
            kind = tag & 7
            if kind == _LENGTH_DELIMITED:
                size, position = _varint(data, position)
            elif kind == 0:
                _, position = _varint(data, position)
                size = 0
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                return ""
            sizes[tag >> 3] = sizes.get(tag >> 3, 0) + size
            position += size
    except IndexError:
        return ""
    if not sizes:
        return ""
    field = descriptor.fields_by_number.get(max(sizes, key=lambda number: sizes[number]))
    return str(field.name) if field is not None else ""


def _length_delimited(data: bytes, descriptor: Any) -> list[tuple[Any, bytes]]:
    """Fields of `data` that hold bytes, as (field descriptor, content), in order."""
    shadow = Empty()
    try:
        shadow.MergeFromString(data)
    except DecodeError:
        return []
    found = []
    unknown_fields: Any = UnknownFieldSet(shadow)
    for unknown in unknown_fields:
        field = descriptor.fields_by_number.get(unknown.field_number)
        if field is not None and unknown.wire_type == _LENGTH_DELIMITED:
            found.append((field, unknown.data))
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError

"""The msgpack form of frozen values: one frame holds a message's tag and its fields in order.

A `FrameFormat` knows the classes of one protocol. Fields that hold further values name the classes of these:

    FrameFormat("protocol 1", messages=(Outputs,), nested={Outputs: {"deltas": many(Delta)}})

Long tuples of numbers are sent as bytes (`packed`): a prompt of 8,192 tokens is packed in a third of the time then, and
unpacked in two thirds.

Used by the wire between fronts and core (`messages`) and by the wire between engines (`handover.messages`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import msgpack

from stoker.engine.errors import ProtocolError, RequestRefused

BuildValue = Callable[[type[Any], Any], Any]
"""Makes a value of a class from the tuple of its fields."""


class NestedField(NamedTuple):
    """A field that holds values of another class."""

    cls: type[Any]
    build: Callable[[BuildValue, Any], Any]


class Layout(NamedTuple):
    """How the values of one class lie in a frame."""

    names: tuple[str, ...]
    nested: tuple[tuple[int, Callable[[BuildValue, Any], Any]], ...]
    """Places of the fields that hold further values."""
    packed: tuple[int, ...]
    """Places of the fields that are sent as bytes."""
    make: Callable[[tuple[Any, ...]], Any]


class FrameFormat:
    """Encode and decode the messages of one protocol.

    `messages` are the classes that a frame may hold; the place of a class in it is its tag. `nested` names the fields
    that hold values of other dataclasses and named tuples; None stays None in each of them. `packed` names the fields
    that are tuples of integers of 64 bits.
    """

    def __init__(
        self,
        protocol: str,
        *,
        messages: Sequence[type[Any]],
        nested: Mapping[type[Any], Mapping[str, NestedField]],
        packed: Mapping[type[Any], Sequence[str]] | None = None,
    ) -> None:
        self._protocol = protocol
        self._messages = tuple(messages)
        self._tags = {cls: tag for tag, cls in enumerate(messages)}
        inner = [field.cls for row in nested.values() for field in row.values()]
        as_bytes = packed or {}
        self._layouts = {cls: _layout(cls, nested.get(cls, {}), as_bytes.get(cls, ())) for cls in (*messages, *inner)}

    def pack(self, message: object) -> bytes:
        """Encode a message as one frame.

        Raises:
            KeyError: the message's class is not one of the protocol's.
            TypeError: that of a value in it is not, or a packed field holds other than integers of 64 bits.
        """
        frame: bytes = msgpack.packb([self._tags[type(message)], message], default=self._values)
        return frame

    def unpack(self, frame: bytes) -> Any:
        """Decode the message in a frame.

        Raises:
            ProtocolError: the frame is not msgpack, has an unknown tag, or its fields do not fit.
            RequestRefused: sampling parameters in it are not allowed.
        """
        try:
            tag, values = msgpack.unpackb(frame, use_list=False, strict_map_key=False)
            return self._build(self._messages[tag], values)
        except RequestRefused:
            raise
        except (ValueError, TypeError, IndexError, KeyError, msgpack.UnpackException) as error:
            raise ProtocolError(f"not a message of {self._protocol}: {error}") from error

    def _values(self, value: object) -> Any:
        layout = self._layouts.get(type(value))
        if layout is None:
            raise TypeError(f"{type(value).__name__} cannot be sent")
        values = [getattr(value, name) for name in layout.names]
        for place in layout.packed:
            values[place] = _bytes_of(values[place])
        return values

    def _build(self, cls: type[Any], values: Any) -> Any:
        """Make a value. A step's output has one for each token, so fields without further values stay as they came."""
        layout = self._layouts[cls]
        if not isinstance(values, tuple) or len(values) != len(layout.names):
            raise ValueError(f"{cls.__name__} needs {len(layout.names)} fields")
        for place, build in layout.nested:
            if values[place] is not None:
                values = (*values[:place], build(self._build, values[place]), *values[place + 1 :])
        for place in layout.packed:
            values = (*values[:place], _numbers_in(values[place]), *values[place + 1 :])
        return layout.make(values)


def one(cls: type[Any]) -> NestedField:
    """A field that holds one value of this class."""
    return NestedField(cls, lambda build, values: build(cls, values))


def many(cls: type[Any]) -> NestedField:
    """A field that holds a tuple of values of this class."""
    return NestedField(cls, lambda build, items: tuple(build(cls, values) for values in items))


def many_or_none(cls: type[Any]) -> NestedField:
    """A field that holds a tuple of values of this class and of None."""
    return NestedField(
        cls, lambda build, items: tuple(None if values is None else build(cls, values) for values in items)
    )


def numbered(cls: type[Any]) -> NestedField:
    """A field that holds a tuple of pairs: a number, a value of this class."""
    return NestedField(cls, lambda build, items: tuple((number, build(cls, values)) for number, values in items))


def _bytes_of(numbers: Sequence[int]) -> bytes:
    """Eight bytes for each, the lowest first. Raises TypeError: no integers of 64 bits."""
    try:
        return struct.pack(f"<{len(numbers)}q", *numbers)
    except struct.error as error:
        raise TypeError(f"numbers of 64 bits are sent: {error}") from error


def _numbers_in(data: bytes) -> tuple[int, ...]:
    """Raises ValueError: not bytes of whole numbers."""
    if not isinstance(data, bytes) or len(data) % 8:
        raise ValueError("numbers come as bytes, eight for each")
    return struct.unpack(f"<{len(data) // 8}q", data)


def _layout(cls: type[Any], nested: Mapping[str, NestedField], packed: Sequence[str]) -> Layout:
    is_tuple = issubclass(cls, tuple)
    names: tuple[str, ...] = cls._fields if is_tuple else tuple(item.name for item in fields(cls))

    def make(values: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(names, values, strict=True)))

    places = tuple((names.index(name), field.build) for name, field in nested.items())
    return Layout(names, places, tuple(map(names.index, packed)), cls._make if is_tuple else make)

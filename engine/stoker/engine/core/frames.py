"""The msgpack form of frozen values: one frame holds a message's tag and its fields in order.

A `FrameFormat` knows the classes of one protocol. Fields that hold further values name the classes of these:

    FrameFormat("protocol 1", messages=(Outputs,), nested={Outputs: {"deltas": many(Delta)}})

Used by the wire between fronts and core (`messages`) and by the wire between engines (`handover.messages`).
"""

from __future__ import annotations

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


class FrameFormat:
    """Encode and decode the messages of one protocol.

    `messages` are the classes that a frame may hold; the place of a class in it is its tag. `nested` names the fields
    that hold values of other dataclasses and named tuples; None stays None in each of them.
    """

    def __init__(
        self,
        protocol: str,
        *,
        messages: Sequence[type[Any]],
        nested: Mapping[type[Any], Mapping[str, NestedField]],
    ) -> None:
        self._protocol = protocol
        self._messages = tuple(messages)
        self._tags = {cls: tag for tag, cls in enumerate(messages)}
        self._nested = nested
        inner = [field.cls for row in nested.values() for field in row.values()]
        self._names = {cls: _field_names(cls) for cls in (*messages, *inner)}

    def pack(self, message: object) -> bytes:
        """Encode a message as one frame. Raises TypeError for a value whose class is not of the protocol."""
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
        names = self._names.get(type(value))
        if names is None:
            raise TypeError(f"{type(value).__name__} cannot be sent")
        return [getattr(value, name) for name in names]

    def _build(self, cls: type[Any], values: Any) -> Any:
        names = self._names[cls]
        if not isinstance(values, tuple) or len(values) != len(names):
            raise ValueError(f"{cls.__name__} needs {len(names)} fields")
        content = dict(zip(names, values, strict=True))
        for name, nested in self._nested.get(cls, {}).items():
            if content[name] is not None:
                content[name] = nested.build(self._build, content[name])
        return cls(**content)


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


def _field_names(cls: type[Any]) -> tuple[str, ...]:
    if issubclass(cls, tuple):
        names: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
        return names
    return tuple(item.name for item in fields(cls))

"""Keeps the values of many Telemetry lines in little memory.

A worker writes a sample of the client's state every second, so a run of a day has 86,400 of them. The samples have the
same names, and most values are integers. A sample with a dict takes 1 to 2 kB, and one with PackedValues 0.6 kB.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import msgspec

_INTEGER = struct.Struct("<q")
_layouts: dict[tuple[tuple[str, ...], tuple[type, ...]], Layout] = {}


class Layout:
    """The names of the values of a sample, in their order, and where PackedValues stores each of them."""

    def __init__(self, names: tuple[str, ...], types: tuple[type, ...]) -> None:
        self.names = names
        self.types = types
        pairs = list(zip(names, types, strict=True))
        self.integers = {name: 8 * index for index, name in enumerate(name for name, type_ in pairs if type_ is int)}
        """Offset in bytes of each integer."""
        self.others = {name: index for index, name in enumerate(name for name, type_ in pairs if type_ is not int)}
        """Position of each other value in a JSON array."""
        self.struct = struct.Struct(f"<{len(self.integers)}q")
        self.select_integers = _selector(list(self.integers))
        self.select_others = _selector(list(self.others))

    def __reduce__(self) -> tuple[Any, ...]:
        return layout_of, (self.names, self.types)


def _selector(names: list[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Return a function that returns the values with these names as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: tuple(values[name] for name in names)


def layout_of(names: tuple[str, ...], types: tuple[type, ...]) -> Layout:
    """Return the Layout of samples whose values have these names and types. Each combination has one shared Layout."""
    layout = _layouts.get((names, types))
    if layout is None:
        layout = _layouts[names, types] = Layout(names, types)
    return layout


class PackedValues(Mapping[str, Any]):
    """The values of a Telemetry line: integers as 64-bit numbers, and the other values as JSON."""

    __slots__ = ("_integers", "_layout", "_others")

    def __init__(self, layout: Layout, integers: bytes, others: bytes) -> None:
        self._layout = layout
        self._integers = integers
        self._others = others

    def __getitem__(self, name: str) -> Any:
        offset = self._layout.integers.get(name)
        if offset is not None:
            return _INTEGER.unpack_from(self._integers, offset)[0]
        index = self._layout.others[name]
        return msgspec.json.decode(self._others)[index]

    def __contains__(self, name: object) -> bool:
        return name in self._layout.integers or name in self._layout.others

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.names)

    def __len__(self) -> int:
        return len(self._layout.names)

    def __repr__(self) -> str:
        return repr(self.unpacked())

    def unpacked(self) -> dict[str, Any]:
        """Return the values as a dict, in their original order.

        This is faster than reading many of the values one by one."""
        layout = self._layout
        values = dict(zip(layout.integers, layout.struct.unpack(self._integers), strict=True))
        values |= zip(layout.others, msgspec.json.decode(self._others), strict=True)
        return {name: values[name] for name in layout.names}


def unpack_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a dict with the content of `values` if `values` are PackedValues. Otherwise, return `values` unchanged."""
    return values.unpacked() if isinstance(values, PackedValues) else values


def pack_values(values: dict[str, Any]) -> Mapping[str, Any]:
    """Return the values of a Telemetry line as PackedValues.

    The result equals `values`. It is `values` itself if an integer has more than 64 bits.
    """
    layout = layout_of(tuple(values), tuple(map(type, values.values())))
    try:
        integers = layout.struct.pack(*layout.select_integers(values))
    except struct.error:
        return values
    return PackedValues(layout, integers, msgspec.json.encode(layout.select_others(values)))

"""A set of request ids that takes about one bit per request. A set of Python integers takes 80 bytes per request."""

from __future__ import annotations

PAGE_BITS = 16
"""A page holds 65,536 ids in 8 kB. The ids of a class of traffic are consecutive, so most pages are full."""


class IdSet:
    """A set of integers that takes little memory if most of the integers are consecutive."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        page = self._pages.get(number >> PAGE_BITS)
        position = number & ((1 << PAGE_BITS) - 1)
        return page is not None and bool(page[position >> 3] & 1 << (position & 7))

    def add(self, number: int) -> bool:
        """Add a number. Return True if it is new, or False if the set already contained it."""
        page = self._pages.get(number >> PAGE_BITS)
        if page is None:
            page = self._pages[number >> PAGE_BITS] = bytearray(1 << (PAGE_BITS - 3))
        position = number & ((1 << PAGE_BITS) - 1)
        bit = 1 << (position & 7)
        if page[position >> 3] & bit:
            return False
        page[position >> 3] |= bit
        self._count += 1
        return True

    @property
    def size_bytes(self) -> int:
        """The memory of the pages in bytes."""
        return len(self._pages) << (PAGE_BITS - 3)

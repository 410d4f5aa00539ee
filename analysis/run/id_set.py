"""A set of request ids that takes about one bit per request. A set of Python integers takes 80 bytes per request."""

from __future__ import annotations

PAGE_BITS = 16
"""A page holds 65,536 ids in 8 kB. The ids of a class of traffic are consecutive, so most pages are full."""
SPARSE_IDS = 100
"""Maximum number of ids of a page that are kept in a set. A set of so many ids takes about as much memory as a page."""


class IdSet:
    """A set of integers that takes little memory if most of the integers are consecutive.

    The integers are divided into pages of 65,536. A page with few integers is a set, so that scattered integers take no
    more memory than in a set. Other pages have a bit per integer.
    """

    def __init__(self) -> None:
        self._pages: dict[int, bytearray | set[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        page = self._pages.get(number >> PAGE_BITS)
        if page is None:
            return False
        position = number & ((1 << PAGE_BITS) - 1)
        return position in page if isinstance(page, set) else bool(page[position >> 3] & 1 << (position & 7))

    def add(self, number: int) -> bool:
        """Add a number. Return True if it is new, or False if the set already contained it."""
        page = self._pages.get(number >> PAGE_BITS)
        position = number & ((1 << PAGE_BITS) - 1)
        if isinstance(page, bytearray):
            bit = 1 << (position & 7)
            if page[position >> 3] & bit:
                return False
            page[position >> 3] |= bit
            self._count += 1
            return True
        if page is None:
            page = self._pages[number >> PAGE_BITS] = set()
        if position in page:
            return False
        page.add(position)
        self._count += 1
        if len(page) > SPARSE_IDS:
            self._pages[number >> PAGE_BITS] = _bits_of(page)
        return True


def _bits_of(positions: set[int]) -> bytearray:
    """Return a page of an IdSet as a bit array. The bits at `positions` are 1, and all other bits are 0."""
    page = bytearray(1 << (PAGE_BITS - 3))
    for position in positions:
        page[position >> 3] |= 1 << (position & 7)
    return page

"""Rows out of the pages of a SQLite file, without SQLite: what can still be read when a file is damaged.

Follows sqlite.org/fileformat2.html: table leaf pages (type 13) hold cells of payload length, rowid and a record, whose
tail may lie in a chain of overflow pages; index pages (types 2 and 10) hold records alone. No page's pointers to others
are needed to find rows, so a page counts even where the tree above it is gone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

MAGIC = b"SQLite format 3\x00"
_PAGE_SIZES = tuple(1 << power for power in range(9, 17))
_HEADER = 100
_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR = 13, 10, 2
_WAL_HEADER, _FRAME_HEADER = 32, 24
_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}

Value: TypeAlias = "int | float | str | bytes | None"
Record: TypeAlias = "tuple[Value, ...]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the pages of a file hold: records of tables, records of indexes, and how many cells made no sense."""

    records: tuple[Record, ...]
    keys: tuple[Record, ...]
    broken: int


def read_pages(database: bytes, log: bytes = b"") -> Found:
    """Everything that looks like a record in a database file and its write-ahead log.

    Where the header does not state the page size, the one that yields most records counts.
    """
    size = _page_size(database)
    if size is not None:
        return _found(database, log, size)
    tried = [_found(database, log, size) for size in _PAGE_SIZES if size <= max(len(database), len(log))]
    return max(tried, key=lambda found: len(found.records), default=Found(records=(), keys=(), broken=0))


def _page_size(database: bytes) -> int | None:
    if not database.startswith(MAGIC) or len(database) < _HEADER:
        return None
    size = int.from_bytes(database[16:18], "big")
    size = 65536 if size == 1 else size
    return size if size in _PAGE_SIZES else None


def _found(database: bytes, log: bytes, size: int) -> Found:
    reserved = database[20] if database.startswith(MAGIC) and len(database) > 20 else 0
    # A cut file ends in part of a page, whose beginning holds the pointers and whose missing end the cells: what lies
    # before the cut is read, and a cell that reaches beyond it is none.
    pages = {number + 1: database[start : start + size] for number, start in enumerate(range(0, len(database), size))}
    pages.update(_logged(log, size))
    records: list[Record] = []
    keys: list[Record] = []
    broken = 0
    for number in pages:
        reader = _Page(pages, number, size - reserved)
        for cell in reader.cells():
            record = reader.record(cell)
            if record is None:
                broken += 1
            elif reader.kind == _TABLE_LEAF:
                records.append(record)
            else:
                keys.append(record)
    return Found(records=tuple(records), keys=tuple(keys), broken=broken)


def _logged(log: bytes, size: int) -> dict[int, bytes]:
    """The newest committed version of every page in the write-ahead log."""
    if len(log) < _WAL_HEADER or int.from_bytes(log[8:12], "big") != size:
        return {}
    salts = log[16:24]
    committed: dict[int, bytes] = {}
    pending: dict[int, bytes] = {}
    for start in range(_WAL_HEADER, len(log) - _FRAME_HEADER - size + 1, _FRAME_HEADER + size):
        number, total = struct.unpack_from(">II", log, start)
        if log[start + 8 : start + 16] != salts:
            break  # left over from before the log was last started anew
        pending[number] = log[start + _FRAME_HEADER : start + _FRAME_HEADER + size]
        if total:
            committed.update(pending)
            pending = {}
    return committed


class _Page:
    """A page, read as one of a table or of an index."""

    def __init__(self, pages: Mapping[int, bytes], number: int, usable: int) -> None:
        self._pages = pages
        self._page = pages[number]
        self._start = _HEADER if number == 1 else 0
        self._usable = usable
        self.kind = self._page[self._start] if len(self._page) > self._start else 0

    def cells(self) -> Iterator[int]:
        """Where the cells begin; none on a page of another kind."""
        if self.kind not in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR):
            return
        count = int.from_bytes(self._page[self._start + 3 : self._start + 5], "big")
        first = self._start + (12 if self.kind == _INDEX_INTERIOR else 8)
        for index in range(min(count, (self._usable - first) // 2)):
            yield int.from_bytes(self._page[first + 2 * index : first + 2 * index + 2], "big")

    def record(self, cell: int) -> Record | None:
        """Return the record of a cell, or None if it makes no sense."""
        try:
            position = cell + (4 if self.kind == _INDEX_INTERIOR else 0)
            length, position = _varint(self._page, position)
            if self.kind == _TABLE_LEAF:
                _, position = _varint(self._page, position)
            return _values(self._payload(length, position))
        except (IndexError, ValueError, KeyError, struct.error):
            return None

    def _payload(self, length: int, position: int) -> bytes:
        usable = self._usable
        most = usable - 35 if self.kind == _TABLE_LEAF else (usable - 12) * 64 // 255 - 23
        if length <= most:
            return _slice(self._page, position, length)
        least = (usable - 12) * 32 // 255 - 23
        local = least + (length - least) % (usable - 4)
        local = local if local <= most else least
        parts = [_slice(self._page, position, local)]
        following = int.from_bytes(_slice(self._page, position + local, 4), "big")
        missing, seen = length - local, {0}
        while missing > 0:
            if following in seen:
                raise ValueError("a chain of overflow pages that bites its tail, or ends early")
            seen.add(following)
            page = self._pages[following]
            part = page[4 : min(usable, 4 + missing)]
            parts.append(part)
            missing -= len(part)
            following = int.from_bytes(page[:4], "big")
        return b"".join(parts)


def _values(payload: bytes) -> Record:
    """The values of a record; see `Record Format` in SQLite's description."""
    end, position = _varint(payload, 0)
    kinds = []
    while position < end:
        kind, position = _varint(payload, position)
        kinds.append(kind)
    if position != end:
        raise ValueError("a record header of the wrong length")
    values: list[Value] = []
    for kind in kinds:
        value, position = _value(payload, kind, position)
        values.append(value)
    return tuple(values)


def _value(payload: bytes, kind: int, position: int) -> tuple[Value, int]:
    if kind == 0:
        return None, position
    if kind in (8, 9):
        return kind - 8, position
    if kind == 7:
        return struct.unpack(">d", _slice(payload, position, 8))[0], position + 8
    if kind in _INTEGERS:
        size = _INTEGERS[kind]
        return int.from_bytes(_slice(payload, position, size), "big", signed=True), position + size
    if kind < 12:
        raise ValueError("a kind of value that SQLite does not write")
    size = (kind - 12) // 2
    content = _slice(payload, position, size)
    return (content.decode() if kind % 2 else content), position + size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A whole number of up to nine bytes, seven bits each, and where it ends."""
    value = 0
    for index in range(8):
        byte = data[position + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, position + index + 1
    return value << 8 | data[position + 8], position + 9


def _slice(data: bytes, position: int, length: int) -> bytes:
    if position + length > len(data):
        raise ValueError("a record that reaches beyond its page")
    return data[position : position + length]

"""Read the character vectors of an R package's lazy-load database, without R.

R stores a package's data as two files. ``Rdata.rdx`` is one compressed serialized list that
maps each variable's name to the offset and length of its chunk in ``Rdata.rdb``; a chunk is
the variable, serialized and compressed. The serialization is R's XDR format (versions 2 and
3), described in the "Serialization Formats" chapter of *R Internals*. Only what data of plain
vectors and lists needs is read; anything else raises :class:`RFormatError`.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class RFormatError(ValueError):
    """The bytes are not the part of R's serialization format that this module reads."""


@dataclass
class RVector:
    """An R vector or list: its elements and its attributes (such as ``names``)."""

    values: list[Any]
    attributes: dict[str, Any] = field(default_factory=dict)

    def named(self) -> dict[str, Any]:
        names = self.attributes.get("names")
        if not isinstance(names, RVector):
            raise RFormatError("expected a list with names, got one without")
        return dict(zip(names.values, self.values, strict=True))


# Type codes of R's SEXP tags, as they stand in the low byte of an item's flags.
SYMBOL, PAIRLIST, LANGUAGE, STRING = 1, 2, 6, 9
LOGICAL, INTEGER, REAL, STRINGS, LIST, RAW = 10, 13, 14, 16, 19, 24
ALTREP, NULL, REFERENCE = 238, 254, 255
ENVIRONMENTS = (241, 242, 253)  # base, empty and global: no content follows
NA_STRING_LENGTH = -1


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.references: list[Any] = []

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) != count:
            raise RFormatError(f"the data ends at byte {len(self.data)}, inside an item")
        self.at += count
        return part

    def integers(self, count: int) -> list[int]:
        return list(struct.unpack(f">{count}i", self.take(4 * count)))

    def integer(self) -> int:
        return self.integers(1)[0]

    def header(self) -> None:
        magic = self.take(2)
        if magic != b"X\n":
            raise RFormatError(f"expected R's XDR serialization (X), got {magic!r}")
        version, _writer, _oldest_reader = self.integers(3)
        if version not in (2, 3):
            raise RFormatError(f"expected serialization version 2 or 3, got {version}")
        if version == 3:
            self.take(self.integer())  # name of the native encoding

    def item(self) -> Any:
        flags = self.integer()
        kind, has_attributes, has_tag = flags & 255, bool(flags & 512), bool(flags & 1024)
        if kind in ENVIRONMENTS or kind == NULL:
            return None
        if kind == REFERENCE:
            return self.references[(flags >> 8 or self.integer()) - 1]
        if kind == SYMBOL:
            name = self.item()
            self.references.append(name)
            return name
        if kind == STRING:
            length = self.integer()
            return None if length == NA_STRING_LENGTH else self.take(length).decode("utf-8")
        if kind in (PAIRLIST, LANGUAGE):
            return self.pairlist(has_attributes, has_tag)
        if kind == ALTREP:
            # info, state, attributes: for compact vectors the state is the wanted value
            _info, state, _attributes = self.item(), self.item(), self.item()
            return state
        vector = RVector(self.elements(kind))
        if has_attributes:
            vector.attributes = dict(self.item())
        return vector

    def pairlist(self, has_attributes: bool, has_tag: bool) -> list[tuple[Any, Any]]:
        """A linked list of (tag, value); its tail is another item, so loop instead of recursing."""
        pairs = []
        while True:
            if has_attributes:
                self.item()
            tag = self.item() if has_tag else None
            pairs.append((tag, self.item()))
            flags = self.integer()
            if flags & 255 not in (PAIRLIST, LANGUAGE):
                if flags & 255 != NULL:
                    raise RFormatError(f"a list ends in an item of type {flags & 255}")
                return pairs
            has_attributes, has_tag = bool(flags & 512), bool(flags & 1024)

    def elements(self, kind: int) -> list[Any]:
        if kind not in (LOGICAL, INTEGER, REAL, STRINGS, LIST, RAW):
            raise RFormatError(f"items of type {kind} are not read (byte {self.at})")
        count = self.integer()
        if count < 0:
            raise RFormatError("vectors of 2^31 elements or more are not read")
        if kind in (STRINGS, LIST):
            return [self.item() for _ in range(count)]
        if kind == RAW:
            return list(self.take(count))
        if kind == REAL:
            return list(struct.unpack(f">{count}d", self.take(8 * count)))
        return self.integers(count)


def unserialize(data: bytes) -> Any:
    """The value of one R serialization (uncompressed XDR bytes).

    Vectors and lists come as :class:`RVector`, pairlists as lists of (tag, value), strings as
    ``str`` and NA strings as ``None``.
    """
    reader = _Reader(data)
    reader.header()
    return reader.item()


def _inflate_chunk(chunk: bytes, kind: int) -> bytes:
    """Undo the compression of one .rdb chunk: 4 bytes of size, for kinds 2 and 3 a letter, data."""
    size = int.from_bytes(chunk[:4], "big")
    if kind == 1:
        plain = zlib.decompress(chunk[4:])
    else:
        letter, body = chunk[4:5], chunk[5:]
        if letter == b"2":
            plain = bz2.decompress(body)
        elif letter == b"Z":
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
            plain = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters).decompress(body)
        elif letter == b"0":
            plain = body
        else:
            plain = zlib.decompress(chunk[4:])
    if len(plain) != size:
        raise RFormatError(f"a chunk says it holds {size} bytes and holds {len(plain)}")
    return plain


def read_character_vectors(base: Path) -> dict[str, list[str]]:
    """The character vectors in ``base.rdb``/``base.rdx``, by variable name; NA becomes ``""``."""
    packed = base.with_suffix(".rdx").read_bytes()
    index_bytes = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else zlib.decompress(packed)
    index = unserialize(index_bytes).named()
    kind = index["compressed"].values[0]
    data = base.with_suffix(".rdb").read_bytes()
    found = {}
    for name, place in index["variables"].named().items():
        offset, length = place.values
        value = unserialize(_inflate_chunk(data[offset : offset + length], int(kind)))
        if isinstance(value, RVector) and all(isinstance(v, str | None) for v in value.values):
            found[name] = [line or "" for line in value.values]
    return found

"""The reader of R's lazy-load databases, on bytes written here by hand."""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from pathlib import Path

import pytest

from kvq_lab.rlazyload import RFormatError, RVector, read_character_vectors, unserialize


class Writer:
    """Writes the few items that the tests need, as R's serialize(xdr = TRUE) lays them out."""

    NULL = struct.pack(">i", 254)

    @staticmethod
    def integer(*values: int) -> bytes:
        return struct.pack(f">{len(values)}i", *values)

    def string(self, text: str | None) -> bytes:
        if text is None:
            return self.integer(9, -1)
        raw = text.encode()
        return self.integer(9, len(raw)) + raw

    def strings(self, values: list[str | None], attributes: bytes = b"") -> bytes:
        flags = 16 | (512 if attributes else 0)
        body = b"".join(self.string(v) for v in values)
        return self.integer(flags, len(values)) + body + attributes

    def integers(self, values: list[int]) -> bytes:
        return self.integer(13, len(values), *values)

    def names(self, values: list[str]) -> bytes:
        tag = self.integer(1) + self.string("names")
        return self.integer(2 | 1024) + tag + self.strings(list(values)) + self.NULL

    def named_list(self, **items: bytes) -> bytes:
        flags = self.integer(19 | 512, len(items))
        return flags + b"".join(items.values()) + self.names(list(items))

    def file(self, item: bytes, version: int = 3) -> bytes:
        encoding = self.integer(5) + b"UTF-8" if version == 3 else b""
        return b"X\n" + self.integer(version, 0x40200, 0x30500) + encoding + item


W = Writer()


@pytest.mark.parametrize("version", [2, 3])
def test_reads_strings_with_na_and_accents(version: int) -> None:
    value = unserialize(W.file(W.strings(["tale", None, "naïve", ""]), version))
    assert value.values == ["tale", None, "naïve", ""]


def test_reads_a_named_list() -> None:
    value = unserialize(W.file(W.named_list(a=W.integers([1, -2]), b=W.strings(["x"]))))
    assert {k: v.values for k, v in value.named().items()} == {"a": [1, -2], "b": ["x"]}


def test_resolves_a_symbol_used_twice() -> None:
    again = W.integer(2 | 1024) + W.integer(255 | 1 << 8) + W.strings(["inner"]) + W.NULL
    item = W.integer(19 | 512, 1) + W.integer(19 | 512, 0)
    # The inner list's attribute names the symbol first, the outer one refers back to it.
    item += W.names(["first"]) + again
    outer = unserialize(W.file(item))
    assert outer.values[0].attributes["names"].values == ["first"]
    assert outer.attributes["names"].values == ["inner"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"A\n" + b"\0" * 12, "XDR"),
        (W.file(W.strings(["cut"]))[:-1], "ends"),
        (W.file(W.integer(3, 0)), "type 3"),
        (b"X\n" + W.integer(9, 0, 0), "version"),
    ],
)
def test_says_what_it_cannot_read(data: bytes, says: str) -> None:
    with pytest.raises(RFormatError, match=says):
        unserialize(data)


def test_a_list_without_names_is_refused() -> None:
    with pytest.raises(RFormatError, match="names"):
        RVector([1]).named()


def _raw_lzma(data: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    return lzma.compress(data, lzma.FORMAT_RAW, filters=filters)


@pytest.mark.parametrize(
    ("kind", "pack"),
    [
        (1, zlib.compress),
        (2, lambda data: b"2" + bz2.compress(data)),
        (3, lambda data: b"Z" + _raw_lzma(data)),
        (3, lambda data: b"0" + data),
    ],
    ids=["zlib", "bzip2", "xz", "stored"],
)
def test_reads_a_database(tmp_path: Path, kind: int, pack) -> None:
    story = W.file(W.strings(["Once upon a time", None]))
    number = W.file(W.integers([7]))
    chunks, places = b"skipped", {}
    for name, plain in {"story": story, "number": number}.items():
        chunk = struct.pack(">I", len(plain)) + pack(plain)
        places[name] = W.integers([len(chunks), len(chunk)])
        chunks += chunk
    index = W.named_list(variables=W.named_list(**places), compressed=W.integers([kind]))
    (tmp_path / "Rdata.rdb").write_bytes(chunks)
    (tmp_path / "Rdata.rdx").write_bytes(zlib.compress(W.file(index)))
    assert read_character_vectors(tmp_path / "Rdata") == {"story": ["Once upon a time", ""]}

"""Formats as data: a table of rows by name, and the grammar of names that are not in it.

A new format is one row (and a codec when its number system is new): operators, tests, reports and command line go through the
table. How rows are made is in ``kvq_ops.rows``, what a row means for the planes of a store in ``kvq_ops.layout``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from . import rows
from .errors import FormatError, UnknownFormatError, near_names
from .layout import Format, Plane

__all__ = [
    "PAIRS",
    "Format",
    "KVFormat",
    "Plane",
    "get_format",
    "kv_names",
    "names",
    "parse_kv_format",
    "register_format",
]


@dataclass(frozen=True)
class KVFormat:
    """Formats of keys and of values, which may differ."""

    key: Format
    value: Format

    def __str__(self) -> str:
        if self.key == self.value:
            return self.key.name
        (key, *key_tail), (value, *value_tail) = (row.name.split("+") for row in (self.key, self.value))
        for name, pair in PAIRS.items():
            if (key, value) == pair and key_tail == value_tail:
                return "+".join((name, *key_tail))
        return f"key={self.key.name},value={self.value.name}"

    @property
    def lossless(self) -> bool:
        return self.key.lossless and self.value.lossless

    @property
    def needs_calibration(self) -> bool:
        """Whether scales or codebooks have to be fitted before anything is stored."""
        return self.key.calibrated or self.value.calibrated

    @property
    def calibratable(self) -> bool:
        """Whether there is anything that calibration could fit."""
        return bool(self.key.static_planes or self.value.static_planes)

    def calibrated(self) -> KVFormat:
        """The same with every scale that spans tokens calibrated beforehand (``+static``)."""
        return KVFormat(*(_static(row) for row in (self.key, self.value)))


# ---------------------------------------------------------------------------------------------------------- the table


_TABLE: dict[str, Format] = {}
_UNLISTED: set[str] = set()


def register_format(row: Format, *, listed: bool = True) -> Format:
    """Add a row to the table. Raises ``FormatError`` when the name is taken by a different row.

    Args:
        listed: whether ``names()`` shows it, and so demo, tests and reports take it up by themselves.
    """
    if _TABLE.setdefault(row.name, row) != row:
        raise FormatError(
            f"registering format {row.name!r}",
            got="a name that is taken by another row",
            allowed="a new name, or the same row again",
            do="choose another name",
        )
    if not listed:
        _UNLISTED.add(row.name)
    get_format.cache_clear()
    return row


@functools.cache
def get_format(name: str) -> Format:
    """The row called ``name``; ``UnknownFormatError`` names the nearest ones.

    Besides the listed names these are understood:

    * ``int<2|3|4|8>_<per_tensor|per_head|per_token_head|group<G>|per_channel|channel<G>>``: one scale for the tensor, each
      head, each token and head, ``G`` channels of a token (a multiple of 8 up to 1024), or each channel over 32 or ``G``
      tokens; then ``_sym`` (a scale alone; the default of 8 bits) or ``_asym`` (scale and minimum; the default of fewer); then,
      except per tensor and head, ``_fp16``, ``_bf16`` or ``_fp32`` for what scale and minimum are stored as: bf16 for caches
      with values beyond 65504;
    * modifiers, in any order and each once: ``+recentR`` (the newest ``R`` tokens exact), ``+sinkS`` (the first ``S`` tokens
      exact), ``+hadamard`` (rotated before coding), ``+outlierP%`` (``P`` percent of each vector exact), ``+static`` (scales
      that span tokens are calibrated beforehand instead of fitted to the first tokens).
    """
    if name in _TABLE:
        return _TABLE[name]
    if "=" in name or "," in name or name in PAIRS:
        raise FormatError(
            "one format, for keys or for values",
            got=repr(name),
            allowed="a single name",
            do="use kvq_ops.parse_kv_format, or name one side: "
            + (" or ".join(PAIRS[name]) if name in PAIRS else "'key=...,value=...' has two"),
        )
    base, *modifiers = name.split("+")
    row = _plain_format(base, name)
    return _modified(row, modifiers, name) if modifiers else row


_INTEGER = re.compile(
    r"int(?P<bits>[2348])_"
    r"(?P<where>per_tensor|per_head|per_token_head|per_channel|channel(?P<tokens>[1-9]\d*)|group(?P<group>[1-9]\d*))"
    r"(?P<kind>_sym|_asym)?(?P<parameter>_fp16|_bf16|_fp32)?"
)
_PARAMETERS = {"_fp16": torch.float16, "_bf16": torch.bfloat16, "_fp32": torch.float32}


def _plain_format(base: str, asked: str) -> Format:
    row = _TABLE.get(base) or _integer_format(base)
    if row is None:
        raise UnknownFormatError(
            "a format by name",
            got=repr(asked),
            allowed=near_names(base, [*_TABLE, *PAIRS]),
            do="kvq_ops.formats.kv_names() lists all of them",
        )
    return row


def _integer_format(base: str) -> Format | None:
    match = _INTEGER.fullmatch(base)
    if match is None:
        return None
    bits, where = int(match["bits"]), match["where"]
    symmetric = match["kind"] == "_sym" or (match["kind"] is None and bits == 8)
    if where in ("per_tensor", "per_head"):
        if match["parameter"]:
            return None
        return rows.integer(base, bits, symmetric=symmetric, group=None, per_head=where == "per_head")
    wide = symmetric and bits == 8 and "group" not in where
    parameter = _PARAMETERS[match["parameter"] or ("_fp32" if wide else "_fp16")]
    if "channel" in where:
        tokens = int(match["tokens"] or 32)
        if not 2 <= tokens <= 1024:
            return None
        row = rows.integer(base, bits, symmetric=symmetric, group=1, tokens=tokens, parameter=parameter)
        return rows.with_exact(replace(row, name=f"{base}.codes"), base, 0, 0)
    group = int(match["group"] or 0)
    if group and not (8 <= group <= 1024 and group % 8 == 0):
        return None
    return rows.integer(base, bits, symmetric=symmetric, group=group, parameter=parameter)


_MODIFIER = re.compile(
    r"recent(?P<recent>\d+)|sink(?P<sink>\d+)|(?P<hadamard>hadamard)|(?P<static>static)|outlier(?P<outlier>\d+(?:\.\d+)?)%"
)


def _modified(row: Format, modifiers: Sequence[str], asked: str) -> Format:
    given: dict[str, str] = {}
    for modifier in modifiers:
        match = _MODIFIER.fullmatch(modifier)
        kind = match.lastgroup if match else None
        if match is None or kind is None or kind in given:
            raise FormatError(
                f"the modifiers of format {asked!r}",
                got=f"+{modifier}" + (" twice" if kind else ""),
                allowed="+recentR, +sinkS, +hadamard, +outlierP%, +static, each once",
                do="name each at most once, with its number, as in int4_group32+recent64+outlier1%",
            )
        given[kind] = match[kind]
    if row.lossless:
        raise FormatError(
            f"the modifiers of format {asked!r}",
            got=", ".join(given),
            allowed="none: every token is exact",
            do="leave the modifiers out",
        )
    # A row with a window of its own keeps it, unless another one is asked for.
    recent, sinks = int(given.get("recent", row.recent)), int(given.get("sink", row.sinks))
    exact = row.base is not None or "recent" in given or "sink" in given
    row = row.base or row
    if "static" in given:
        if not row.static_planes:
            raise FormatError(
                f"calibrated scales of format {asked!r}",
                got="a format whose scales are computed for each token, or group of them",
                allowed="a format with a scale for the tensor or each head",
                do="leave +static out: nothing in this format has to be calibrated",
            )
        row = rows.with_static(row)
    if "hadamard" in given:
        if row.rotation:
            raise FormatError(
                f"the modifiers of format {asked!r}",
                got="+hadamard",
                allowed="none: it rotates by itself",
                do="leave +hadamard out",
            )
        row = rows.with_rotation(row)
    if "outlier" in given:
        percent = float(given["outlier"])
        if not 0 < percent <= 50:
            raise FormatError(
                f"outliers of format {asked!r}",
                got=f"{percent:g}%",
                allowed="0 < P <= 50",
                do="name the share of a head vector to keep exactly, such as +outlier1%",
            )
        row = rows.with_outliers(row, percent)
    return rows.with_exact(row, asked, recent, sinks) if exact else replace(row, name=asked)


def _static(row: Format) -> Format:
    """``row`` with ``+static``, where that means anything and is not so already."""
    base = row.base or row
    return row if base.calibrated or not base.static_planes else get_format(f"{row.name}+static")


PAIRS: dict[str, tuple[str, str]] = {}
"""Names that mean different formats for keys and for values."""


def _integer(name: str) -> Format:
    row = _integer_format(name)
    assert row is not None
    return row


for _row in (
    Format(
        "none",
        "exact",
        0,
        (Plane("codes", "BHTD", None),),
        summary="not quantized: the dtype of the model, through the same path",
        lossless=True,
    ),
    _integer("int8_per_token_head"),
    rows.float8("fp8_per_token_head", rows.E4M3, "BHT", "e4m3, one fp32 scale for each token and head"),
    rows.float8("fp8_per_head", rows.E4M3, "H", "e4m3, one fp32 scale for each head"),
    rows.float8("fp8_e4m3", rows.E4M3, "1", "e4m3, one fp32 scale for the whole tensor"),
    rows.float8("fp8_e5m2", rows.E5M2, "1", "e5m2, one fp32 scale for the whole tensor"),
    _integer("int8_per_channel"),
    _integer("int4_group32"),
    _integer("int4_group64"),
    _integer("int4_per_token_head"),
    _integer("int3_group32"),
    _integer("int2_group32"),
    *rows.kivi(4),
    *rows.kivi(2),
    Format(
        "nvfp4",
        "block_scaled",
        4,
        (
            Plane("codes", "BHTD", torch.uint8, per=2),
            Plane("block_scale", "BHTD", torch.uint8, per=16),
            Plane("decode_scale", "1", torch.float32),
        ),
        group=16,
        pack=2,
        summary="e2m1 codes, e4m3 scale for 16 channels, one fp32 scale for the tensor",
    ),
    Format(
        "mxfp4",
        "block_scaled",
        4,
        (Plane("codes", "BHTD", torch.uint8, per=2), Plane("exponent", "BHTD", torch.uint8, per=32)),
        group=32,
        pack=2,
        summary="e2m1 codes, a power of two for 32 channels (OCP MX)",
    ),
    Format(
        "mxfp8",
        "block_scaled",
        8,
        (Plane("codes", "BHTD", torch.uint8), Plane("exponent", "BHTD", torch.uint8, per=32)),
        group=32,
        element=rows.E4M3,
        summary="e4m3 codes, a power of two for 32 channels (OCP MX)",
    ),
    *rows.nuq(4),
    *rows.nuq(3),
    *rows.nuq(2),
    rows.turbo(4),
    rows.turbo(3),
    rows.turbo(2),
):
    register_format(_row)

for _name in ("kivi4", "kivi2", "nuq4", "nuq3", "nuq2"):
    PAIRS[_name] = (f"{_name}_keys", f"{_name}_values")


def names() -> tuple[str, ...]:
    """All listed formats of keys or of values; ``none`` comes first."""
    return tuple(name for name in _TABLE if name not in _UNLISTED)


def kv_names() -> tuple[str, ...]:
    """What can be typed for a cache: as :func:`names`, with one name where keys and values differ by definition."""
    of_side = {side: pair for pair, sides in PAIRS.items() for side in sides}
    return tuple(dict.fromkeys(of_side.get(name, name) for name in names()))


def parse_kv_format(spec: str | Format | KVFormat) -> KVFormat:
    """Formats of keys and values from ``"name"`` or ``"key=name,value=name"``.

    Raises:
        FormatError: on a malformed pair; ``UnknownFormatError`` on a name that is not in the table.
    """
    if isinstance(spec, KVFormat):
        return spec
    if isinstance(spec, Format):
        return KVFormat(spec, spec)
    if not isinstance(spec, str):
        raise FormatError(
            "a format",
            got=f"{spec!r} of type {type(spec).__name__}",
            allowed="a string such as 'int8_per_token_head' or 'key=fp8_e4m3,value=int4_group32'",
            do="kvq_ops.formats.kv_names() lists the names",
        )
    if "=" not in spec:
        base, *modifiers = spec.strip().split("+")
        key, value = PAIRS.get(base, (base, base))
        tail = "".join(f"+{modifier}" for modifier in modifiers)
        return KVFormat(get_format(key + tail), get_format(value + tail))
    parts = dict(
        (side.strip(), name.strip()) for side, _, name in (item.partition("=") for item in spec.split(","))
    )
    if set(parts) != {"key", "value"} or spec.count("=") != 2:
        raise FormatError(
            "formats of keys and values",
            got=repr(spec),
            allowed="'key=NAME,value=NAME', each side once",
            do="name both sides, or give a single name for both; kvq_ops.formats.kv_names() lists the names",
        )
    sides = {
        side: "+".join([PAIRS.get(name.split("+")[0], (name.split("+")[0],) * 2)[i], *name.split("+")[1:]])
        for i, (side, name) in enumerate((("key", parts["key"]), ("value", parts["value"])))
    }
    return KVFormat(get_format(sides["key"]), get_format(sides["value"]))

"""Formats as data: a table of rows by name, and the grammar of names that are not in it.

A new format is one row (and a codec when its number system is new): operators, tests, reports and command line go through the
table. What a row means for the planes of a store is in ``kvq_ops.layout``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .errors import FormatError, UnknownFormatError, near_names
from .layout import CODED, Format, Plane

__all__ = [
    "PAIRS",
    "Format",
    "KVFormat",
    "Plane",
    "get_format",
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
        for name, pair in PAIRS.items():
            if (self.key.name, self.value.name) == pair:
                return name
        return f"key={self.key.name},value={self.value.name}"

    @property
    def lossless(self) -> bool:
        return self.key.lossless and self.value.lossless


# ---------------------------------------------------------------------------------------------------------- the table


def _float8(name: str, element: torch.dtype, scale_axes: str, summary: str) -> Format:
    return Format(
        name,
        "float8",
        8,
        (Plane("codes", "BHTD", torch.uint8), Plane("scale", scale_axes, torch.float32)),
        group=0 if "T" in scale_axes else None,
        element=element,
        summary=summary,
    )


def _codes(bits: int) -> Plane:
    """Packed codes along the channels."""
    per, items = {8: (1, 1), 4: (2, 1), 3: (8, 3), 2: (4, 1)}[bits]
    return Plane("codes", "BHTD", torch.uint8, per=per, items=items)


def _asymmetric(
    name: str, bits: int, group: int, parameter: torch.dtype = torch.float16, tokens: int = 1
) -> Format:
    """Codes with scale and minimum for ``group`` channels (0: all) of ``tokens`` tokens."""
    codes = _codes(bits)
    channels = "all channels of a token" if group == 0 else f"{group} channels of a token"
    where = channels if tokens == 1 else f"each channel over {tokens} tokens"
    return Format(
        name,
        "integer",
        bits,
        (
            codes,
            Plane("scale", "BHTD", parameter, per=group, tokens=tokens),
            Plane("minimum", "BHTD", parameter, per=group, tokens=tokens),
        ),
        group=group,
        pack=codes.per,
        token_group=tokens,
        summary=f"{bits}-bit codes, {str(parameter)[6:]} scale and minimum for {where}",
    )


def _with_outliers(base: Format, percent: float) -> Format:
    """``base`` with the ``percent`` % of each vector that lie farthest out kept exactly."""
    planes = (
        *base.planes[:-1],
        Plane("outlier_index", "BHTD", torch.int16, per=0),
        Plane("outlier_value", "BHTD", None, per=0),
    )
    name = f"{base.name}+outlier{percent:g}%"
    return replace(
        base,
        name=name,
        planes=planes,
        outliers=percent,
        summary=f"{base.summary}; {percent:g}% outliers exact",
    )


def _with_rotation(base: Format) -> Format:
    return replace(
        base,
        name=f"{base.name}+hadamard",
        rotation="hadamard",
        summary=f"{base.summary}; rotated before coding",
    )


def _with_exact(base: Format, name: str, recent: int, sinks: int) -> Format:
    """``base`` for tokens between the first ``sinks`` and the newest ``recent``, which are exact."""
    planes = [*base.planes[:-1], Plane("recent", "BHND", None, size=recent + base.token_group), CODED]
    if sinks:
        planes.append(Plane("sinks", "BHND", None, size=sinks))
    exact = [f"the newest {recent}" if recent else "", f"the first {sinks}" if sinks else ""]
    kept = " and ".join(part for part in exact if part) or "those of the unfinished group"
    return replace(
        base,
        name=name,
        planes=tuple(planes),
        base=base,
        recent=recent,
        sinks=sinks,
        summary=f"{base.summary}; tokens kept exact: {kept}",
    )


def _kivi(bits: int, recent: int = 128, group: int = 32) -> tuple[Format, Format]:
    """KIVI: keys per channel over groups of tokens, values per token over groups of channels, the newest exact."""
    keys = _with_exact(
        _asymmetric(f"int{bits}_channel{group}", bits, 1, tokens=group), f"kivi{bits}_keys", recent, 0
    )
    values = _with_exact(_asymmetric(f"int{bits}_group{group}", bits, group), f"kivi{bits}_values", recent, 0)
    return keys, values


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


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@functools.cache
def get_format(name: str) -> Format:
    """The row called ``name``; ``UnknownFormatError`` names the nearest ones.

    Besides the listed names these are understood:

    * ``int<2|3|4>_group<G>`` for any ``G`` that is a multiple of 8 up to 1024, ``int<2|3|4>_per_token_head``, each also with the
      suffix ``_bf16``, which keeps scale and minimum in bfloat16 for caches with values beyond 65504;
    * modifiers, in any order and each once: ``+recentR`` (the newest ``R`` tokens exact), ``+sinkS`` (the first ``S`` tokens
      exact), ``+hadamard`` (rotated before coding), ``+outlierP%`` (``P`` percent of each vector exact).
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


def _plain_format(base: str, asked: str) -> Format:
    if base in _TABLE:
        return _TABLE[base]
    if match := re.fullmatch(r"int([234])_(?:group([1-9]\d*)|per_token_head)(_bf16)?", base):
        bits, group = int(match[1]), int(match[2] or 0)
        if group == 0 or (8 <= group <= 1024 and group % 8 == 0):
            return _asymmetric(base, bits, group, torch.bfloat16 if match[3] else torch.float16)
    raise UnknownFormatError(
        "a format by name",
        got=repr(asked),
        allowed=near_names(base, [*_TABLE, *PAIRS]),
        do="kvq_ops.formats.names() lists all of them",
    )


_MODIFIER = re.compile(
    r"recent(?P<recent>\d+)|sink(?P<sink>\d+)|(?P<hadamard>hadamard)|outlier(?P<outlier>\d+(?:\.\d+)?)%"
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
                allowed="+recentR, +sinkS, +hadamard, +outlierP%, each once",
            )
        given[kind] = match[kind]
    if row.lossless:
        raise FormatError(
            f"the modifiers of format {asked!r}",
            got=", ".join(given),
            allowed="none: every token is exact",
        )
    # A row with a window of its own keeps it, unless another one is asked for.
    recent, sinks = int(given.get("recent", row.recent)), int(given.get("sink", row.sinks))
    exact = row.base is not None or "recent" in given or "sink" in given
    row = row.base or row
    if "hadamard" in given:
        row = _with_rotation(row)
    if "outlier" in given:
        percent = float(given["outlier"])
        if not 0 < percent <= 50 or row.token_group > 1:
            raise FormatError(
                f"outliers of format {asked!r}",
                got=f"{percent:g}%",
                allowed="0 < P <= 50, on a format per token",
            )
        row = _with_outliers(row, percent)
    return _with_exact(row, asked, recent, sinks) if exact else replace(row, name=asked)


PAIRS: dict[str, tuple[str, str]] = {}
"""Names that mean different formats for keys and for values."""


for _row in (
    Format(
        "none",
        "exact",
        0,
        (Plane("codes", "BHTD", None),),
        summary="not quantized: the dtype of the model, through the same path",
        lossless=True,
    ),
    Format(
        "int8_per_token_head",
        "integer",
        8,
        (Plane("codes", "BHTD", torch.int8), Plane("scale", "BHT", torch.float32)),
        group=0,
        summary="int8, one fp32 scale for each token and head",
    ),
    _float8("fp8_per_token_head", _E4M3, "BHT", "e4m3, one fp32 scale for each token and head"),
    _float8("fp8_per_head", _E4M3, "H", "e4m3, one fp32 scale for each head"),
    _float8("fp8_e4m3", _E4M3, "1", "e4m3, one fp32 scale for the whole tensor"),
    _float8("fp8_e5m2", _E5M2, "1", "e5m2, one fp32 scale for the whole tensor"),
    _asymmetric("int4_group32", 4, 32),
    _asymmetric("int4_group64", 4, 64),
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
):
    register_format(_row)

for _row in (
    _with_exact(
        Format(
            "int8_channel32",
            "integer",
            8,
            (
                Plane("codes", "BHTD", torch.int8),
                Plane("scale", "BHTD", torch.float32, tokens=32),
            ),
            group=1,
            token_group=32,
            summary="int8, one fp32 scale for each channel over 32 tokens",
        ),
        "int8_per_channel",
        0,
        0,
    ),
    _asymmetric("int4_per_token_head", 4, 0),
    _asymmetric("int3_group32", 3, 32),
    _asymmetric("int2_group32", 2, 32),
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
        element=_E4M3,
        summary="e4m3 codes, a power of two for 32 channels (OCP MX)",
    ),
    *_kivi(4),
    *_kivi(2),
):
    register_format(_row, listed=False)

for _bits in (4, 2):
    PAIRS[f"kivi{_bits}"] = (f"kivi{_bits}_keys", f"kivi{_bits}_values")


def names() -> tuple[str, ...]:
    """All listed format names; ``none`` comes first."""
    return tuple(name for name in _TABLE if name not in _UNLISTED)


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
            do="kvq_ops.formats.names() lists the names",
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
            do="name both sides, or give a single name for both; kvq_ops.formats.names() lists the names",
        )
    sides = {
        side: "+".join([PAIRS.get(name.split("+")[0], (name.split("+")[0],) * 2)[i], *name.split("+")[1:]])
        for i, (side, name) in enumerate((("key", parts["key"]), ("value", parts["value"])))
    }
    return KVFormat(get_format(sides["key"]), get_format(sides["value"]))

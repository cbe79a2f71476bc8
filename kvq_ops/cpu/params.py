"""What the C++ kernels need to know of a format: a few numbers, computed from its row.

A kernel never sees a format's name. It sees how codes become numbers (``Code``), by which rule numbers become codes (``Rule``),
which tokens and channels share a parameter, and pointers with strides. The order of the numbers is that of ``csrc/params.h``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import Format
from ..layout import Plane

__all__ = ["DTYPES", "MAX_DIM", "Layout", "index_numbers", "layout_of", "plane_numbers", "side_numbers"]

MAX_DIM = 1024
"""Channels of a vector, and members of a group, that the kernels have room for."""

DTYPES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.float64: 4,
    torch.int8: 5,
    torch.uint8: 6,
    torch.int16: 10,
    torch.int32: 11,
    torch.int64: 12,
    torch.bool: 13,
}
_E4M3, _E5M2, _E8M0 = 7, 8, 9

_EXACT, _INT8, _UINT8, _FLOAT_E4M3, _FLOAT_E5M2, _TABLE4, _TABLE3, _TABLE2 = range(8)
_COPY, _SYMMETRIC, _ASYMMETRIC, _FLOAT8, _NVFP4, _MX, _CODEBOOK, _NORMED = range(8)
_TABLES = {4: _TABLE4, 3: _TABLE3, 2: _TABLE2}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Planes in the order of ``Side``, by the names that rows use.
_SLOTS = (
    "codes",
    "scale",
    "outer",
    "minimum",
    "outlier_index",
    "outlier_value",
    "recent",
    "sinks",
    "coded",
    "length",
    "zero_point",
    "codebook",
    "inv_freq",
    "position",
)
_LENGTH = _SLOTS.index("length")
_ROTATIONS = {"": 0, "hadamard": 1, "random_hadamard": 2}
# The positive halves of the tables of ``turbo``, as in ``kvq_ops.codecs.codebook``.
_NORMAL = {
    2: (0.452780034636492, 1.5104176084990955),
    3: (0.24509417894422167, 0.7560052812058773, 1.3439092785049998, 2.1519457045369874),
    4: (
        0.128395029851147, 0.3880482994902902, 0.6567591185324634, 0.9423404564869613,
        1.2562311973471771, 1.6180463860218827, 2.0690172265313866, 2.7325895709951632,
    ),
}  # fmt: skip
_ABSENT = (0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Layout:
    """A format in numbers.

    Attributes:
        numbers: the fields of ``Side`` before the shape.
        slots: for each plane of ``Side`` its index in a store (-1: none), dtype (0: that of the tensor) and strides.
        outliers: whether the count of outliers has to be filled in, which depends on head_dim.
        table: what packed codes stand for.
        written: planes that an append writes.
    """

    numbers: tuple[int, ...]
    slots: tuple[tuple[int, int, Callable[[tuple[int, ...]], tuple[int, ...]]], ...]
    outliers: bool
    table: Tensor
    written: tuple[int, ...]


_STRIDES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "BHTD": lambda s: s,
    "BHND": lambda s: s,
    "BHT": lambda s: (*s, 0),
    "H": lambda s: (0, s[0], 0, 0),
    "1": lambda s: (0, 0, 0, 0),
    "B": lambda s: (s[0], 0, 0, 0),
    "HD": lambda s: (0, s[0], 0, s[1]),
    "D": lambda s: (0, 0, 0, s[0]),
    "N": lambda s: (0, 0, 0, s[0]),
    "B1T": lambda s: (s[0], 0, s[2], 0),
}


def _table(values: Sequence[float]) -> Tensor:
    """16 entries; a shorter table repeats, so that a kernel need not mask the bits of neighbouring codes."""
    return torch.tensor(list(values) * (16 // len(values)), dtype=torch.float32)


def _numbers(row: Format) -> tuple[int, int, Sequence[float]] | str:
    """Code, rule and table of a row without exact tokens, or why there are none."""
    names = {plane.name for plane in row.planes}
    if row.codec == "exact":
        return _EXACT, _COPY, (0.0,)
    if row.codec == "integer":
        if "minimum" in names or "zero_point" in names:
            rule = _ASYMMETRIC if "minimum" in names else _SYMMETRIC
            return _TABLES.get(row.bits, _UINT8), rule, range(2**row.bits) if row.bits in _TABLES else (0.0,)
        if row.bits in _TABLES:  # two's complement
            half = 2 ** (row.bits - 1)
            return _TABLES[row.bits], _SYMMETRIC, [*range(half), *range(-half, 0)]
        return _INT8, _SYMMETRIC, (0.0,)
    if row.codec == "codebook" and row.bits in _TABLES:
        if "norm" in names:
            entries = _NORMAL[row.bits]
            return _TABLES[row.bits], _NORMED, [*(-x for x in reversed(entries)), *entries]
        return _TABLES[row.bits], _CODEBOOK, (0.0,)
    if row.codec == "float8" or (row.codec == "block_scaled" and row.element is not None):
        code = {torch.float8_e4m3fn: _FLOAT_E4M3, torch.float8_e5m2: _FLOAT_E5M2}.get(row.element)  # type: ignore[arg-type]
        if code is not None:
            return code, _FLOAT8 if row.codec == "float8" else _MX, (0.0,)
    if row.codec == "block_scaled" and row.bits == 4:
        rule = _MX if "exponent" in names else _NVFP4
        return _TABLE4, rule, (*_E2M1, *(-x for x in _E2M1))
    return f"no kernel for codec {row.codec!r} with {row.bits} bits and planes {', '.join(sorted(names))}"


@functools.cache
def layout_of(fmt: Format) -> Layout | str:
    """``fmt`` in numbers, or the reason why the kernels cannot serve it."""
    row = fmt.base or fmt
    made = _numbers(row)
    if isinstance(made, str):
        return made
    code, rule, table = made
    # What scales codes, and what is added, have names of their own in some number systems.
    scale = {_NVFP4: "block_scale", _MX: "exponent", _CODEBOOK: "half_range", _NORMED: "norm"}.get(
        rule, "scale"
    )
    aliases = {scale: "scale", "decode_scale": "outer", "centre": "minimum"}
    slots: dict[str, tuple[int, Plane]] = {}
    for i, plane in enumerate(fmt.planes):
        name = aliases.get(plane.name, plane.name)
        if name not in _SLOTS or plane.axes not in _STRIDES or name in slots:
            return f"no kernel reads a plane {plane.name!r} over {plane.axes}"
        slots[name] = i, plane
    if row.rotation not in _ROTATIONS:
        return f"no kernel for rotation {row.rotation!r}"
    tokens = channels = 1
    static = False
    if "scale" in slots:
        plane = slots["scale"][1]
        tokens, static = plane.tokens, not plane.per_token
        channels = 0 if "D" not in plane.axes else plane.per
        if plane.items != 1 or max(tokens, channels) > MAX_DIM:
            return f"no kernel for a scale of {tokens} tokens and {channels} channels"
        low = slots["minimum"][1] if "minimum" in slots else plane
        if (low.axes, low.per, low.tokens, low.dtype) != (plane.axes, plane.per, plane.tokens, plane.dtype):
            return "no kernel for a minimum that is laid out unlike its scale"
        if static and rule not in (_FLOAT8, _SYMMETRIC, _CODEBOOK):
            return f"no kernel for a static scale of codec {row.codec!r}"
        if tokens > 1 and (channels != 1 or not fmt.windowed):
            return "no kernel for groups of tokens other than one channel's, behind a window"
    elif code != _EXACT:
        return "no kernel for codes without a scale"
    if row.token_group != tokens:
        return "no kernel for a token group that is not that of its scale"
    # Outliers lie far from the centre of their channel, from the median, or from zero.
    centred = 2 if rule == _CODEBOOK and static else int("minimum" in slots)
    block = {_NVFP4: _E4M3, _MX: _E8M0}.get(rule, 0)
    described = []
    for name in _SLOTS:
        if name not in slots:
            described.append((-1, 0, _STRIDES["1"]))
            continue
        i, plane = slots[name]
        dtype = DTYPES.get(plane.dtype, 0) if plane.dtype is not None else 0
        described.append((i, block if name == "scale" and block else dtype, _STRIDES[plane.axes]))
    numbers = (
        code,
        rule,
        row.bits or 8,
        tokens,
        channels,
        _ROTATIONS[row.rotation],
        0,
        fmt.window if fmt.windowed else 0,
        fmt.recent,
        fmt.sinks,
        int(static),
        int(row.calibrated),
        centred,
    )
    return Layout(
        numbers, tuple(described), bool(row.outliers), _table(tuple(table)), tuple(range(len(fmt.planes)))
    )


def plane_numbers(tensor: Tensor, strides: Sequence[int]) -> tuple[int, ...]:
    """``Plane`` of a tensor."""
    return (tensor.data_ptr(), DTYPES[tensor.dtype], *strides)


def index_numbers(tensor: Tensor) -> tuple[int, ...]:
    """``Plane`` of integers ``[B]``, ``[T]`` (which serve every row) or ``[B, T]``."""
    strides = tensor.stride()
    rows, tokens = (strides[0], strides[1]) if tensor.dim() == 2 else (0, strides[0])
    return (tensor.data_ptr(), DTYPES[tensor.dtype], rows, 0, tokens, 0)


def side_numbers(
    layout: Layout,
    fmt: Format,
    store: Sequence[Tensor],
    table: Tensor | None = None,
    length: Tensor | None = None,
) -> list[int]:
    """``Side`` of a store whose shapes were checked.

    Args:
        table: integers ``[B, N]``, for a pool of pages: the side is then that of ``B`` sequences of ``N`` pages.
        length: integers ``[B]`` in place of the plane of that name.
    """
    codes = store[0]
    batch, heads, tokens, packed = codes.shape
    size = tokens
    if table is not None:
        batch, tokens = table.shape[0], table.shape[1] * size
    first = fmt.planes[0]
    dim = packed // first.items * first.per
    numbers = [*layout.numbers, batch, heads, tokens, dim]
    if layout.outliers:
        numbers[6] = (fmt.base or fmt).outlier_count(dim)
    for index, dtype, strides in layout.slots:
        if index < 0:
            numbers += _ABSENT
        else:
            tensor = store[index]
            numbers += (tensor.data_ptr(), dtype or DTYPES[tensor.dtype], *strides(tensor.stride()))
    if length is not None:
        at = len(layout.numbers) + 4 + _LENGTH * len(_ABSENT)
        numbers[at : at + len(_ABSENT)] = plane_numbers(length, (length.stride(0), 0, 0, 0))
    numbers += (layout.table.data_ptr(), 0)
    numbers += _ABSENT if table is None else index_numbers(table)
    numbers.append(size)
    return numbers

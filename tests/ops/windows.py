"""Formats with exact tokens to try, small ones among them, and stores filled in all sorts of ways."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import rows
from kvq_ops.formats import Format, get_format, register_format
from tests.ops import checks, oracles
from tests.ops.oracle_numbers import F32
from tests.ops.oracles import Planes

# Groups of eight tokens: the grammar has no name for them, since KIVI's are of 32.
for _name, _bits, _recent, _sinks in (
    ("test_keys_g8r8", 4, 8, 0),
    ("test_keys_g8r5s3", 2, 5, 3),
    ("test_keys_g8r0", 4, 0, 0),
    ("test_keys_g8r20s11", 4, 20, 11),
):
    _base = rows.integer("int_channel8", _bits, symmetric=False, group=1, tokens=8)
    register_format(rows.with_exact(_base, _name, _recent, _sinks), listed=False)

GROUPED = ("test_keys_g8r8", "test_keys_g8r5s3", "test_keys_g8r0", "test_keys_g8r20s11", "int8_per_channel")
SINGLE = (
    "int8_per_token_head+recent8+sink4",
    "int4_group32+recent1",
    "fp8_e4m3+recent6",
    "nvfp4+sink2",
    "int3_group32+hadamard+recent3+sink2",
    "int4_group32+outlier5%+recent4",
    "mxfp8+recent0",
)
CALIBRATED = (
    "nuq4_keys+recent8+sink4",
    "nuq3_values+recent5",
    "nuq3_keys+outlier2%+recent3",
    "fp8_per_head+static+sink2",
    "int4_per_head+hadamard+static+recent4",
)
KIVI = ("kivi4_keys", "kivi2_values+sink4", "kivi2_keys+recent32+hadamard")
SMALL = GROUPED + SINGLE
T = 43
SEVENS = [7] * 6 + [1]


def tokens_for(name: str) -> int:
    """Enough tokens for some to become old."""
    return 205 if name in KIVI else T


def data(
    name: str, rows: int = 2, heads: int = 2, head_dim: int = 32, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.randn(rows, heads, tokens_for(name), head_dim).to(dtype)


def presets(fmt: Format, x: Tensor) -> dict[str, np.ndarray] | None:
    """Scales that span tokens, set beforehand."""
    assert fmt.base is not None
    if fmt.base.calibrated:
        fitted = checks.fitted(fmt.base.name, x.shape[1], x.shape[3])
        return {name: checks.array(plane) for name, plane in fitted.items()}
    return oracles.first_fit(fmt.base, x) if fmt.static_planes else None


def empty(fmt: Format, x: Tensor, capacity: int | None = None) -> list[Tensor]:
    store = fmt.empty_store(x.shape[0], x.shape[1], capacity or x.shape[2], x.shape[3], dtype=x.dtype)
    for name, value in (presets(fmt, x) or {}).items():
        store[fmt.index(name)].copy_(torch.from_numpy(value))
    return store


def filled(name: str, x: Tensor, sizes: Sequence[int], capacity: int | None = None) -> list[Tensor]:
    """A store after appends of these sizes."""
    store, start = empty(get_format(name), x, capacity), 0
    for size in sizes:
        kvq_ops.append_(store, torch.arange(start, start + size), x[:, :, start : start + size], name)
        start += size
    return store


def coded_planes(store: Sequence[Tensor], fmt: Format, row: int, coded: int) -> dict[str, np.ndarray]:
    """The planes of the base format of one row, as far as tokens are coded."""
    planes = {}
    for plane, tensor in zip(fmt.planes, store, strict=True):
        if plane.per_token:
            planes[plane.name] = checks.array(tensor[row : row + 1, :, : -(-coded // plane.tokens)])
        elif plane.static:
            planes[plane.name] = checks.array(tensor)
    return planes


def window_state(
    fmt: Format, x: np.ndarray, length: int, static: Planes | None = None
) -> tuple[int, Planes, np.ndarray]:
    """What a store in a format with a window holds after ``length`` tokens of ``x`` in one row.

    Returns:
        how many tokens are coded, the planes of those, and what all tokens read as (zero from ``length`` on).
    """
    assert fmt.base is not None
    coded = max(0, length - fmt.recent) // fmt.token_group * fmt.token_group
    planes = oracles.expected(fmt.base, x[:, :, :coded], static) if coded else {}
    dense = np.zeros(x.shape, F32)
    dense[:, :, :length] = x[:, :, :length]
    if coded:
        dense[:, :, :coded] = oracles.decoded(fmt.base, planes)
        first = min(fmt.sinks, coded)
        dense[:, :, :first] = x[:, :, :first]
    return coded, planes, dense


def check(store: Sequence[Tensor], name: str, x: Tensor, lengths: Sequence[int], context: str = "") -> None:
    """Codes, scales, counts and what every token reads as, row by row against numpy."""
    fmt = get_format(name)
    values, static = checks.array(x), presets(fmt, x)
    read = kvq_ops.dequantize(store, name).numpy()
    assert store[-1].tolist() == list(lengths), context
    for row, length in enumerate(lengths):
        where = f"{name} row {row} of {length} tokens {context}"
        coded, planes, dense = window_state(fmt, values[row : row + 1], length, static)
        assert store[fmt.index("coded")][row] == coded, where
        assert length - coded <= fmt.recent + fmt.token_group, f"the exact tail of {where}"
        got = coded_planes(store, fmt, row, coded)
        for key, want in planes.items():
            assert np.array_equal(got[key], want), f"{key}: {where}"
        assert np.array_equal(read[row : row + 1, :, : dense.shape[2]], dense), where
        assert not read[row, :, dense.shape[2] :].any(), where

"""Writing and decoding as they are compiled, run in the PTX machine: the bytes that plain torch writes.

What the machine checks and cannot vouch for: ``test_ptx_attention``.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvq_ops import paged, reference
from kvq_ops.codecs.rotation import block_size
from kvq_ops.formats import get_format
from kvq_ops.triton_kernels import shapes
from kvq_ops.triton_kernels.append import append_, paged_append_
from kvq_ops.triton_kernels.dequantize import dequantize
from kvq_ops.triton_kernels.encode import quantize
from tests.cpu.stores import empty, fits, implementation
from tests.cpu.test_attention import filled
from tests.triton.offline import VERSIONS
from tests.triton.ptx_launches import simulated
from tests.triton.stores import assert_same, spread

pytestmark = pytest.mark.xdist_group("ptx")

WRITTEN = (
    "none",
    "int8_per_token_head",
    "int8_per_head_asym",
    "fp8_per_token_head",
    "fp8_e5m2",
    "int4_group32",
    "int4_group48",
    "int3_group32",
    "int2_group32",
    "nvfp4",
    "mxfp4",
    "mxfp8",
    "turbo3",
    "nuq4_keys",
    "int8_per_token_head+recent5+sink3",
    "kivi2_keys",
    "int4_group32+hadamard+outlier5%+recent1",
)


def awkward(batch: int, tokens: int, dim: int) -> Tensor:
    """Numbers of all sizes, ties among them, and tokens with what is no number."""
    x = torch.randn(batch, 2, tokens, dim) * 3
    x[:, :, ::3] = (x[:, :, ::3] * 2).round() / 4
    x[:, 1, 1::5] *= 1e-6
    x[0, 0, tokens // 2, 3:7] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    x[0, 1, 0] = torch.nan
    x[-1, 0, 1] = 0.0
    return x


def append_both(
    name: str, target: str, version: str = VERSIONS[0], dtype: torch.dtype = torch.float16
) -> None:
    """Many tokens and three more; of fp32 into planes that are views, whose numbers lie apart."""
    fmt = get_format(name)
    dim = next(d for d in (40, 48, 64) if fits(fmt, d))
    other = empty(name, 2, 2, 40, dim, dtype)
    mine = spread(other) if dtype is torch.float32 else [plane.clone() for plane in other]
    start = 0
    for count in (33, 3):
        position, x = torch.arange(start, start + count), awkward(2, count, dim).to(dtype)
        implementation("append_", "torch").run(other, position, x, fmt)
        with simulated(target, version=version, schedule=count) as simulation:
            append_(mine, position, x, fmt)
        assert simulation.launches
        assert_same(mine, other, fmt, f"{count} tokens from {start}")
        start += count


@pytest.mark.parametrize("name", WRITTEN)
def test_append(name: str) -> None:
    append_both(name, "sm_80", dtype=(torch.float16, torch.bfloat16, torch.float32)[len(name) % 3])


@pytest.mark.parametrize(
    ("target", "name"),
    [("sm_89", "fp8_e5m2"), ("sm_90", "nvfp4"), ("sm_90", "kivi2_values")],
)
def test_append_on_other_targets(target: str, name: str) -> None:
    append_both(name, target)


@pytest.mark.parametrize("name", ["nvfp4"])
def test_append_with_the_oldest_triton(name: str) -> None:
    append_both(name, "sm_80", VERSIONS[1])


@pytest.mark.parametrize("name", ["int8_per_token_head", "mxfp4", "int4_channel16"])
def test_whole_tiles_of_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that takes many rows, as it does of many tokens, and the last one more than there are."""
    monkeypatch.setattr(shapes, "FEW_ROWS", 0)
    fmt, x = get_format(name), awkward(1, 45, 64).bfloat16()
    with simulated("sm_80", schedule=1):
        got = quantize(x, fmt)
    assert_same(got, implementation("quantize", "torch").run(x, fmt), fmt)


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_group32", "nvfp4", "turbo4"])
def test_pages(name: str) -> None:
    """Into pages in no order, for rows of different lengths; one token of each is padding."""
    fmt = get_format(name)
    table = torch.tensor([[7, 2, 0], [-1, -1, -1], [4, 6, -1]], dtype=torch.int32)
    at = torch.tensor([[0, 4, 8, -1], [-1, -1, -1, -1], [5, 2, -1, 3]])
    other = empty(name, 9, 2, 3, 64)
    mine, x = [plane.clone() for plane in other], awkward(3, 4, 64)
    paged.append_torch(other, table, at, x, fmt)
    with simulated("sm_80", schedule=2):
        paged_append_(mine, table, at.int(), x, fmt)
    assert_same(mine, other, fmt)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("sm_80", "int8_per_token_head"),
        ("sm_80", "fp8_e5m2"),
        ("sm_80", "int3_group32"),
        ("sm_80", "int2_group32"),
        ("sm_80", "nvfp4"),
        ("sm_80", "mxfp8"),
        ("sm_80", "turbo3"),
        ("sm_80", "nuq4_keys"),
        ("sm_80", "kivi2_keys"),
        ("sm_80", "int4_group32+hadamard+outlier5%+recent1"),
        ("sm_90", "fp8_per_token_head"),
        ("sm_90", "nvfp4"),
    ],
)
def test_dequantize(target: str, name: str) -> None:
    """The reference's numbers, bit by bit but for where a compiler may join a product and a sum, and sums in another order.

    Joined, the product ``w - m`` is not rounded, where ``m`` is what a code of zero stands for; each of two sums may be off by
    half a unit. What is turned back is a tree of sums, none larger than all numbers of a block together.
    """
    fmt = get_format(name)
    dim = next(d for d in (40, 48, 64) if fits(fmt, d))
    store = filled(name, 1, 2, 45, dim, [45])
    want = reference.decode_store(store, fmt).float()
    with simulated(target, schedule=3) as simulation:
        got = dequantize(store, fmt, torch.float32)
    assert simulation.launches == {"dequantize_kernel": 1}
    error, folded = (got - want).abs(), reference.folds_rotation(fmt)
    if "position" in fmt._index:
        assert (error <= 2.0**-21 * want.abs().amax(-1, keepdim=True)).all()
        return
    numbers = reference.decode_store(store, fmt, rotated=folded).float().abs()
    low = torch.zeros(())
    if "minimum" in fmt._index:
        nothing = [torch.zeros_like(store[0]), *store[1:]]
        low = reference.decode_store(nothing, fmt, rotated=folded).float().abs()
    if folded:
        n = block_size(dim)
        most = (numbers + low).unflatten(-1, (-1, n)).sum(-1, keepdim=True) / n**0.5
        limit = (2.0**-23 * (math.log2(n) + 3) * most).expand(*most.shape[:-1], n).flatten(-2)
        assert (error <= limit).all(), (error / limit).max()
    elif low.dim():
        assert (error <= 2.0**-24 * (3 * numbers + low)).all()
    else:
        assert torch.equal(got, want)

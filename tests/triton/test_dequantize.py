"""``dequantize`` by the Triton kernel, in the interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kvq_ops import reference
from kvq_ops.formats import get_format
from kvq_ops.triton_kernels.dequantize import dense, dequantize
from kvq_ops.triton_kernels.spec import SLOTS, Spec, spec_of
from tests.cpu.stores import NAMES, fits
from tests.cpu.test_attention import filled
from tests.triton.test_attention import in_pages

# Sums in another order, sines by another way: these differ by some roundings of fp32.
INEXACT = ("norm", "position")


@pytest.mark.parametrize("name", NAMES)
def test_every_format(name: str) -> None:
    fmt = get_format(name)
    dim = next(d for d in (40, 48) if fits(fmt, d))
    store = filled(name, 2, 2, 45, dim, [45, 33])
    want = reference.decode_store(store, fmt).float()
    got = dequantize(store, fmt, torch.float32)
    assert got.dtype is torch.float32 and got.is_contiguous() and got.shape == want.shape
    if any(plane in fmt._index for plane in INEXACT):
        assert ((got - want).abs() <= 2.0**-21 * want.abs().amax(-1, keepdim=True)).all()
    else:
        # The sums of a rotation are the same, in the same order.
        assert torch.equal(got, want)
    for dtype in (torch.float16, torch.bfloat16):
        half = dequantize(store, fmt, dtype)
        assert half.dtype is dtype and torch.equal(half, got.to(dtype))


@pytest.mark.parametrize("name", ["fp8_per_token_head", "int4_group32", "turbo3"])
def test_strides_and_empty_stores(name: str) -> None:
    fmt = get_format(name)
    store = filled(name, 2, 2, 20, 32)
    apart = [p.transpose(1, 2).contiguous().transpose(1, 2) if p.dim() > 2 else p for p in store]
    doubled = [torch.stack((p, p), -1)[..., 0] for p in store]
    want = dequantize(store, fmt, torch.float32)
    assert torch.equal(dequantize(apart, fmt, torch.float32), want)
    assert torch.equal(dequantize(doubled, fmt, torch.float32), want)
    assert dequantize(fmt.empty_store(1, 2, 0, 32), fmt, torch.float32).shape == (1, 2, 0, 32)


@pytest.mark.parametrize("name", ["int8_per_token_head", "nvfp4", "int4_group32+hadamard"])
def test_pages(name: str) -> None:
    """What lies below the length of a sequence, and no page beyond it."""
    spec = spec_of(get_format(name))
    assert isinstance(spec, Spec)
    store = filled(name, 2, 2, 48, 32, [45, 17])
    (pool, _), table, length = in_pages([store, store], (name, name), 16)
    got = dense(pool, spec, torch.float32, 32, block_table=table, length=length)
    want = reference.decode_store(store, get_format(name))
    for b, count in enumerate((45, 17)):
        assert torch.equal(got[b, :, :count], want[b, :, :count])


def test_numbers_beyond_the_dtype() -> None:
    """A long prefill reads what was decoded into its dtype: the largest number is better there than infinity."""
    fmt = get_format("int4_group32_bf16")
    spec = spec_of(fmt)
    assert isinstance(spec, Spec)
    store = reference.quantize(torch.linspace(-1e5, 1e5, 64).view(1, 1, 2, 32), fmt)
    assert dense(store, spec, torch.float16, 32).isinf().any()
    assert dense(store, spec, torch.float16, 32, saturate=True).abs().max() == 65504


def test_every_name_has_a_spec() -> None:
    for name in NAMES:
        spec = spec_of(get_format(name))
        assert isinstance(spec, Spec) and len(spec.planes) == len(SLOTS)

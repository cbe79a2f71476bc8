"""``dequantize`` by the Triton kernel, in the interpreter, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_ops import reference
from kvq_ops.formats import get_format
from kvq_ops.triton_kernels import dequantize as module
from kvq_ops.triton_kernels.attention import attention
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


def test_no_further_than_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prefill decodes what is filled of a store, which may be little of it; tiles beyond do not even begin."""
    name = "int8_per_token_head"
    fmt = get_format(name)
    spec = spec_of(fmt)
    assert isinstance(spec, Spec)
    store = filled(name, 2, 1, 200, 32, [45, 0])
    want = reference.decode_store(store, fmt)
    begun: list[int] = []
    stock = module.load_any

    def counted(*args: Any) -> Any:
        begun.append(int(args[1][2].handle.data.item()))
        return stock(*args)

    monkeypatch.setattr(module, "load_any", counted)
    got = dense(store, spec, torch.float32, 32, length=store[-1])
    assert torch.equal(got[0, :, :45], want[0, :, :45]) and begun == [0, 32]
    assert torch.equal(dense(store, spec, torch.float32, 32), dequantize(store, fmt, torch.float32))
    assert len(begun) == 2 + 2 * 2 * 7


def test_numbers_beyond_the_dtype() -> None:
    """A long prefill reads what was decoded into its dtype: the largest number is better there than infinity."""
    fmt = get_format("int4_group32_bf16")
    spec = spec_of(fmt)
    assert isinstance(spec, Spec)
    store = reference.quantize(torch.linspace(-1e5, 1e5, 64).view(1, 1, 2, 32), fmt)
    assert reference.decode_store(store, fmt).half().isinf().any()
    assert dense(store, spec, torch.float16, 32).abs().max() == 65504


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8_per_token_head", "fp8_per_head"])
@pytest.mark.parametrize("power", [-149, -135, -126, 110, 115])
def test_edges_of_fp32(name: str, power: int) -> None:
    """Bit for bit with scales of ``2**power`` and thereabouts; and attention, which in fp32 reads the same numbers (as long as
    its own sums stay in range).
    """
    fmt = get_format(name)
    store = reference.quantize(torch.randn(1, 1, 6, 64), fmt)
    planes = dict(zip((plane.name for plane in fmt.planes), store, strict=True))
    if "exponent" in planes:
        planes["exponent"].copy_((torch.randint(0, 4, planes["exponent"].shape) + power + 127).clamp_min(0))
    else:
        scale = planes["decode_scale" if name == "nvfp4" else "scale"]
        scale.copy_((1 + torch.rand(scale.shape, dtype=torch.float64) / 4) * 2.0**power)
    want = reference.decode_store(store, fmt)
    assert want.isfinite().all() and want.any()
    assert torch.equal(dequantize(store, fmt, torch.float32), want)
    if power > 110:
        return
    query = torch.randn(1, 1, 1, 64)
    scale = 2.0 ** -max(power, -100)
    got = attention(query, store, store, fmt, fmt, scale=scale).double()
    truth = reference.attention(query, store, store, fmt, fmt, scale=scale, compute=torch.float64)
    assert ((got - truth).abs() <= 1e-5 * truth.abs().max() + 2.0**-149).all()


def test_every_name_has_a_spec() -> None:
    for name in NAMES:
        spec = spec_of(get_format(name))
        assert isinstance(spec, Spec) and len(spec.planes) == len(SLOTS)

"""Attention at the ends of what numbers can be: values near the largest of bf16, masks of the lowest number, long lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_ops import reference
from kvq_ops.formats import get_format
from kvq_ops.triton_kernels import attention as launcher
from tests.cpu.test_attention import filled


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "name",
    ["int8_per_token_head", "int4_group32", "int2_per_token_head", "mxfp8+recent3", "fp8_per_head+outlier5%"],
)
def test_values_near_the_largest(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights meet fp16 as large as they may be, which no sum may be multiplied by before it is divided by that again."""
    monkeypatch.setattr(launcher, "count_splits", lambda *_: count)
    # Parameters in fp16 would hold no such values.
    name = f"{name}_bf16" if name.startswith("int") and "fp" not in name else name
    fmt = get_format(name)
    key = filled(name, 1, 1, 70, 32)
    value = fmt.empty_store(1, 1, 70, 32, dtype=torch.bfloat16)
    x = (torch.randn(1, 1, 70, 32) * 2.0**120).bfloat16()
    reference.append_(value, torch.arange(70), x, fmt)
    query = torch.randn(1, 2, 1, 32).bfloat16()
    out = launcher.attention(query, key, value, fmt, fmt)
    want = reference.attention(query, key, value, fmt, fmt, compute=torch.float64)
    assert out.isfinite().all()
    # One rounding of the weights in fp16, scores that move by less than a tenth, one rounding of the result.
    assert ((out - want).abs() <= 0.1 * 2.0**120).all()
    # A hundred powers of two further down the same numbers come out, each rounded as before.
    small = fmt.empty_store(1, 1, 70, 32, dtype=torch.bfloat16)
    reference.append_(small, torch.arange(70), x * 2.0**-100, fmt)
    assert torch.equal(launcher.attention(query, key, small, fmt, fmt).float() * 2.0**100, out.float())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_lowest_number_closes_only_beside_others(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several tiles and parts: a row of nothing but the lowest number is the mean of its values, as in plain torch."""
    monkeypatch.setattr(launcher, "count_splits", lambda *_: count)
    fmt = get_format("int8_per_token_head")
    stores = [filled(fmt.name, 1, 2, 100, 16) for _ in range(2)]
    lowest = torch.finfo(torch.float32 if dtype is torch.float64 else dtype).min
    mask = torch.full((1, 1, 3, 100), lowest, dtype=dtype)
    mask[..., 1, 40:] = 0.0
    mask[..., 2, :70] = -torch.inf
    options: dict[str, Any] = {"mask": mask}
    for sinks in (None, torch.randn(4)):
        query = torch.randn(1, 4, 3, 16)
        out = launcher.attention(query, *stores, fmt, fmt, sinks=sinks, **options)
        want = reference.attention(query, *stores, fmt, fmt, compute=torch.float64, sinks=sinks, **options)
        assert torch.allclose(out.double(), want, rtol=1e-5, atol=1e-5)
    # Beside a learned sink nothing is left of such a row.
    assert not out[:, :, 0].any() and not out[:, :, 2].any() and out[:, :, 1].all()

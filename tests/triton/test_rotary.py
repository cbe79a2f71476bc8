"""Keys that are turned by their positions after they were coded, where halves of a vector are loaded together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq_ops import reference
from kvq_ops.formats import get_format
from kvq_ops.triton_kernels import rotary
from kvq_ops.triton_kernels.dequantize import dequantize
from tests.cpu.test_attention import filled
from tests.triton.planted import plant
from tests.triton.test_attention import check

NAMES = ("nuq4_keys", "nuq3_keys", "nuq4_keys+hadamard", "nuq4_keys+outlier5%", "nuq4_keys+recent4+sink2")


def far(name: str, dim: int, by: int = 0) -> list[Tensor]:
    store = filled(name, 1, 2, 40, dim)
    position = store[get_format(name)._index["position"]]
    position += by * (position > 0)
    return store


def wrong(store: list[Tensor], name: str) -> float:
    """By how much what is decoded is off, in 2**-21 of the largest of each vector."""
    fmt = get_format(name)
    want = reference.decode_store(store, fmt)
    error = (dequantize(store, fmt, torch.float32) - want).abs().amax(-1)
    return float((error / want.abs().amax(-1).clamp_min(1e-30)).max() * 2**21)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [16, 64, 48])
def test_decoding(name: str, dim: int) -> None:
    """Up to a million tokens on, where an angle of fp32 would be off by a tenth."""
    for by in (0, 1_000_000):
        assert wrong(far(name, dim, by), name) <= 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [16, 64])
def test_attention(name: str, dim: int) -> None:
    stores = [far(name, dim, 30_000), filled("none", 1, 2, 40, dim)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        check(torch.randn(1, 4, 2, dim).to(dtype), stores, (name, "none"), causal=True)


@pytest.mark.parametrize(
    "right, fault",
    [
        (" + tl.umulhi(times, lower)", ""),
        ("y = b * cosine + a * sine", "y = b * cosine - a * sine"),
        ("there[:, None], y, 0.0)", "there[:, None], x, 0.0)"),
    ],
)
def test_a_fault_is_noticed(right: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = far("nuq4_keys", 64, 1_000_000)
    assert wrong(store, "nuq4_keys") <= 1
    plant(monkeypatch, tmp_path, rotary, right, fault)
    assert wrong(store, "nuq4_keys") > 100


def test_keys_beyond_fp16() -> None:
    """Half-ranges and centres beyond what fp16 holds, as they are stored in bf16, come into its range by a power of two."""
    name = "nuq4_keys"
    store = filled(name, 1, 1, 40, 32)
    at = get_format(name)._index
    for plane in ("centre", "half_range"):
        store[at[plane]] = (store[at[plane]].float() * 1e6).bfloat16()
    none = filled("none", 1, 1, 40, 32)
    check(torch.randn(1, 2, 1, 32).half(), [store, none], (name, "none"), scale=1e-6)

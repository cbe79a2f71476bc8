"""Every kind of format, and stores that hold what such a format needs beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_ops import formats, registry
from kvq_ops.codecs import codebook
from kvq_ops.formats import Format, get_format
from kvq_ops.registry import Request

# Listed rows, and one of each thing that the grammar of names can say.
NAMES = (
    *formats.names(),
    "int8_group32_asym_bf16",
    "int8_per_token_head_asym_fp32",
    "int4_group48",
    "int4_group8_sym",
    "int3_per_token_head_sym_bf16",
    "int2_group128_fp32",
    "int8_per_tensor",
    "int8_per_head_asym",
    "int4_per_head_asym",
    "int3_per_tensor_sym",
    "int2_per_head",
    "int4_channel16_sym",
    "int8_per_token_head+recent5+sink3",
    "fp8_e4m3+recent4",
    "nvfp4+sink2",
    "int4_group32+outlier5%",
    "int8_per_head+outlier2%",
    "int3_group32+hadamard+recent3+sink2",
    "kivi2_keys+recent8+outlier3%",
    "int4_group32+hadamard+outlier5%+recent1",
    "mxfp8+hadamard",
    "nuq4_keys+outlier3%",
    "nuq3_keys+recent4+hadamard",
    "nuq2_values+outlier5%+sink1",
    "turbo3+recent2",
)


def implementation(op: str, name: str) -> registry.Implementation:
    return next(row for row in registry.implementations(op) if row.name == name)


def refusal(op: str, *fmts: Format, dims: tuple[int, ...] = (64,)) -> str | None:
    return implementation(op, "cpu").refuses(Request(op, "cpu", fmts, dims * len(fmts), torch.float32))


def fits(fmt: Format, dim: int) -> bool:
    return dim % fmt.pack == 0 and ("position" not in fmt._index or dim % 2 == 0)


def empty(
    name: str, batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """An empty store, calibrated where the format wants it."""
    fmt = get_format(name)
    store = fmt.empty_store(batch, heads, tokens, dim, dtype=dtype)
    made = torch.Generator().manual_seed(5)
    sample = torch.randn(2, heads, 40, dim, generator=made)
    fitted = {"inv_freq": 10000 ** -(torch.arange(0, dim, 2) / dim)}
    if "half_range" in fmt._index and fmt.planes[fmt.index("half_range")].static:
        fitted |= codebook.fit_channels(sample)
    if "codebook" in fmt._index:
        fitted["codebook"] = torch.linspace(-1, 1, 2 ** (fmt.base or fmt).bits) ** 3 * 0.9
    for i, plane in enumerate(fmt.planes):
        if plane.name in fitted:
            store[i].copy_(fitted[plane.name])
    return store

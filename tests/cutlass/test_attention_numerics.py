"""Attention by the compiled PTX, run on the CPU, against the float64 oracle: ratios, sizes, pages, lengths, options, formats.

Each limit comes from the data (``attention_bound``). A byte of the cache that no token below its sequence's length owns may not
be read, a place that nobody wrote neither, and warps run in random order.
"""

from __future__ import annotations

import pytest
import torch

import kvq_ops
from tests.cutlass.ptxsim import why_not
from tests.ops.attention_cases import OPTIONS, case

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

from tests.cutlass.attention_runs import contiguous, run_case, simulate

DIMS, PAGES = (64, 128, 256), (0, 16, 64)


@pytest.mark.parametrize("ratio", range(1, 17))
@pytest.mark.parametrize("dim", DIMS)
def test_query_heads_of_a_kv_head(ratio: int, dim: int) -> None:
    """Every ratio with every size; pages change so that each ratio, and each size, meets every one of them."""
    page = PAGES[(ratio + DIMS.index(dim)) % 3]
    tokens, heads = 2 * page if page else 70 + ratio, 2 if ratio % 5 == 1 else 1
    c = case(
        "nvfp4", batch=3, kv_heads=heads, heads=ratio * heads, queries=1, tokens=tokens, dim=dim, dtype=torch.bfloat16,
        lengths=[tokens - ratio % 3, 0, 1 + ratio],
    )  # fmt: skip
    # Odd schedules let one warp run as far as it can, which takes the simulator several times as long.
    run_case(c, page=page, schedule=ratio if dim == 64 else 2 * ratio, splits=1 + ratio % 2)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_options(name: str) -> None:
    c = case("nvfp4", dim=64, lengths=[9, 6], **OPTIONS[name]())
    run_case(c, schedule=len(name))


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages(page: int, dim: int) -> None:
    c = case(
        "nvfp4", batch=3, heads=8, kv_heads=2, queries=1, tokens=192, dim=dim, dtype=torch.bfloat16, lengths=[70, 192, 33],
    )  # fmt: skip
    run_case(c, page=page, schedule=page + dim, splits=2)


@pytest.mark.parametrize("page", [8, 24, 16])
def test_pages_of_other_sizes_and_integer_types(page: int) -> None:
    c = case(
        "fp8_per_token_head",
        heads=4,
        kv_heads=2,
        queries=2,
        tokens=5 * page,
        dim=64,
        lengths=[4 * page, page + 3],
    )
    wide = {16: torch.int64}.get(page, torch.int32)
    run_case(c, page=page, schedule=1, table_type=wide, length_type=torch.int32, splits=3)


LONG = {
    "causal": lambda t: {"causal": True},
    "window": lambda t: {"window": 70, "causal": True},
    "bool_mask": lambda t: {"mask": torch.rand(2, 1, 3, t) < 0.6},
    "bias_sinks": lambda t: {"mask": torch.randn(1, 12, 1, t), "sinks": torch.randn(12)},
    "softcap": lambda t: {"softcap": 5.0, "scale": 0.5},
    "everything": lambda t: {
        "mask": torch.randn(2, 12, 3, t).masked_fill(torch.rand(2, 12, 3, t) < 0.3, -torch.inf),
        "causal": True, "scale": 0.4, "window": 100, "softcap": 3.0, "sinks": torch.randn(12),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dim"),
    [("causal", 128), ("bool_mask", 128), ("softcap", 128), ("everything", 128),
     ("window", 256), ("bias_sinks", 256), ("everything", 256)],
)  # fmt: skip
def test_options_over_several_tiles_and_rows(name: str, dim: int) -> None:
    """36 rows of a kv head are three CTAs; a stretch has more tokens than four warps take at once."""
    page = 64 if dim == 128 else 0
    c = case(
        "nvfp4", heads=12, kv_heads=1, queries=3, tokens=256, dim=dim, dtype=torch.float16, lengths=[250, 131], **LONG[name](256)
    )  # fmt: skip
    run_case(c, page=page, schedule=dim, splits=2)


FORMATS = (
    ("fp8_per_token_head", "fp8_per_token_head", 128, 128),
    ("fp8_per_token_head", "fp8_per_token_head", 256, 256),
    ("fp8_per_head", "fp8_per_head", 64, 64),
    ("fp8_e4m3", "fp8_e4m3", 128, 128),
    ("nvfp4", "fp8_per_token_head", 128, 64),
    ("fp8_per_head", "nvfp4", 64, 256),
    ("fp8_e4m3", "nvfp4", 256, 128),
)


@pytest.mark.parametrize(("keys", "values", "dim", "value_dim"), FORMATS)
def test_formats(keys: str, values: str, dim: int, value_dim: int) -> None:
    c = case(
        keys, values, heads=6, kv_heads=2, queries=1, tokens=100, dim=dim, value_dim=value_dim, lengths=[100, 43],
    )  # fmt: skip
    run_case(c, schedule=dim, splits=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4])
def test_queries_of_any_size(dtype: torch.dtype, size: float) -> None:
    """Rows that fp16 could not hold, and one of zeros: the scale brings the scores back to where softmax has something to do."""
    c = case("nvfp4", heads=4, kv_heads=2, queries=1, tokens=50, dim=64, scale=0.2 / max(size, 1e-6))
    c.query = (c.query * size).to(dtype)
    c.query[0, 1] = 0
    run_case(c)


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1e4])
def test_values_of_any_size(size: float) -> None:
    """Scales of tokens may be far from what fp16 can hold, and far from each other."""
    c = case("fp8_per_token_head", heads=4, kv_heads=2, queries=1, tokens=70, dim=64)
    spread = torch.logspace(-3, 3, 70)[:, None]
    c.value = c.value * size * spread
    c.value[:, :, 7] = 0
    c.value_store = kvq_ops.quantize(c.value, c.value_format)
    run_case(c, splits=2)


@pytest.mark.parametrize("target", ["sm_103a", "sm_120a", "sm_90a"])
@pytest.mark.parametrize("keys", ["nvfp4", "fp8_per_token_head"])
def test_other_targets(target: str, keys: str) -> None:
    """Where there is no instruction for e2m1, sm_90a among them, its numbers are made of bits."""
    c = case(
        keys, heads=8, kv_heads=2, queries=1, tokens=128, dim=128, dtype=torch.bfloat16, lengths=[128, 77]
    )
    run_case(c, target, page=16, schedule=4)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 64])
def test_any_number_of_splits_and_many_of_them_empty(splits: int) -> None:
    c = case("nvfp4", heads=4, kv_heads=2, queries=1, tokens=300, dim=64, lengths=[300, 65])
    run_case(c, splits=splits, schedule=splits)


def test_planes_with_other_strides() -> None:
    """Tokens first in memory, as some caches have them: the same kernel, other numbers."""
    c = case("nvfp4", heads=4, kv_heads=2, queries=1, tokens=48, dim=128, lengths=[48, 20])
    for store in (c.key_store, c.value_store):
        for i in (0, 1):
            store[i] = store[i].transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    run_case(c)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("gap", [1, 2, 6])
def test_scales_of_blocks_with_gaps_between_rows(gap: int, dim: int) -> None:
    """Rows of scales start at any byte, as where codes and scales of a token share a buffer."""
    c = case("nvfp4", heads=4, kv_heads=2, queries=1, tokens=48, dim=dim, lengths=[48, 20])
    for store in (c.key_store, c.value_store):
        room = torch.zeros(*store[1].shape[:-1], store[1].shape[-1] + gap, dtype=torch.uint8)
        room[..., gap:] = store[1]
        store[1] = room[..., gap:]
    run_case(c)


@pytest.mark.parametrize("window", [2**31 - 1, 10**12])
def test_a_window_beyond_every_number(window: int) -> None:
    """Some mean by it that there is none; fewer tokens than queries make the differences smallest."""
    c = case(
        "nvfp4",
        heads=4,
        kv_heads=2,
        queries=4,
        tokens=48,
        dim=64,
        lengths=[1, 48],
        window=window,
        causal=True,
    )
    run_case(c)


@pytest.mark.parametrize("values", ["nvfp4", "fp8_per_token_head"])
def test_rows_that_a_bias_closes_all_over(values: str) -> None:
    """With the smallest number instead of -inf every key is as good as the others, and values keep their own scales."""
    least = torch.finfo(torch.float32).min
    mask = torch.zeros(2, 1, 3, 40)
    mask[0, :, 1] = least
    mask[1, :, 2] = torch.where(torch.arange(40) % 3 == 0, -torch.inf, least)
    c = case("nvfp4", values, heads=4, kv_heads=2, queries=3, tokens=40, dim=64, mask=mask)
    c.value = c.value * torch.logspace(-2, 1, 40)[:, None]
    c.value_store = kvq_ops.quantize(c.value, values)
    run_case(c, splits=2)


@pytest.mark.parametrize("masked", [False, True])
def test_nan_in_queries_is_nan_in_what_comes_out(masked: bool) -> None:
    """And in no other row; a mask with NaN in it does the same."""
    options = {"mask": torch.zeros(2, 4, 1, 90)} if masked else {}
    c = case("nvfp4", heads=4, kv_heads=2, queries=1, tokens=90, dim=64, lengths=[90, 20], **options)
    if masked:
        c.options["mask"][0, 2] = torch.nan
    else:
        c.query[0, 2, 0, 5] = torch.nan
    planned, readable = contiguous(c, splits=2)
    simulate(planned, "sm_100a", readable=readable)
    closed = planned.out.isnan().all(-1)[..., 0]
    assert closed.nonzero().tolist() == [[0, 2]] and planned.out.isnan().sum() == 64


def test_every_code_and_block_scale() -> None:
    """All e2m1 codes times all finite e4m3 scales, as keys and as values, one token at a time."""
    c = case("nvfp4", batch=1, heads=1, kv_heads=1, queries=1, tokens=512, dim=64)
    codes = torch.arange(16, dtype=torch.uint8).roll(3)
    scales = torch.arange(127, dtype=torch.uint8)
    for store, turn in ((c.key_store, 0), (c.value_store, 5)):
        store[0].copy_((codes[0::2] | codes[1::2] << 4).roll(turn).repeat(4))
        store[1].copy_(scales.roll(turn).repeat(17)[: 512 * 4].view(512, 4))
        store[2].fill_(2.0**-9)
    c.query.fill_(0).view(-1)[::7] = 1.0
    ran = run_case(c, splits=1)
    assert ran.used > 0

"""Group F, numerics and layout, over every format of the table and through the graph passes.

Bytes against the oracle are in ``tests/ops``; here is what a user would see.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import get_format
from kvq_ops.formats import parse_kv_format
from tests.cases import every
from tests.cases.every import HKV, HQ, LOSSY, SPECS, B
from tests.ops import checks

FITTED = tuple(name for name in LOSSY if get_format(name).calibrated)
# Codes that know nothing of the data beforehand; a fitted codebook has no entry for what it never saw.
FREE = tuple(name for name in LOSSY if name not in FITTED)


def all_coded(name: str) -> str:
    """The format with no exact token but those of an unfinished group."""
    fmt = get_format(name)
    if not fmt.windowed:
        return name
    return f"{name.split('+recent')[0].split('+sink')[0]}+recent0"


ALL_CODED = tuple(dict.fromkeys(all_coded(name) for name in LOSSY))
FREE_CODED = tuple(dict.fromkeys(all_coded(name) for name in FREE))


# ------------------------------------------------------------------------------------------------------------------ F1


@pytest.mark.parametrize("name", FREE_CODED)
def test_f1_zeros_come_back_exactly(name: str) -> None:
    """A zero channel, a zero token and nothing but zeros."""
    x = torch.randn(B, HKV, 64, 32)
    x[..., 3] = 0
    x[:, :, 5] = 0
    fmt = get_format(name)
    back = every.filled(name, x).dequantize()
    assert not back[:, :, 5].any() or fmt.token_group > 1 or "channel" in name
    assert not every.filled(name, torch.zeros_like(x), sample=x).dequantize().any()
    if fmt.token_group > 1:
        assert not back[..., 3].any()


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("name", ALL_CODED)
def test_f1_constants_and_one_huge_value_stay_finite(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(B, HKV, 64, 32).to(dtype)
    huge = x.clone()
    huge[0, 0, 7, 9] = -70000.0 if dtype != torch.float16 else -65504.0
    for given in (torch.full_like(x, 3.0), huge):
        cache = every.filled(name, given, sample=x)
        back = cache.dequantize()
        assert back.isfinite().all()
        assert all(plane.isfinite().all() for plane in cache.planes() if plane.is_floating_point())
        query = torch.randn(B, HQ, 1, 32).to(dtype)
        assert every.attend(query, cache, cache).isfinite().all()
    if get_format(name).group == 0 or "group" in name:
        # Only its own token, and no other group of it, pays for it.
        plain = every.filled(name, x, sample=x).dequantize()
        others = torch.ones(64, dtype=torch.bool)
        others[7] = False
        assert torch.equal(back[:, :, others], plain[:, :, others])
        assert torch.equal(back[1], plain[1]) and torch.equal(back[0, 1], plain[0, 1])


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_group32", "mxfp4", "nuq4_values", "turbo4"])
def test_f1_exactly_k_outliers_under_ties(name: str) -> None:
    """1% of 256 is three a vector, whatever ties; the lowest indices are taken."""
    name = f"{name}+outlier1%"
    fmt = get_format(name)
    x = torch.randn(B, HKV, 4, 256)
    x[:, :, 1] = torch.sign(x[:, :, 1])  # all as far out as each other
    x[:, :, 2] = 0
    cache = every.filled(name, x, sample=torch.randn(B, HKV, 32, 256))
    planes = every.per_token_planes(cache)
    index, value = planes["outlier_index"], planes["outlier_value"]
    assert index.shape == value.shape == (B, HKV, 4, fmt.outlier_count(256)) and index.shape[-1] == 3
    assert (index.diff() > 0).all(), "distinct, ascending"
    assert index[:, :, 2].eq(torch.tensor([0, 1, 2])).all(), "ties take the lowest index"
    if not fmt.rotation:
        assert torch.equal(value, x.gather(-1, index.long()))
        assert torch.equal(cache.dequantize().gather(-1, index.long()), value)


# ------------------------------------------------------------------------------------------------------------------ F2


BAD = (1000.0, -1000.0, math.inf, -math.inf, math.nan, 449.0, 464.5, 2.0**-9, 2.0**-10, 1e-40, 0.5, 2.5)


def awkward_step() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(B, HQ, 24, 16), torch.randn(B, HKV, 24, 16), torch.randn(B, HKV, 24, 16)
    for x in (key, value):
        x[0, 0, 3, : len(BAD)] = torch.tensor(BAD)
        x[1, 1, 20, 4:] = torch.tensor(BAD)
    return query, key, value


# Through the passes one format of each number system will do: which codes a token gets is not theirs to decide.
PATHS = [("eager", spec) for spec in SPECS] + [
    (way, spec)
    for way in ("compile", "export")
    for spec in (
        "int8_per_token_head",
        "fp8_e4m3",
        "nvfp4",
        "mxfp8",
        "nuq4",
        "turbo3",
        "int4_group8+outlier10%",
        "key=int4_channel8+recent4,value=int4_group8+recent4",
    )
]


@pytest.mark.parametrize(("way", "spec"), PATHS)
def test_f2_what_does_not_fit_saturates_the_same_way_everywhere(way: str, spec: str) -> None:
    """Infinities, NaN, overflow, subnormals and half steps: the same bytes on every path, and only their own tokens differ."""
    query, key, value = awkward_step()
    clean = [x.clone() for x in (key, value)]
    for x in clean:
        x[0, 0, 3] = 0
        x[1, 1, 20] = 0
    calls = every.calls_of(query, key, value, [6] * 4)
    pair = parse_kv_format(spec)
    _, planes = every.run_eagerly(spec, calls, *clean, 24)
    if way != "eager":
        _, left = every.run(way, spec, calls, *clean, 24)
        for plane, tensor, want in zip((*pair.key.planes, *pair.value.planes), left, planes, strict=True):
            if plane.name != "length":
                assert torch.equal(checks.raw(tensor), checks.raw(want)), plane.name
        return
    if pair.lossless:
        return
    for row, x, tidy in ((pair.key.name, key, clean[0]), (pair.value.name, value, clean[1])):
        row = all_coded(row)
        got = every.filled(row, x, sample=tidy).dequantize()
        assert got.isfinite().all(), row
        group = get_format(row).token_group
        # An outlier, or a token of an unfinished group, keeps an infinity as the largest number; a code does not.
        largest = got[:, :, : 24 // group * group].abs()
        assert get_format(row).outliers or not largest.numel() or largest.max() <= 1e5, row
        plain = every.filled(row, tidy, sample=tidy).dequantize()
        untouched = torch.ones(24, dtype=torch.bool)
        for token in (3, 20):
            untouched[token // group * group : (token // group + 1) * group] = False
        assert torch.equal(got[:, :, untouched], plain[:, :, untouched]), row


# ------------------------------------------------------------------------------------------------------------------ F3


STATIC = ("fp8_e4m3", "fp8_e5m2", "fp8_per_head", "int8_per_tensor", "int8_per_head")


@pytest.mark.parametrize("way", ["eager", "compile", "export"])
@pytest.mark.parametrize("name", STATIC)
def test_f3_scales_of_keys_and_values_on_every_path(name: str, way: str) -> None:
    """k_scale 0.5 and v_scale 2, calibrated beforehand: each path applies each where it belongs."""
    name = f"{name}+static"
    query, key, value = torch.randn(B, HQ, 24, 16), torch.randn(B, HKV, 24, 16), torch.randn(B, HKV, 24, 16)

    # Samples whose fitted scales are these.
    largest = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp8_per": 448.0, "int8_per": 127.0}
    top = next(n for prefix, n in largest.items() if name.startswith(prefix))
    samples = [torch.full_like(key, 0.5 * top), torch.full_like(value, 2.0 * top)]
    calls = every.calls_of(query, key, value, [6] * 4)
    if way == "eager":
        outs, planes = every.run_eagerly(name, calls, *samples, 24)
    else:
        outs, planes = every.run(way, name, calls, *samples, 24)
    fmt = get_format(name)
    (at,) = fmt.static_planes
    count = len(fmt.planes)
    assert (planes[at] == 0.5).all() and (planes[count + at] == 2.0).all()

    def want(scales: tuple[float, float]) -> np.ndarray:
        stores = []
        for x, scale, true in zip((planes[:count], planes[count:]), scales, (0.5, 2.0), strict=True):
            store = [plane.clone() for plane in x]
            store[at].fill_(scale if scale else true)
            stores.append(kvq_ops.dequantize(store, name).numpy())
        return checks.exact_attention(query[:, :, 18:], *stores, causal=True)

    checks.assert_tight(outs[-1], want((0.5, 2.0)))
    with pytest.raises(AssertionError):
        checks.assert_tight(outs[-1], want((2.0, 0.5)))


# ------------------------------------------------------------------------------------------------------------------ F4


GROUPS = tuple(
    name for name in FREE_CODED if get_format(name).codec == "integer" and not get_format(name).rotation
)


@pytest.mark.parametrize("name", [*GROUPS, "int4_group64_bf16", "int2_group64", "int3_group40"])
def test_f4_tail_lanes_never_widen_a_range(name: str) -> None:
    """D=96 and D=100, 43 tokens, data in [5, 6]: half a true step at most; a zero in the group would make it six times that."""
    fmt = get_format(name)
    for channels in (96, 100) if 100 % fmt.pack == 0 else (96,):
        x = torch.rand(B, HKV, 43, channels) + 5
        cache = every.filled(name, x)
        back = cache.dequantize()
        whole = 43 // fmt.token_group * fmt.token_group
        planes = every.per_token_planes(cache)
        if "minimum" not in planes:
            # Around zero: the step belongs to the largest value.
            step = 6.0 / (2 ** (fmt.bits - 1) - 1)
        else:
            # 16-bit parameters: the step and the minimum are rounded, by 2**-11 and for bf16 2**-8 of their size.
            eps = 2.0**-8 if fmt.planes[1].dtype == torch.bfloat16 else 2.0**-11
            step = (1 + 2 * eps) / (2**fmt.bits - 1) + 2 * eps * 6
        error = (back - x).abs()
        assert error[:, :, :whole].max() <= step / 2 * 1.001 + 2.0**-11
        assert not error[:, :, whole:].any()
        if "minimum" in planes and not fmt.outliers and fmt.bits < 8:
            assert step / 2 < 6.0 / (2**fmt.bits - 1) / 4, "or a range from zero would pass"


# ------------------------------------------------------------------------------------------------------------------ F6


@pytest.mark.parametrize(
    "name", ["nvfp4", "mxfp4", "mxfp8", "int4_group16", "int4_group16_sym", "int2_group8"]
)
def test_f6_scales_lie_in_the_order_of_their_blocks(name: str) -> None:
    """Every block another power of two: permuted scales, or those of another token, must show."""
    fmt = get_format(name)
    assert fmt.group
    count = 256 // fmt.group
    # Small enough a spread that one fp32 scale holds all block scales of nvfp4.
    power = 2.0 ** (torch.randperm(count) % 8 - 4.0).repeat_interleave(fmt.group)
    x = torch.randn(1, HKV, 5, 256) * power * 2.0 ** torch.arange(5.0).view(5, 1)
    cache = every.filled(name, x)
    limit = {2: 0.5, 4: 0.15, 8: 0.05}[fmt.bits]

    def worst(store: list[Tensor]) -> float:
        """Relative error of the worst block of the worst token: over the whole the loudest would hide the rest."""
        wrong = (kvq_ops.dequantize(store, name) - x).unflatten(-1, (count, fmt.group)).square().sum(-1)
        return float((wrong / x.unflatten(-1, (count, fmt.group)).square().sum(-1)).sqrt().max())

    def mean(store: list[Tensor]) -> float:
        wrong = (kvq_ops.dequantize(store, name) - x).unflatten(-1, (count, fmt.group)).square().sum(-1)
        return float((wrong / x.unflatten(-1, (count, fmt.group)).square().sum(-1)).sqrt().mean())

    assert mean(cache.store) <= limit
    at = [i for i, plane in enumerate(fmt.planes) if plane.per_token and plane.name != "codes"]
    for order in (
        lambda p: p.roll(1, -1),
        lambda p: p.flip(-1),
        lambda p: p.roll(1, 2),
        lambda p: p.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2),
    ):
        broken = [order(p) if i in at else p for i, p in enumerate(cache.store)]
        assert mean(broken) > 3 * limit, name
    assert worst(cache.store) < 3 * limit


def test_the_widest_format_is_among_those_tried() -> None:
    """The lists above come from the table; an empty one would try nothing."""
    assert len(GROUPS) > 8 and len(FREE_CODED) > 20 and FITTED
    assert {"int8_per_token_head", "kivi2_keys+recent0", "turbo2"} <= set(FREE_CODED)

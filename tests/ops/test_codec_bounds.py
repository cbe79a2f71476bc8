"""How wrong a code may be: errors, saturation, values that are not finite, and faults known from public reports."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops.formats import Format, get_format
from tests.ops import checks
from tests.ops.checks import DTYPES, F32, LISTED, NAMES
from tests.ops.codec_data import FLOAT8_TIES, KINDS, int8_ties, make


def error_limit(fmt: Format, x: np.ndarray, planes: dict[str, np.ndarray]) -> np.ndarray:
    """Half a step of the code for each value, plus what rounding the stored parameters and fp32 may add."""
    x, d = x.astype(np.float64), x.shape[-1]
    fp32 = np.abs(x) * 2.0**-22
    if fmt.codec == "integer" and "minimum" in planes:
        group = fmt.group or d
        top = 2**fmt.bits - 1
        _, largest, unit = checks.ROUND16[fmt.planes[fmt.index("scale")].dtype]
        limit = np.zeros(x.shape)
        for i in range(0, d, group):
            g = x[..., i : i + group]
            low, high = g.min(-1, keepdims=True), g.max(-1, keepdims=True)
            step = (high - low) / top
            # A parameter below the normal numbers of float16 is off by up to half of the smallest subnormal.
            rounding = top * (step * unit + 2.0**-25) + np.abs(low) * unit + 2.0**-25
            half = step / 2 * (1 + unit) + 2.0**-26
            # What the planes cannot hold: values below the smallest minimum, and ranges past the largest scale.
            lost = np.maximum(np.abs(low) - largest, 0) + top * np.maximum(step - largest, 0)
            limit[..., i : i + group] = half + rounding + lost
        return limit + 4 * np.abs(x).max(-1, keepdims=True) * 2.0**-23
    if fmt.codec == "integer":
        return planes["scale"][..., None] * 0.5 * (1 + 2.0**-15) + fp32
    if fmt.codec == "float8":
        scale = planes["scale"]
        scale = scale.reshape(1, -1, 1, 1) if fmt.group is None else scale[..., None]
        bits, tiny = (4, 2.0**-9) if fmt.element == torch.float8_e4m3fn else (3, 2.0**-16)
        return np.maximum(np.abs(x) * 2.0**-bits, scale * tiny / 2) * (1 + 2.0**-15) + fp32
    assert fmt.codec == "block_scaled"
    scale = checks.float8_values(planes["block_scale"], torch.float8_e4m3fn) * planes["decode_scale"][0]
    wide = np.repeat(scale, 16, -1)[..., :d]
    # The widest gap of e2m1 is 2; a block scale that was rounded down leaves its largest value out of reach.
    return np.maximum(wide, np.abs(x) - 6 * wide) * (1 + 2.0**-15) + fp32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "none"])
def test_errors_stay_within_half_a_step(name: str, kind: str) -> None:
    fmt = get_format(name)
    for head_dim in (64, 100):
        for dtype in DTYPES:
            x = make(kind, (2, 2, 3, head_dim), dtype)
            store = kvq_ops.quantize(x, name)
            planes = {p.name: checks.array(t) for p, t in zip(fmt.planes, store, strict=True)}
            got = checks.array(kvq_ops.dequantize(store, name)).astype(np.float64)
            limit = error_limit(fmt, checks.array(x), planes)
            error = np.abs(got - checks.array(x))
            if name.endswith("_bf16") and kind == "huge":
                # Beyond half of the fp32 range values saturate.
                error = np.maximum(
                    error - np.maximum(np.abs(checks.array(x)) - 0.49 * np.finfo(F32).max, 0), 0
                )
            assert (error <= limit).all(), f"{dtype} D={head_dim}: {(error - limit).max():.3g} too far"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_finite_values_never_turn_infinite(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    largest = torch.finfo(dtype).max
    for x in (
        make("huge", (1, 2, 3, 64), dtype),
        torch.full((1, 1, 1, 64), largest, dtype=dtype),
        torch.full((1, 1, 1, 64), -largest, dtype=dtype),
        torch.tensor([largest, -largest] * 32, dtype=dtype).view(1, 1, 1, 64),
        torch.tensor([0.0] * 63 + [-largest], dtype=dtype).view(1, 1, 1, 64),
    ):
        store = kvq_ops.quantize(x, name)
        assert all(p.isfinite().all() for p in store if p.is_floating_point()), "a plane holds infinity"
        assert kvq_ops.dequantize(store, name, dtype).isfinite().all()
        if fmt.bits == 4 and "bf16" not in name and dtype != torch.float16:
            continue  # float16 parameters: the wish for range is what the _bf16 rows are for
        scale = float(x.double().abs().max())
        relative = (kvq_ops.dequantize(store, name, torch.float64) - x.double()).abs().max() / scale
        assert relative <= 0.55, "saturated by more than the documented half of the fp32 range"


@pytest.mark.parametrize("name", [n for n in NAMES if n != "none"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_spoils_no_other(name: str, bad: float) -> None:
    """NaN is coded as zero and infinity as the largest code of its sign; no other code and no scale moves."""
    fmt = get_format(name)
    clean = torch.randn(2, 2, 4, 100)
    spot = (1, 0, 2, 37)
    clean[spot] = 0.01  # neither the largest nor the smallest of its group
    dirty = clean.clone()
    dirty[spot] = bad
    before, after = kvq_ops.quantize(clean, name), kvq_ops.quantize(dirty, name)
    for plane, a, b in zip(fmt.planes[1:], before[1:], after[1:], strict=True):
        assert torch.equal(a, b), plane.name
    codes, dirty_codes = checks.element_codes(fmt, before), checks.element_codes(fmt, after)
    assert np.argwhere(codes != dirty_codes).tolist() in ([], [list(spot)])
    got = checks.decoded(fmt, after)
    symmetric_zero = clean.clone()
    symmetric_zero[spot] = 0.0
    if math.isnan(bad):
        assert got[spot] == checks.decoded(fmt, kvq_ops.quantize(symmetric_zero, name))[spot]
    else:
        extreme = clean.clone()
        extreme[spot] = math.copysign(1e30, bad)
        static = {fmt.planes[i].name: checks.array(before[i]) for i in fmt.static_planes}
        if fmt.group is None or static:
            want = checks.expected(fmt, extreme, static)
            limit = checks.unpacked(want["codes"], fmt.bits)[spot]
            if fmt.codec == "float8":
                assert dirty_codes[spot] == limit
            else:
                assert dirty_codes[spot] & 7 == 7 and (dirty_codes[spot] >> 3) == (bad < 0)
        elif "minimum" in {p.name for p in fmt.planes}:
            assert dirty_codes[spot] == (2**fmt.bits - 1 if bad > 0 else 0)
        elif fmt.codec == "integer":
            assert dirty_codes[spot] == math.copysign(127, bad)
        else:
            assert dirty_codes[spot] == (0x7E if bad > 0 else 0xFE)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "none"])
def test_groups_that_hold_nothing_finite(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(1, 1, 3, 64)
    x[0, 0, 1] = torch.tensor([math.nan, math.inf] * 32)
    store = kvq_ops.quantize(x, name)
    assert np.isfinite(checks.decoded(fmt, store)).all()
    x[0, 0, 1] = 0.0
    clean = checks.decoded(fmt, kvq_ops.quantize(x, name))
    assert np.array_equal(checks.decoded(fmt, store)[:, :, [0, 2]], clean[:, :, [0, 2]])


# Normalised mean squared errors of the format notes, section 2.13: gaussian, and with two channels 20 times as loud.
PUBLISHED = {
    "int8_per_token_head": (4.2e-5, 4.6e-4),
    "fp8_per_token_head": (6.6e-4, 2.0e-4),
    "int4_group32": (6.1e-3, 1.2e-2),
    "nvfp4": (9.1e-3, 8.1e-3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_error_figures(name: str) -> None:
    gauss = np.random.default_rng(0).standard_normal((4096, 128)).astype(F32)
    outlier = gauss.copy()
    outlier[:, [5, 70]] *= 20
    for x, figure in zip((gauss, outlier), PUBLISHED[name], strict=True):
        store = kvq_ops.quantize(torch.from_numpy(x).view(1, 1, 4096, 128), name)
        got = oracle.nmse(x, kvq_ops.dequantize(store, name).view(4096, 128).numpy())
        assert got == pytest.approx(figure, rel=0.05)


# ------------------------------------------------------------------------------------------------------ public reports


@pytest.mark.parametrize("name", NAMES)
def test_F1_zeros_constants_and_one_large_value(name: str) -> None:
    fmt = get_format(name)
    zeros = torch.zeros(1, 1, 2, 64)
    assert not kvq_ops.dequantize(kvq_ops.quantize(zeros, name), name).any(), "zeros must come back exactly"
    constant = torch.full((1, 1, 2, 64), 3.0)
    back = kvq_ops.dequantize(kvq_ops.quantize(constant, name), name)
    assert torch.allclose(
        back, constant, rtol=2.0**-6 if fmt.codec in ("float8", "block_scaled") else 1e-6, atol=0
    )
    x = torch.randn(1, 1, 2, 64).bfloat16()
    x[0, 0, 0, 9] = -70000.0
    store = kvq_ops.quantize(x, name)
    back = kvq_ops.dequantize(store, name)
    assert back.isfinite().all() and all(p.isfinite().all() for p in store if p.is_floating_point())
    assert abs(back[0, 0, 0, 9] / x[0, 0, 0, 9].float() - 1) <= 0.07


@pytest.mark.parametrize("name", [n for n in LISTED if get_format(n).codec == "float8"])
def test_F2_float8_saturates_and_rounds_to_even(name: str) -> None:
    fmt = get_format(name)
    largest = float(checks.MAGNITUDES[fmt.element][-1])
    given = [
        1000.0,
        -1000.0,
        math.inf,
        -math.inf,
        math.nan,
        449.0,
        464.5,
        2.0**-9,
        2.0**-10,
        2.0**-17,
        60000.0,
        61440.0,
    ]
    given += FLOAT8_TIES.tolist()
    x = torch.tensor(given + [0.0] * (-len(given) % 2), dtype=torch.float32).view(1, 1, 1, -1)
    if fmt.group == 0:  # a scale of its own: make it 1
        x = torch.where(x.abs() > largest, math.copysign(largest, 1) * x.sign(), x)
        x[..., 0] = largest
        store = kvq_ops.quantize(x, name)
        assert store[1].item() == 1.0
    else:
        store = fmt.empty_store(*x.shape)
        store[1].fill_(1.0)
        kvq_ops.append_(store, torch.tensor([0]), x, name)
    values = np.nan_to_num(x.numpy(), nan=0.0, posinf=largest, neginf=-largest)
    values = checks.CASTS[fmt.element](np.clip(values, -largest, largest))
    want = checks.float8_bytes(values, np.signbit(values), fmt.element)
    assert np.array_equal(store[0].numpy(), want)


@pytest.mark.parametrize("bits", [8, 4])
def test_F2_integer_codes_divide_and_round(bits: int) -> None:
    """A reciprocal in place of the division, or truncation in place of rounding, changes codes of this data."""
    x = torch.randn(4, 4, 64, 64)
    name = "int8_per_token_head" if bits == 8 else "int4_group32"
    fmt = get_format(name)
    got = checks.element_codes(fmt, kvq_ops.quantize(x, name))
    want = checks.unpacked(checks.expected(fmt, x)["codes"], bits)
    assert np.array_equal(got, want)
    if bits == 8:
        scale = (np.abs(x.numpy()).max(-1, keepdims=True) / F32(127)).astype(F32)
        assert (np.trunc(x.numpy() / scale) != want).mean() > 0.4, "the data would not show truncation"
        ties = int8_ties((1, 1, 64, 64), torch.float32).numpy()
        half_away = np.trunc(ties + np.copysign(F32(0.5), ties))
        coded = kvq_ops.quantize(torch.from_numpy(ties), name)[0].numpy()
        assert np.array_equal(coded, np.rint(ties)) and (half_away != coded).any(), "ties go to the even code"


@pytest.mark.parametrize("name", ["int4_group32", "int4_group64", "int4_group128", "int4_group64_bf16"])
def test_F4_tail_lanes_never_enter_the_range(name: str) -> None:
    """Head size 96 with data in [5, 6]: lanes loaded as zero would widen the range from 1 to 6."""
    fmt = get_format(name)
    for head_dim in (96, 100, 80):
        x = torch.rand(2, 2, 8, head_dim) + 5
        back = checks.array(kvq_ops.dequantize(kvq_ops.quantize(x, name), name))
        limit = error_limit(fmt, x.numpy(), {"minimum": np.zeros(1)})
        assert (np.abs(back - x.numpy()) <= limit).all()
        widened = np.ptp(np.concatenate([x.numpy(), np.zeros_like(x.numpy())], -1), -1) / 15 / 2
        assert limit.max() < widened.min(), "the limit would not show the fault"


def test_F6_nvfp4_block_scales_lie_in_order() -> None:
    """Each block a different power of two: permuted scales are far off, which a loose tolerance would hide."""
    fmt = get_format("nvfp4")
    power = 2.0 ** (torch.randperm(16) - 8).repeat_interleave(16)
    x = torch.randn(1, 2, 5, 256) * power
    store = kvq_ops.quantize(x, "nvfp4")

    def relative_error(planes: list[Tensor]) -> float:
        """Of the worst block: over the whole vector the loudest blocks would hide the rest."""
        wrong, right = (
            t.unflatten(-1, (16, 16)).square().sum((0, 1, 2, 4))
            for t in (kvq_ops.dequantize(planes, "nvfp4") - x, x)
        )
        return float((wrong / right).sqrt().max())

    assert relative_error(store) <= 0.15
    swizzled = checks.copy(store)
    swizzled[fmt.index("block_scale")] = store[1].unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2)
    assert relative_error(swizzled) > 0.5

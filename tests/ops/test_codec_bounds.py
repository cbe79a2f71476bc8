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
from tests.ops import checks, oracle_numbers, oracles
from tests.ops.checks import DTYPES, F32, LISTED, NAMES
from tests.ops.codec_data import FLOAT8_TIES, KINDS, int8_ties, make


def error_limit(fmt: Format, x: np.ndarray, planes: dict[str, np.ndarray]) -> np.ndarray:
    """Half a step of the code for each value, plus what rounding the stored parameters and fp32 may add.

    For codes of whole vectors (``norm``) it limits the length of the error, ``[..., 1]``.
    """
    x, d = x.astype(np.float64), x.shape[-1]
    fp32 = np.abs(x) * 2.0**-22
    if "norm" in planes:
        return vector_limit(fmt, x)
    if fmt.codec == "integer" and "minimum" in planes:
        group = fmt.group or d
        top = 2**fmt.bits - 1
        _, largest, unit = oracle_numbers.ROUND[fmt.planes[fmt.index("scale")].dtype]
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
        return limit + 4 * np.abs(x).max(-1, keepdims=True) * 2.0**-23 + beyond_the_edge(x)
    if fmt.codec == "integer":
        return integer_limit(fmt, x) + fp32
    if fmt.codec == "float8":
        scale = planes["scale"]
        scale = scale.reshape(1, -1, 1, 1) if fmt.group is None else scale[..., None]
        bits, tiny = (4, 2.0**-9) if fmt.element == torch.float8_e4m3fn else (3, 2.0**-16)
        return np.maximum(np.abs(x) * 2.0**-bits, scale * tiny / 2) * (1 + 2.0**-15) + fp32
    assert fmt.codec == "block_scaled"
    if "exponent" in planes:
        wide = np.repeat(2.0 ** (planes["exponent"].astype(np.float64) - 127), 32, -1)[..., :d]
    else:
        scale = (
            oracle_numbers.float8_values(planes["block_scale"], torch.float8_e4m3fn)
            * planes["decode_scale"][0]
        )
        wide = np.repeat(scale, 16, -1)[..., :d]
    # The gap of the code at each value; a scale that was rounded down leaves its largest values out of reach.
    if fmt.element is None:
        half = wide * np.where(np.abs(x) <= 2 * wide, 0.25, np.where(np.abs(x) <= 4 * wide, 0.5, 1.0))
        return np.maximum(half, np.abs(x) - 6 * wide) * (1 + 2.0**-15) + fp32
    half = np.maximum(np.abs(x) * 2.0**-4, wide * 2.0**-10)
    return np.maximum(half, np.abs(x) - 448 * wide) * (1 + 2.0**-15) + fp32


def beyond_the_edge(x: np.ndarray) -> np.ndarray:
    """What saturates where differences would leave the range of fp32, see ``codecs.integer.LARGEST``."""
    edge = float(np.finfo(F32).max) * (0.5 - 2**-8)
    # A group with such a value on one side has its steps widened by no more than the group's range.
    return np.maximum(np.abs(x) - edge, 0)


def integer_limit(fmt: Format, x: np.ndarray) -> np.ndarray:
    """Half a step of symmetric scales, and of those with a zero point."""
    if fmt.group is None:
        axes = (0, 2, 3) if fmt.planes[fmt.index("scale")].axes == "H" else None
        low, high = (f(x, axis=axes, keepdims=True) for f in (np.min, np.max))
        unit, largest, tiny = 2.0**-24, np.inf, 0.0
    else:
        group = fmt.group or x.shape[-1]
        missing = np.zeros((*x.shape[:-1], -x.shape[-1] % group))
        blocks = np.concatenate([x, missing], -1).reshape(*x.shape[:-1], -1, group)
        low, high = (np.repeat(f(blocks, axis=-1), group, -1)[..., : x.shape[-1]] for f in (np.min, np.max))
        parameter = fmt.planes[fmt.index("scale")].dtype
        _, largest, unit = oracle_numbers.ROUND[parameter]
        tiny = 2.0**-25 if parameter == torch.float16 else 0.0
    if oracle_numbers.has(fmt, "zero_point"):
        top = 2**fmt.bits - 1
        step = np.maximum(np.maximum(high, 0) - np.minimum(low, 0), 1e-8) / top
        # The zero point is rounded to a whole step, so that the ends are up to half a step out of reach.
        return (step / 2) * (1 + 2.0**-15) + beyond_the_edge(x)
    top = 2 ** (fmt.bits - 1) - 1
    step = np.maximum(np.maximum(high, -low), 1e-8) / top
    lost = top * (step * unit + tiny + np.maximum(step - largest, 0))
    return step / 2 * (1 + unit) * (1 + 2.0**-15) + tiny + lost


def vector_limit(fmt: Format, x: np.ndarray) -> np.ndarray:
    """Of the length of the error where a table codes the direction of a vector and ``n`` its length.

    Let ``z`` be the rotated vector at length ``sqrt(D)`` and ``e`` its entries. The error is at most
    ``n |e / |e| - z / sqrt(D)|`` plus the difference of ``n`` from the true length. As ``|e|`` differs from ``|z|`` by at most
    ``|e - z|``, the first term is at most ``2 n |e - z| / sqrt(D)``. No entry is farther from ``z`` than half of the gap that
    ``z`` lies in, or the outer entry.
    """
    table = oracles.normal_table(fmt.bits).astype(np.float64)
    d = x.shape[-1]
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    n = np.minimum(length, 65504.0)
    with np.errstate(all="ignore"):
        turned = oracles.rotated(fmt, x.astype(F32)).astype(np.float64)
        z = np.where(length > 0, turned * d**0.5 / length, 0)
    above = np.clip(np.searchsorted(table, z), 1, len(table) - 1)
    gap = np.where(np.abs(z) > table[-1], np.abs(z) - table[-1], (table[above] - table[above - 1]) / 2)
    wrong = np.linalg.norm(gap, axis=-1, keepdims=True)
    rounded = length * 2.0**-11 + 2.0**-25
    # An fp16 length that is off changes z by as much, and so the entry by a step at most where it is near a midpoint.
    return 2 * n * wrong / d**0.5 * (1 + 2.0**-10) + 4 * rounded + (length - n) + length * 2.0**-18


def assert_within_limit(fmt: Format, x: Tensor, store: list[Tensor], context: str = "") -> None:
    planes = {p.name: checks.array(t) for p, t in zip(fmt.planes, store, strict=True)}
    got = checks.array(kvq_ops.dequantize(store, fmt.name)).astype(np.float64)
    error = np.abs(got - checks.array(x))
    if "norm" in planes:
        error = np.linalg.norm(error, axis=-1, keepdims=True)
    limit = error_limit(fmt, checks.array(x), planes)
    assert (error <= limit).all(), f"{context}: {(error - limit).max():.3g} too far"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "none"])
def test_errors_stay_within_half_a_step(name: str, kind: str) -> None:
    fmt = get_format(name)
    for head_dim in checks.head_dims(fmt, 64, 100):
        for dtype in DTYPES:
            x = make(kind, (2, 2, 3, head_dim), dtype)
            if "norm" in fmt._index and kind == "huge" and dtype != torch.float16:
                continue  # sums beyond the largest number of fp32
            assert_within_limit(fmt, x, kvq_ops.quantize(x, name), f"{dtype} D={head_dim}")


@pytest.mark.parametrize("name", ["int8_per_token_head", "int3_group32", "int4_per_head", "mxfp4", "turbo4"])
def test_a_wrong_step_is_beyond_the_limit(name: str) -> None:
    """The broken twin: a scale that is a quarter too large for the codes, or an exponent too many."""
    fmt = get_format(name)
    x = torch.randn(2, 2, 3, 64)
    store = checks.copy(kvq_ops.quantize(x, name))
    if name == "turbo4":
        store[0] = store[0].flip(-1)
    else:
        i = fmt.index("exponent" if name == "mxfp4" else "scale")
        store[i] = store[i] + 1 if name == "mxfp4" else (store[i].float() * 1.25).to(store[i].dtype)
    planes = {p.name: checks.array(t) for p, t in zip(fmt.planes, kvq_ops.quantize(x, name), strict=True)}
    error = np.abs(kvq_ops.dequantize(store, name).numpy() - x.numpy())
    error = np.linalg.norm(error, axis=-1, keepdims=True) if "norm" in planes else error
    assert (error > error_limit(fmt, x.numpy(), planes)).any()


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
        if name != "none" and ("norm" not in fmt._index or dtype == torch.float16):
            assert_within_limit(fmt, x, store, "saturated by more than its planes make it")


@pytest.mark.parametrize("name", [n for n in NAMES if n != "none"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_spoils_no_other(name: str, bad: float) -> None:
    """NaN is coded as zero and infinity as the largest code of its sign; no other code and no scale moves.

    Where vectors are rotated first, either counts as zero.
    """
    fmt = get_format(name)
    (head_dim,) = checks.head_dims(fmt, 100)
    clean = torch.randn(2, 2, 4, head_dim)
    spot = (1, 0, 2, 37)
    clean[spot] = 0.01  # neither the largest nor the smallest of its group
    dirty = clean.clone()
    dirty[spot] = bad
    zero = clean.clone()
    zero[spot] = 0.0
    before, after = kvq_ops.quantize(clean, name), kvq_ops.quantize(dirty, name)
    checks.assert_planes(after, fmt, checks.expected(fmt, dirty), str(bad))
    if fmt.rotation:
        checks.assert_same_planes(after, kvq_ops.quantize(zero, name), fmt, "it counts as zero")
        return
    for plane, a, b in zip(fmt.planes[1:], before[1:], after[1:], strict=True):
        assert torch.equal(a, b), plane.name
    codes, dirty_codes = checks.element_codes(fmt, before), checks.element_codes(fmt, after)
    assert np.argwhere(codes != dirty_codes).tolist() in ([], [list(spot)])
    got = checks.decoded(fmt, after)
    assert np.isfinite(got).all()
    if math.isnan(bad):
        assert got[spot] == checks.decoded(fmt, kvq_ops.quantize(zero, name))[spot]
        return
    # No code gives anything farther out: every other one in its place reads as less.
    for code in range(2**fmt.bits):
        other = dirty_codes.astype(np.int64)
        other[spot] = code
        if fmt.codec == "integer" and "minimum" not in fmt._index and "zero_point" not in fmt._index:
            if code == 2 ** (fmt.bits - 1):
                continue  # the lowest number of two's complement is not used
        elif fmt.element is not None and (code & 127) >= len(checks.MAGNITUDES[fmt.element]):
            continue
        planes = {p.name: checks.array(t) for p, t in zip(fmt.planes, after, strict=True)}
        planes["codes"] = oracle.pack(other, fmt.bits) if fmt.bits < 8 else other.astype(codes.dtype)
        assert checks.decoded(fmt, planes)[spot] * math.copysign(1, bad) <= got[spot] * math.copysign(1, bad)


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


# Normalised mean squared errors of the format notes, section 2.13: gaussian, and with two channels 20 times as loud. A rotated
# codebook has one figure, for gaussian data.
PUBLISHED = {
    "int8_per_token_head": (4.2e-5, 4.6e-4),
    "fp8_per_token_head": (6.6e-4, 2.0e-4),
    "int4_group32": (6.1e-3, 1.2e-2),
    "int4_per_token_head": (1.0e-2, 5.2e-2),
    "int4_per_token_head+hadamard": (9.9e-3, 5.4e-3),
    "nvfp4": (9.1e-3, 8.1e-3),
    "mxfp4": (1.33e-2, 3.1e-2),
    "mxfp8": (8.6e-4, 1.5e-3),
    "kivi2_keys+recent0": (0.154, 0.154),
    "turbo4": (9.1e-3,),
    "turbo3": (0.034,),
    "turbo2": (0.116,),
}


def gaussian_and_loud() -> list[np.ndarray]:
    gauss = np.random.default_rng(0).standard_normal((4096, 128)).astype(F32)
    loud = gauss.copy()
    loud[:, [5, 70]] *= 20
    return [gauss, loud]


def through(name: str, x: np.ndarray) -> np.ndarray:
    store = kvq_ops.quantize(torch.from_numpy(x).view(1, 1, *x.shape), name)
    return kvq_ops.dequantize(store, name).view(x.shape).numpy()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_error_figures(name: str) -> None:
    for x, figure in zip(gaussian_and_loud(), PUBLISHED[name], strict=False):
        assert oracle.nmse(x, through(name, x)) == pytest.approx(figure, rel=0.05)


def test_error_of_two_bits_hides_in_the_loud_channels() -> None:
    """Over all channels keys and values of kivi2 look alike; beside the loud channels only the keys are worth anything."""
    gauss, loud = gaussian_and_loud()
    codes, scale, minimum = oracle.asymmetric_encode(gauss, 2, 32)
    want = oracle.nmse(gauss, oracle.asymmetric_decode(codes, scale, minimum, 32))
    assert oracle.nmse(gauss, through("int2_group32", gauss)) == pytest.approx(want, rel=1e-6)
    quiet = [c for c in range(128) if c not in (5, 70)]
    keys, values = through("kivi2_keys+recent0", loud), through("kivi2_values+recent0", loud)
    assert oracle.nmse(loud[:, quiet], keys[:, quiet]) == pytest.approx(0.154, rel=0.05)
    assert oracle.nmse(loud[:, quiet], values[:, quiet]) == pytest.approx(1.55, rel=0.05)


# ------------------------------------------------------------------------------------------------------ public reports


@pytest.mark.parametrize("name", NAMES)
def test_F1_zeros_constants_and_one_large_value(name: str) -> None:
    fmt = get_format(name)
    zeros = torch.zeros(1, 1, 2, 64)
    assert not kvq_ops.dequantize(kvq_ops.quantize(zeros, name), name).any(), "zeros must come back exactly"
    constant = torch.full((1, 1, 2, 64), 3.0)
    store = kvq_ops.quantize(constant, name)
    if "minimum" in fmt._index:
        assert torch.equal(kvq_ops.dequantize(store, name), constant)
    elif name != "none":
        assert_within_limit(fmt, constant, store, "constant")
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


def test_blocks_too_small_for_their_scale_are_not_erased() -> None:
    """Beside a block of 2688 (so that g is 1), blocks down to half a step of the smallest scale of e4m3."""
    fmt = get_format("nvfp4")
    x = torch.zeros(1, 1, 1, 16 * 8)
    x[..., 0] = 448 * 6
    for block, power in enumerate((6, 7, 8, 9, 10, 11, 12), 1):
        x[..., 16 * block : 16 * block + 16] = 2.0**-power * torch.linspace(-1, 1, 16)
    store = kvq_ops.quantize(x, "nvfp4")
    checks.assert_planes(store, fmt, checks.expected(fmt, x), "faint")
    back = kvq_ops.dequantize(store, "nvfp4").unflatten(-1, (8, 16))[0, 0, 0]
    kept = back.abs().amax(-1) > 0
    assert kept.tolist() == [True] * 6 + [False] * 2, (
        "2^-11 is half a step: nearer to nothing else than to zero"
    )
    assert (back - x.unflatten(-1, (8, 16))[0, 0, 0]).abs()[4:].max() <= 2.0**-11
    _, scale = oracle.nvfp4_encode(x.numpy(), 1.0)
    assert (scale[0, 0, 0, 5:] == 0).all(), "the golden oracle erases what is rescued here"

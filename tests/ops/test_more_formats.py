"""Formats that are understood by name beside the listed ones: codes, scales and decoded values, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch

import kvq_ops
from kvq_ops import codecs, errors
from kvq_ops.codecs.rotation import hadamard
from kvq_ops.formats import Format, get_format, parse_kv_format
from tests.ops import checks, oracles
from tests.ops.checks import DTYPES, F32
from tests.ops.codec_data import KINDS, make

# Scales that span tokens: what a format with a window codes by.
TOKEN_GROUPS = (
    "int8_per_channel", "kivi4_keys", "kivi2_keys", "int4_channel32_sym", "int3_per_channel_bf16", "int2_channel32_asym_fp32",
)  # fmt: skip
ROTATED = (
    "int4_group32+hadamard", "int4_per_token_head+hadamard", "int8_per_token_head+hadamard", "mxfp4+hadamard",
    "nvfp4+hadamard", "fp8_per_head+hadamard", "int2_group32+hadamard", "int4_per_head_sym+hadamard", "int2_per_tensor+hadamard",
    "int3_group16_sym+hadamard",
)  # fmt: skip
WITH_OUTLIERS = (
    "int4_group32+outlier1%", "int2_group32+outlier5%", "int8_per_token_head+outlier2.5%", "mxfp4+outlier1%",
    "nvfp4+outlier50%", "fp8_e4m3+outlier1%", "int4_per_token_head+hadamard+outlier3%",
    "int4_per_head+outlier2%", "int3_group32_sym_bf16+outlier1%", "turbo4+outlier2%",
)  # fmt: skip


def assert_encoded(fmt: Format, x: torch.Tensor, context: str) -> None:
    """Codes, scales and decoded values of ``x`` against numpy."""
    store = kvq_ops.quantize(x, fmt.name)
    want = oracles.expected(fmt, x)
    checks.assert_planes(store, fmt, want, context)
    dense, largest = oracles.decoded(fmt, want), np.finfo(F32).max
    assert np.array_equal(kvq_ops.dequantize(store, fmt.name).numpy(), np.clip(dense, -largest, largest)), (
        context
    )
    assert [p.dtype for p in store] == fmt.plane_dtypes(x.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TOKEN_GROUPS)
def test_groups_of_tokens_equal_the_oracle(name: str, kind: str) -> None:
    fmt = get_format(name).base
    assert fmt is not None and fmt.token_group == 32
    for tokens, dim in ((64, 32), (43, 100), (5, 16)):
        (head_dim,) = checks.head_dims(fmt, dim)
        for dtype in DTYPES:
            # The kinds put their awkward values along the last axis: here that is the tokens.
            x = make(kind, (2, 1, head_dim, max(tokens, 16)), dtype).transpose(2, 3)[:, :, :tokens]
            token, _ = codecs.encode(x, fmt)
            store = [*[plane for plane in token if plane is not None], torch.zeros(2, dtype=torch.int64)]
            want = oracles.expected(fmt, x)
            checks.assert_planes(store, fmt, want, f"{kind} T={tokens} {dtype}")
            assert np.array_equal(codecs.decode(store, fmt).numpy(), oracles.decoded(fmt, want))


@pytest.mark.parametrize("name", (*ROTATED, *WITH_OUTLIERS, "kivi4_keys", "kivi2_values", "int8_per_channel"))
def test_E4_head_dims(name: str) -> None:
    fmt = get_format(name)
    for head_dim in (1, 16, 24, 33, 64, 80, 96, 100, 256):
        x = torch.randn(1, 2, 3, head_dim)
        if head_dim % fmt.pack:
            for make_store in (
                lambda d=head_dim: fmt.empty_store(1, 2, 3, d),
                lambda x=x: kvq_ops.quantize(x, name),
                lambda d=head_dim: kvq_ops.QuantizedKV.empty((1, 2, 3, d), name),
            ):
                with pytest.raises(
                    errors.HeadDimError, match=rf"(?s)got:\s+head_dim {head_dim}.*multiple of {fmt.pack}"
                ):
                    make_store()
        else:
            assert kvq_ops.dequantize(kvq_ops.quantize(x, name), name).shape == x.shape
    if "int3" in name:
        assert 100 % fmt.pack


@pytest.mark.parametrize("name", (*ROTATED, *WITH_OUTLIERS))
def test_small_and_empty_shapes_and_bytes(name: str) -> None:
    fmt = get_format(name)
    for shape in ((1, 1, 1, 64), (3, 1, 2, 96), (2, 2, 0, 64), (0, 2, 3, 64), (2, 0, 3, 64)):
        for dtype in DTYPES:
            store = kvq_ops.quantize(torch.randn(shape, dtype=dtype), name)
            assert [tuple(p.shape) for p in store] == fmt.plane_shapes(*shape)
            assert kvq_ops.dequantize(store, name).shape == shape
            for made in (store, fmt.empty_store(*shape, dtype=dtype)):
                assert sum(p.untyped_storage().nbytes() for p in made) == fmt.nbytes(*shape, dtype)
    grown = fmt.nbytes(1, 2, 1001, 64) - fmt.nbytes(1, 2, 1, 64)
    assert fmt.bits_per_value(64) == pytest.approx(grown * 8 / (1000 * 2 * 64), rel=1e-12)


# ---------------------------------------------------------------------------------------------------------- rotation


@pytest.mark.parametrize("head_dim", [1, 2, 64, 80, 96, 100, 128, 33])
def test_the_rotation_is_hadamards(head_dim: int) -> None:
    n = head_dim & -head_dim
    x = torch.randn(3, 2, 5, head_dim)
    blocks = np.kron(np.eye(head_dim // n), oracle.hadamard(n))
    want = x.double().numpy() @ blocks
    size = np.abs(x.numpy()).astype(np.float64) @ np.abs(blocks)
    rounding = 2.0**-24 * (math.log2(n) + 2) * size
    assert (np.abs(hadamard(x).numpy() - want) <= rounding).all()
    assert np.array_equal(hadamard(x).numpy(), oracles.butterflies(x.numpy()))
    twice = hadamard(hadamard(x))
    assert (np.abs(twice.numpy() - x.numpy()) <= 4 * 2.0**-24 * (math.log2(n) + 2) * size.max()).all()
    permuted = blocks[:, np.random.default_rng(0).permutation(head_dim)]
    assert head_dim < 3 or (np.abs(hadamard(x).numpy() - x.double().numpy() @ permuted) > rounding).any()


@pytest.mark.parametrize(
    "kind", ["random", "int4_ties", "zero", "constant", "one_outlier", "all_positive", "tiny"]
)
@pytest.mark.parametrize("name", ROTATED)
def test_rotated_codes_equal_the_oracle(name: str, kind: str) -> None:
    for head_dim in checks.head_dims(get_format(name), 64, 96, 100):
        for dtype in DTYPES:
            assert_encoded(
                get_format(name), make(kind, (1, 2, 3, head_dim), dtype), f"{kind} D={head_dim} {dtype}"
            )


def test_rotation_spreads_an_outlier_and_keeps_scores() -> None:
    x = torch.randn(1, 1, 64, 128)
    x[..., 5] *= 50
    query = torch.randn(1, 1, 7, 128)
    exact = query @ x.transpose(-1, -2)

    def error(name: str) -> float:
        return float(
            (query @ kvq_ops.dequantize(kvq_ops.quantize(x, name), name).transpose(-1, -2) - exact).norm()
        )

    assert error("int4_per_token_head+hadamard") < 0.5 * error("int4_per_token_head")


# ---------------------------------------------------------------------------------------------------------- outliers


@pytest.mark.parametrize(
    "kind", ["random", "int4_ties", "zero", "constant", "one_outlier", "all_positive", "all_negative", "huge"]
)
@pytest.mark.parametrize("name", WITH_OUTLIERS)
def test_outliers_and_the_codes_beside_them_equal_the_oracle(name: str, kind: str) -> None:
    fmt = get_format(name)
    if kind == "huge" and fmt.rotation:
        kind = "random"  # sums beyond the largest number of fp32
    for head_dim in checks.head_dims(fmt, 64, 100):
        for dtype in DTYPES:
            assert_encoded(fmt, make(kind, (1, 2, 3, head_dim), dtype), f"{kind} D={head_dim} {dtype}")


@pytest.mark.parametrize("name", [n for n in WITH_OUTLIERS if not get_format(n).rotation])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_k_outliers_come_back_exactly(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    for head_dim, percent in ((64, fmt.outliers), (128, fmt.outliers)):
        count = max(1, round(head_dim * percent / 100))
        x = torch.randn(2, 2, 5, head_dim).to(dtype)
        store = kvq_ops.quantize(x, name)
        index = store[fmt.index("outlier_index")].long()
        assert index.shape[-1] == count and store[fmt.index("outlier_value")].dtype == dtype
        assert (index.diff(dim=-1) > 0).all(), "each once, in ascending order"
        back = kvq_ops.dequantize(store, name, dtype)
        assert torch.equal(back.gather(-1, index), x.gather(-1, index))
        # The codes know nothing of the outliers: other values in their places leave every plane but one as it is.
        moved = x.scatter(-1, index, x.gather(-1, index) + 8 * x.gather(-1, index).sign())
        again = kvq_ops.quantize(moved, name)
        for i, plane in enumerate(fmt.planes):
            if plane.name != "outlier_value":
                assert torch.equal(store[i], again[i]), plane.name


@pytest.mark.parametrize("name", WITH_OUTLIERS)
def test_F1_ties_take_the_lowest_indices(name: str) -> None:
    fmt = get_format(name)
    x = torch.zeros(1, 1, 2, 64) if fmt.rotation else torch.full((1, 1, 2, 64), 3.0)
    count = fmt.outlier_count(64)
    store = kvq_ops.quantize(x, name)
    assert (store[fmt.index("outlier_index")] == torch.arange(count)).all()
    back = kvq_ops.dequantize(store, name)
    assert torch.allclose(back, x, rtol=2.0**-5, atol=0) and back.isfinite().all()
    if "minimum" in [plane.name for plane in fmt.planes]:
        assert torch.equal(back, x)
        # Two values equally far from the median, the others on it.
        x = torch.zeros(1, 1, 1, 64)
        x[..., 40], x[..., 9] = 5.0, -5.0
        if not fmt.rotation and count == 1:
            assert kvq_ops.quantize(x, name)[fmt.index("outlier_index")].item() == 9


def test_the_outlier_that_is_kept_is_the_one_that_spoils_the_scale() -> None:
    """Seen from the middle of the range, the largest and the smallest value are equally far."""
    x = torch.randn(1, 1, 64, 64)
    x[..., 17] = 40.0
    store = kvq_ops.quantize(x, "int4_group32+outlier1%")
    assert (store[get_format("int4_group32+outlier1%").index("outlier_index")] == 17).all()
    error = (kvq_ops.dequantize(store, "int4_group32+outlier1%") - x).norm()
    assert error < 0.2 * (kvq_ops.dequantize(kvq_ops.quantize(x, "int4_group32"), "int4_group32") - x).norm()


# ------------------------------------------------------------------------------------------- values that are not finite


@pytest.mark.parametrize("name", (*ROTATED, *WITH_OUTLIERS))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_stay_in_their_place(name: str, bad: float) -> None:
    fmt = get_format(name)
    for dtype in DTYPES:
        clean = torch.randn(2, 2, 4, 64).to(dtype)
        spot = (1, 0, 2, 37)
        clean[spot] = 0.0
        dirty = clean.clone()
        dirty[spot] = bad
        before, after = kvq_ops.quantize(clean, name), fmt.empty_store(2, 2, 4, 64, dtype=dtype)
        for i in fmt.static_planes:
            after[i].copy_(before[i])  # fitted to all tokens, these would move with any of them
        kvq_ops.append_(after, torch.arange(4), dirty, name)
        assert all(plane.isfinite().all() for plane in after if plane.is_floating_point())
        a, b = (kvq_ops.dequantize(store, name, dtype) for store in (before, after))
        assert b.isfinite().all()
        if fmt.rotation or math.isnan(bad):
            assert torch.equal(a, b), "it counts as zero"
        others = torch.ones(a.shape, dtype=torch.bool)
        others[1, 0, 2] = False
        assert torch.equal(a[others], b[others]), "another token changed"
        if not fmt.rotation:
            if not fmt.outliers:
                others[1, 0, 2] = True
                others[spot] = False
                assert torch.equal(a[others], b[others]), "another channel changed"
            elif not math.isnan(bad):
                assert b[spot] == math.copysign(torch.finfo(dtype).max, bad)
    hopeless = torch.randn(1, 1, 3, 64)
    hopeless[0, 0, 1] = torch.tensor([math.nan, bad] * 32)
    assert kvq_ops.dequantize(kvq_ops.quantize(hopeless, name), name).isfinite().all()


@pytest.mark.parametrize("name", TOKEN_GROUPS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_spoil_no_other_token_of_their_group(name: str, bad: float) -> None:
    fmt = get_format(name).base
    assert fmt is not None
    clean = torch.randn(1, 2, 40, 16)
    clean[0, 1, 7, 3] = 0.0
    dirty = clean.clone()
    dirty[0, 1, 7, 3] = bad
    planes = []
    for x in (clean, dirty):
        token, _ = codecs.encode(x, fmt)
        planes.append([plane for plane in token if plane is not None])
    for a, b in zip(planes[0][1:], planes[1][1:], strict=True):
        assert torch.equal(a, b), "a scale moved"
    a, b = (codecs.decode([*p, torch.zeros(1)], fmt) for p in planes)
    assert b.isfinite().all()
    a[0, 1, 7, 3] = b[0, 1, 7, 3] = 0
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", ("int4_group32+outlier1%", "mxfp4+outlier1%", "int4_per_head_sym+hadamard"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_values_never_turn_infinite(name: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for x in (
        make("huge", (1, 2, 3, 64), dtype),
        torch.full((1, 1, 1, 64), largest, dtype=dtype),
        torch.tensor([largest, -largest] * 32, dtype=dtype).view(1, 1, 1, 64),
    ):
        store = kvq_ops.quantize(x, name)
        assert all(p.isfinite().all() for p in store if p.is_floating_point())
        assert kvq_ops.dequantize(store, name, dtype).isfinite().all()


# ------------------------------------------------------------------------------------------------------------- names


def test_names_are_understood() -> None:
    for name in (*checks.NAMES, *TOKEN_GROUPS, *ROTATED, *WITH_OUTLIERS):
        assert get_format(name).name == name
        assert get_format(name) is get_format(name)
    pair = parse_kv_format("kivi4+sink4")
    assert (pair.key.name, pair.value.name) == ("kivi4_keys+sink4", "kivi4_values+sink4")
    assert pair.key.recent == 128 and pair.key.sinks == 4 and pair.key.token_group == 32
    assert str(parse_kv_format("kivi2")) == "kivi2"
    mixed = parse_kv_format("key=kivi2+recent64+hadamard,value=int4_group32+sink4")
    assert mixed.key.recent == 64 and mixed.key.base is not None and mixed.key.base.rotation == "hadamard"
    assert mixed.value.sinks == 4 and mixed.value.recent == 0
    assert parse_kv_format(str(mixed)) == mixed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4_group32+recent", "recentR"),
        ("int4_group32+recent8+recent4", "twice"),
        ("int4_group32+hadmard", "hadamard"),
        ("int4_group32+outlier0%", "0 < P"),
        ("int4_group32+outlier51%", "0 < P"),
        ("int4_group32+outlier1", "outlierP%"),
        ("int4_group32+static", "each token"),
        ("turbo4+hadamard", "rotates"),
        ("int8_per_head_fp16", "did you mean"),
        ("int8_channel1", "did you mean"),
        ("none+recent4", "exact"),
        ("kivi4", "kivi4_keys or kivi4_values"),
        ("int4_group12", "did you mean"),
        ("int4_group0", "did you mean"),
        ("int5_group32", "did you mean"),
        ("mxfp5+recent4", "did you mean"),
        ("", "kv_names()"),
    ],
)
def test_names_that_mean_nothing_say_what_would(name: str, message: str) -> None:
    with pytest.raises(errors.FormatError) as raised:
        get_format(name)
    assert message in str(raised.value)

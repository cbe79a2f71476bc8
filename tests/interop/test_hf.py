"""Caches of transformers in the backends quanto and HQQ: layouts by index arithmetic, and the real packages where installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq_ops import QuantizedKV
from kvq_ops.cache import crop_, grow, load, save
from kvq_ops.errors import DtypeError, FormatError, KVQError, ShapeError
from kvq_ops.interop import hf
from tests.interop import foreign
from tests.ops.oracles import unpacked

SHAPE = (2, 1, 32, 64)
TOKENS = SHAPE[2]
TAILS = {torch.float16: "", torch.bfloat16: "_bf16", torch.float32: "_fp32"}


class Stored:
    """Random codes and parameters of groups, what they mean, and how each library would hold them."""

    def __init__(
        self, kind: str, bits: int, axis: int, group: int, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE
    ) -> None:
        rng = np.random.default_rng(bits + group)
        self.kind, self.bits, self.axis, self.group, self.shape = kind, bits, axis, group, shape
        count = int(np.prod(shape))
        groups = count // group
        first = axis == (0 if kind == "quanto" else 1)
        size = (groups, group) if first else (group, groups)
        parameters = (groups, 1) if first else (1, groups)
        self.grouped = rng.integers(0, 2**bits, size).astype(np.uint8)
        self.scale = torch.from_numpy(rng.lognormal(-2, 1, parameters)).to(dtype)
        self.offset = torch.from_numpy(rng.standard_normal(parameters)).to(dtype)
        index = foreign.quanto_group_index if kind == "quanto" else foreign.hqq_group_index
        self.where = [index(at, shape, axis, group) for at in np.ndindex(*shape)]
        self.first = first

    def spread(self, parameter: np.ndarray) -> np.ndarray:
        flat = parameter.reshape(-1)
        return np.array([flat[g] for g, _ in self.where]).reshape(self.shape)

    @property
    def codes(self) -> np.ndarray:
        pick = [self.grouped[g, i] if self.first else self.grouped[i, g] for g, i in self.where]
        return np.array(pick, np.uint8).reshape(self.shape)

    @property
    def values(self) -> np.ndarray:
        """In float64, without any rounding."""
        s = self.spread(self.scale.double().numpy())
        o = self.spread(self.offset.double().numpy())
        return s * self.codes - o if self.kind == "quanto" else s * (self.codes - o)

    def read(self, **options: Any) -> QuantizedKV:
        if self.kind == "quanto":
            packed = torch.from_numpy(foreign.pack_rows_low_first(self.grouped, self.bits))
            return hf.read_quanto_parts(
                packed,
                self.scale,
                self.offset,
                bits=self.bits,
                axis=self.axis,
                group_size=self.group,
                shape=self.shape,
                **options,
            )
        return hf.read_hqq(
            torch.from_numpy(foreign.pack_rows_high_first(self.grouped, self.bits)), self.meta, **options
        )

    @property
    def meta(self) -> dict[str, Any]:
        return {
            "nbits": self.bits,
            "group_size": self.group,
            "axis": self.axis,
            "shape": torch.Size(self.shape),
            "scale": self.scale,
            "zero": self.offset,
            "packing": {4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8"}[self.bits],
            "view_as_float": False,
        }


def powers_of_two(scale: Tensor) -> Tensor:
    """So that the product with a small whole number is a 16-bit number."""
    return torch.exp2(scale.log2().round().clamp(-8, 8))


def own_codes(handle: QuantizedKV) -> np.ndarray:
    return unpacked(handle.planes()[0].numpy(), handle.format.bits)


# ------------------------------------------------------------------------------------------------------ exact imports


@pytest.mark.parametrize("dtype", TAILS)
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 32), (4, 16), (2, 64), (2, 8)])
def test_quanto_over_channels_is_exact(bits: int, group: int, dtype: torch.dtype) -> None:
    stored = Stored("quanto", bits, 0, group, dtype)
    cache = stored.read()
    assert cache.format.name == f"int{bits}_group{group}{TAILS[dtype]}" and cache.dtype is dtype
    assert cache.shape == SHAPE and cache.length.tolist() == [TOKENS] * 2
    assert np.array_equal(own_codes(cache), stored.codes)
    scale, minimum = cache.planes()[1:3]
    assert scale.dtype is minimum.dtype is dtype
    assert torch.equal(scale.flatten(), stored.scale.flatten())
    assert torch.equal(minimum.flatten(), -stored.offset.flatten())
    # Read in fp32: one rounding of the product, one of the sum.
    got = stored.read(dtype=torch.float32).dequantize().numpy()
    product = stored.spread(stored.scale.float().numpy()) * stored.codes.astype(np.float32)
    assert np.array_equal(got, product - stored.spread(stored.offset.float().numpy()))
    if dtype is not torch.float32:
        assert np.array_equal(got, stored.values.astype(np.float32)), "products of 16-bit numbers are exact"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (2, 32), (4, 16)])
def test_quanto_over_tokens_is_exact(bits: int, group: int, dtype: torch.dtype) -> None:
    stored = Stored("quanto", bits, -1, group, dtype)
    cache = stored.read(dtype=torch.float32)
    assert (
        cache.format.name == f"int{bits}_channel{group}{TAILS[dtype]}+recent128"
        and cache.plane_coded.tolist() == [TOKENS] * 2
    )
    assert np.array_equal(own_codes(cache), stored.codes)
    assert np.array_equal(cache.dequantize().numpy(), stored.values.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_hqq_over_channels_is_exact(bits: int, dtype: torch.dtype) -> None:
    stored = Stored("hqq", bits, 1, 64, dtype)
    cache = stored.read(dtype=torch.float32)
    assert cache.format.name == f"int{bits}_group64_fp32"
    assert np.array_equal(own_codes(cache), stored.codes)
    scale, minimum = cache.planes()[1:3]
    assert torch.equal(scale.flatten(), stored.scale.float().flatten())
    assert torch.equal(
        minimum.double().flatten(), -(stored.scale.double() * stored.offset.double()).flatten()
    )
    # The minimum is exact; the sum is rounded once, and cancels where a code is near the zero.
    size = np.abs(stored.spread((stored.scale.double() * stored.offset.double()).numpy())) + np.abs(
        stored.values
    )
    assert (np.abs(cache.dequantize().double().numpy() - stored.values) <= size * 2.0**-24).all()


def test_a_format_of_16_bits_takes_parameters_that_are_such_numbers() -> None:
    stored = Stored("quanto", 4, 0, 64, torch.float16)
    stored.scale, stored.offset = stored.scale.float(), stored.offset.float()
    cache = stored.read(format="int4_group64")
    assert cache.format.name == "int4_group64" and cache.dtype is torch.float32
    assert np.array_equal(cache.dequantize().numpy(), stored.values.astype(np.float32))
    stored = Stored("hqq", 4, 1, 64, torch.float16)
    stored.offset = (stored.offset * 4).round()
    stored.scale = powers_of_two(stored.scale)
    cache = stored.read(format="int4_group64", dtype=torch.float32)
    assert np.array_equal(cache.dequantize().double().numpy(), stored.values)


def test_quanto_with_integer_shift() -> None:
    stored = Stored("quanto", 4, 0, 64, torch.float16)
    stored.scale = powers_of_two(stored.scale)
    shift = (stored.offset * 3 + 7).round().clamp(0, 15)
    stored.offset = shift * stored.scale  # what it means
    want = stored.values
    stored.offset = shift.to(torch.uint8)
    assert np.array_equal(stored.read(dtype=torch.float32).dequantize().double().numpy(), want)


@pytest.mark.parametrize(("kind", "axis", "wrong"), [("quanto", 0, "high"), ("hqq", 1, "low")])
def test_nibbles_the_other_way_are_seen(kind: str, axis: int, wrong: str) -> None:
    stored = Stored(kind, 4, axis, 64, torch.float16)
    stored.offset = (stored.offset * 4).round()
    right = stored.read(requantize=True)
    packer = "pack_rows_low_first" if wrong == "low" else "pack_rows_high_first"
    other = {"low": "high", "high": "low"}[wrong]
    name = f"pack_rows_{other}_first"
    keep = getattr(foreign, name)
    try:
        setattr(foreign, name, getattr(foreign, packer))
        broken = stored.read(requantize=True)
    finally:
        setattr(foreign, name, keep)
    assert np.array_equal(own_codes(right), stored.codes) and not np.array_equal(
        own_codes(broken), stored.codes
    )


def test_scales_of_other_groups_are_seen() -> None:
    stored = Stored("quanto", 4, -1, 32, torch.float16)
    want = stored.values
    stored.scale = stored.scale.roll(1)
    assert not np.allclose(stored.read().dequantize().double().numpy(), want)


# ---------------------------------------------------------------------------------------------- what is not exact


HALF = torch.float16
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "fp32 scales": (
        ("quanto", 4, 0, 64, torch.float32),
        {"format": "int4_group64"},
        "scale that is no float16 number",
    ),
    "HQQ's product": (
        ("hqq", 4, 1, 64, HALF),
        {"format": "int4_group64"},
        "minimum that is no float16 number",
    ),
    "a product of fp32": (("hqq", 4, 1, 64, torch.float32), {}, "minimum that is no float32 number"),
    "groups of two tokens": (("quanto", 4, 0, 128, HALF), {}, "across tokens"),
    "groups over heads": (("hqq", 4, 0, 64, HALF), {}, "across tokens"),
    "groups of 64 tokens": (
        ("quanto", 4, -1, 64, HALF, (1, 1, 64, 32)),
        {"format": "kivi4_keys"},
        "64 tokens of a channel",
    ),
    "groups over two heads": (("quanto", 4, -1, 64, HALF, (1, 2, 32, 16)), {}, "across tokens"),
    "groups that no row has": (("quanto", 4, 0, 20, HALF, (1, 1, 8, 40)), {}, "groups of 20 channels"),
    "other groups than the row's": (
        ("quanto", 4, 0, 64, HALF),
        {"format": "int4_group32"},
        "groups of 64 channels",
    ),
    "other bits than the row's": (("quanto", 2, 0, 64, HALF), {"format": "int4_group64"}, "2-bit codes"),
    "another number system": (("quanto", 4, 0, 64, HALF), {"format": "nvfp4"}, "4-bit codes"),
    "first tokens": (("quanto", 4, 0, 64, HALF), {"format": "int4_group64+sink4"}, "first tokens"),
    "newest tokens": (
        ("quanto", 4, 0, 64, HALF),
        {"format": "int4_group64", "residual": torch.ones(2, 1, 5, 64).half()},
        "5 dense newest tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inexact_imports_ask_first(case: str) -> None:
    arguments, options, why = REFUSED[case]
    stored = Stored(*arguments)
    with pytest.raises(FormatError, match="an exact import") as raised:
        stored.read(**options)
    assert why in raised.value.got and "requantize=True" in raised.value.do
    cache = stored.read(requantize=True, **options)
    residual = options.get("residual")
    dense = stored.values
    dense = dense if residual is None else np.concatenate([dense, residual.double().numpy()], 2)
    assert cache.shape == dense.shape and cache.length.tolist() == [dense.shape[2]] * dense.shape[0]
    # No worse than coding the decoded values in the same row.
    again = QuantizedKV.from_dense(torch.from_numpy(dense).to(cache.dtype), cache.format)
    error = np.abs(cache.dequantize().double().numpy() - dense).mean()
    assert error <= np.abs(again.dequantize().double().numpy() - dense).mean() * 1.0001


def test_only_the_minimum_is_rounded_where_the_groups_fit() -> None:
    stored = Stored("hqq", 4, 1, 64, torch.float16)
    cache = stored.read(requantize=True, dtype=torch.float32, format="int4_group64")
    assert np.array_equal(own_codes(cache), stored.codes)
    assert torch.equal(cache.planes()[1].flatten(), stored.scale.flatten())
    bound = np.abs(stored.spread((stored.offset.double() * stored.scale.double()).numpy())) * 2.0**-11
    assert (np.abs(cache.dequantize().double().numpy() - stored.values) <= bound + 1e-6).all()


# ------------------------------------------------------------------------------------------------------ exact tails


@pytest.mark.parametrize("axis", [0, -1])
def test_newest_tokens_stay_exact_and_the_cache_goes_on(axis: int, tmp_path: Any) -> None:
    stored = Stored("quanto", 4, axis, 32, torch.float16)
    residual = torch.randn(2, 1, 7, 64).half()
    cache = stored.read(residual=residual)
    assert cache.format.name == ("int4_group32" if axis == 0 else "int4_channel32") + "+recent128"
    dense = cache.dequantize()
    assert torch.equal(dense[:, :, TOKENS:], residual)
    assert np.array_equal(dense[:, :, :TOKENS].numpy(), stored.values.astype(np.float32).astype(np.float16))
    # It is a cache like any other: it takes more tokens, can be cut and stored.
    save([cache], tmp_path / "cache")
    (again,) = load(tmp_path / "cache")
    more = grow(again, TOKENS + 16)
    new = torch.randn(2, 1, 3, 64).half()
    more[:, :, TOKENS + 7 : TOKENS + 10] = new
    assert more.length.tolist() == [TOKENS + 10] * 2
    assert torch.equal(more.dequantize()[:, :, TOKENS : TOKENS + 10], torch.cat([residual, new], 2))
    crop_(more, TOKENS + 6)
    assert torch.equal(more.dequantize()[:, :, : TOKENS + 6], dense[:, :, : TOKENS + 6])


def test_a_tail_longer_than_the_window() -> None:
    stored = Stored("quanto", 4, 0, 32, torch.float16)
    residual = torch.randn(2, 1, 9, 64).half()
    with pytest.raises(ShapeError, match=r"\+recentR"):
        stored.read(residual=residual, format="int4_group32+recent8")
    cache = stored.read(residual=residual[:, :, :8], format="int4_group32+recent8")
    assert torch.equal(cache.dequantize()[:, :, TOKENS:], residual[:, :, :8])


# --------------------------------------------------------------------------------------------------- what is refused


def _broken() -> dict[str, tuple[type[KVQError], str, dict[str, Any]]]:
    return {
        "bits": (FormatError, "3 bits", {"bits": 3}),
        "axis": (FormatError, "axis 1", {"axis": 1}),
        "no groups": (FormatError, "group size None", {"group_size": None}),
        "groups that do not divide": (FormatError, "group size 24", {"group_size": 24}),
        "three axes": (ShapeError, "B, H, T, D", {"shape": SHAPE[1:]}),
        "another shape": (ShapeError, "codes of", {"shape": (1, *SHAPE[1:])}),
        "wide codes": (DtypeError, "int32", {"packed": torch.zeros(32, 64, dtype=torch.int32)}),
        "scales of one group": (ShapeError, "scale of", {"scale": torch.ones(1, 1)}),
        "scales of fp64": (DtypeError, "scale of", {"scale": torch.ones(64, 1, dtype=torch.float64)}),
        "shift of another kind": (DtypeError, "shift of", {"shift": torch.ones(64, 1, dtype=torch.int64)}),
        "a residual of another shape": (ShapeError, "residual", {"residual": torch.zeros(2, 1, 64)}),
        "a residual of another dtype": (DtypeError, "residual", {"residual": torch.zeros(2, 1, 1, 64)}),
        "an unknown row": (FormatError, "int5", {"format": "int5_group64"}),
    }


@pytest.mark.parametrize("case", _broken())
def test_parts_that_are_refused(case: str) -> None:
    error, message, change = _broken()[case]
    good = {
        "packed": torch.zeros(32, 64, dtype=torch.uint8),
        "scale": torch.ones(64, 1).half(),
        "shift": torch.zeros(64, 1).half(),
        "bits": 4,
        "axis": 0,
        "group_size": 64,
        "shape": SHAPE,
    }
    hf.read_quanto_parts(**good)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        hf.read_quanto_parts(**(good | change))  # type: ignore[arg-type]


def test_hqq_descriptions_that_are_refused() -> None:
    stored = Stored("hqq", 4, 1, 64, torch.float16)
    packed = torch.from_numpy(foreign.pack_rows_high_first(stored.grouped, 4))
    hf.read_hqq(packed, stored.meta, requantize=True)
    for change, message in (
        ({"nbits": 8}, "8 bits"),
        ({"axis": -1}, "axis -1"),
        ({"packing": "2bit_u8"}, "2bit_u8"),
        ({"group_size": 24}, "group size 24"),
        ({"scale": stored.scale[:1]}, "scale of"),
        ({"shape": SHAPE[1:]}, "B, H, T, D"),
    ):
        with pytest.raises(KVQError, match=message):
            hf.read_hqq(packed, stored.meta | change)
    with pytest.raises(FormatError, match="no zero"):
        hf.read_hqq(packed, {k: v for k, v in stored.meta.items() if k != "zero"})
    with pytest.raises(ShapeError, match="codes of"):
        hf.read_hqq(packed[1:], stored.meta)
    # Codes in the guise of floats, and codes that are not packed.
    as_float = hf.read_hqq(packed.view(torch.float16), stored.meta | {"view_as_float": True}, requantize=True)
    plain = hf.read_hqq(
        torch.from_numpy(stored.grouped).half(), stored.meta | {"packing": None}, requantize=True
    )
    for cache in (as_float, plain):
        assert np.array_equal(own_codes(cache), stored.codes)


def test_something_else_than_a_quanto_tensor() -> None:
    for other in (torch.randn(2, 2, 4, 64), None, QuantizedKV.empty((1, 1, 4, 64), "int4_group64")):
        with pytest.raises(DtypeError, match="QBitsTensor"):
            hf.read_quanto(other)
        with pytest.raises(DtypeError, match="quantized keys"):
            hf.read_layer(other)


# ------------------------------------------------------------------------------------------- the packages themselves


def _quantized_cache(
    backend: str, dtype: torch.dtype, tokens: int, **options: Any
) -> tuple[Any, Tensor, Tensor]:
    """One layer of a transformers cache after a prefill of ``tokens`` and three more, and what it returns next."""
    utils = pytest.importorskip("transformers.cache_utils", reason="transformers is not installed")
    if backend == "quanto":
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
        layer = utils.QuantoQuantizedLayer(**options)
    else:
        pytest.importorskip("hqq", reason="hqq is not installed")
        layer = utils.HQQQuantizedLayer(**options)
    for count in (tokens, 2, 1):
        keys = torch.randn(2, 2, count, 64).to(dtype)
        layer.update(keys, keys * 2 + 1)
    keys = layer._dequantize(layer._quantized_keys)
    values = layer._dequantize(layer._quantized_values)
    return layer, torch.cat([keys, layer.keys], 2), torch.cat([values, layer.values], 2)


@pytest.mark.parametrize("nbits", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_quanto_layer_of_transformers(nbits: int, dtype: torch.dtype) -> None:
    layer, keys, values = _quantized_cache(
        "quanto", dtype, 32, nbits=nbits, axis_key=-1 if dtype is torch.float16 else 0, q_group_size=32
    )
    key, value = hf.read_layer(layer)
    assert key.format.name == (
        f"int{nbits}_channel32+recent128" if dtype is torch.float16 else f"int{nbits}_group32_bf16+recent128"
    )
    for handle, want in ((key, keys), (value, values)):
        got = handle.dequantize()
        assert got.shape == want.shape and torch.equal(got[:, :, 32:], want[:, :, 32:])
        # They round the product and the sum to the model's dtype, and the sum may cancel.
        bound = torch.finfo(dtype).eps * (want.abs() + want.abs().amax())
        assert bool(((got - want).abs() <= bound).all())
    # As exact as it says: the stored numbers themselves are equal, in fp32.
    raw = layer._quantized_values
    grouped = raw._data.unpack().float() * raw._scale.float() - raw._shift.float()
    again = hf.read_quanto(raw, dtype=torch.float32).dequantize()
    assert torch.equal(again, grouped.reshape(again.shape))


@pytest.mark.parametrize("nbits", [4, 2])
def test_an_hqq_layer_of_transformers(nbits: int) -> None:
    layer, keys, values = _quantized_cache(
        "hqq", torch.float16, 32, nbits=nbits, axis_key=1, axis_value=1, q_group_size=64
    )
    key, value = hf.read_layer(layer)
    for handle, want, stored in (
        (key, keys, layer._quantized_keys),
        (value, values, layer._quantized_values),
    ):
        assert handle.format.name == f"int{nbits}_group64_fp32+recent128"
        got = handle.dequantize()
        assert torch.equal(got[:, :, 32:], want[:, :, 32:])
        # They round the difference of code and zero, and the product, to fp16.
        bound = (want.abs() + 2**nbits * stored[1]["scale"].max()) * 2.0**-10
        assert bool(((got - want).abs() <= bound).all())


def test_an_hqq_layer_over_the_first_axis() -> None:
    layer, keys, _ = _quantized_cache(
        "hqq", torch.float16, 32, nbits=4, axis_key=0, axis_value=1, q_group_size=64
    )
    with pytest.raises(FormatError, match="across tokens"):
        hf.read_layer(layer)
    key, _ = hf.read_layer(layer, requantize=True)
    assert key.format.name == "int4_group32_fp32+recent128"
    # Coded again: half a step of its own groups, at most.
    step = (keys.unflatten(-1, (-1, 32)).amax(-1) - keys.unflatten(-1, (-1, 32)).amin(-1)) / 15
    assert bool(((key.dequantize() - keys).abs() <= step.repeat_interleave(32, -1) * 0.51).all())


def test_three_bits_of_hqq() -> None:
    """Not through transformers: HQQ's own reader takes 3-bit codes of matrices only."""
    pytest.importorskip("hqq", reason="hqq is not installed")
    from hqq.core.quantize import Quantizer

    x = torch.randn(2, 2, 30, 64).half()
    packed, meta = Quantizer.quantize(
        x.reshape(-1, 64), nbits=3, axis=1, group_size=64, device="cpu", compute_dtype=torch.float16
    )
    want = Quantizer.dequantize(packed, meta | {"compute_dtype": torch.float32}).reshape(x.shape)
    # Its scales are still fp32 here; a cache of transformers casts them to the dtype of the model.
    meta = meta | {"shape": x.shape, "scale": meta["scale"].half(), "zero": meta["zero"].half()}
    cache = hf.read_hqq(packed, meta, dtype=torch.float32)
    assert cache.format.name == "int3_group64_fp32"
    assert (cache.dequantize() - want).abs().max() <= want.abs().max() * 2.0**-9

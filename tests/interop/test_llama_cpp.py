"""Blocks of llama.cpp, q8_0 and q4_0."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq_ops import QuantizedKV, get_format, register_format
from kvq_ops.codecs import integer, register_codec
from kvq_ops.codecs.packing import unpack
from kvq_ops.errors import CapacityError, DtypeError, FormatError, ShapeError, UnknownFormatError
from kvq_ops.formats import Format, Plane
from kvq_ops.interop import llama_cpp
from tests.interop import foreign
from tests.ops import checks

SHAPE = (2, 3, 5, 64)


class _Offset8:
    """4-bit codes ``c`` that mean ``(c - 8) s``; only its decoding is used here."""

    calibrate = staticmethod(integer.calibrate)

    @staticmethod
    def encode(x: Tensor, fmt: Format, static: Mapping[str, Tensor]) -> dict[str, Tensor]:
        raise AssertionError("an import encodes nothing")

    @staticmethod
    def decode(planes: Mapping[str, Tensor], fmt: Format) -> Tensor:
        q = unpack(planes["codes"], 4).float() - 8
        return q * planes["scale"].float().repeat_interleave(32, -1)


CODEC = _Offset8()
SCALE = Plane("scale", "BHTD", torch.float16, per=32)


@pytest.fixture(scope="module", autouse=True)
def rows() -> None:
    """Rows of our own for such blocks: an importer takes any row whose codes mean the same."""
    register_codec("offset8_for_tests", CODEC)
    register_format(
        Format(
            "q8_0_for_tests",
            "integer",
            8,
            (Plane("codes", "BHTD", torch.int8), SCALE),
            group=32,
            summary="int8 codes, fp16 scale for 32 channels",
        ),
        listed=False,
    )
    register_format(
        Format(
            "q4_0_for_tests",
            "offset8_for_tests",
            4,
            (Plane("codes", "BHTD", torch.uint8, per=2), SCALE),
            group=32,
            pack=2,
            summary="4-bit codes around 8, fp16 scale for 32 channels",
        ),
        listed=False,
    )


def rows_for(kind: str) -> list[str]:
    return [f"{kind}_for_tests", {"q8_0": "int8_group32_sym", "q4_0": "int4_group32_sym"}[kind]]


ALL = [(kind, name) for kind in ("q8_0", "q4_0") for name in rows_for(kind)]
READ = {"q8_0": llama_cpp.read_q8_0, "q4_0": llama_cpp.read_q4_0}
WRITE = {"q8_0": llama_cpp.write_q8_0, "q4_0": llama_cpp.write_q4_0}
ENCODE = {"q8_0": foreign.q8_0, "q4_0": foreign.q4_0}
VALUES = {"q8_0": foreign.q8_0_values, "q4_0": foreign.q4_0_values}
SIZE = {"q8_0": 34, "q4_0": 18}


def values() -> np.ndarray:
    x = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
    x[0, 0, 0, :32] = 0
    x[0, 0, 1, :32] = 0.5
    x[0, 1, 0, 0] = -100  # the largest magnitude negative, and positive
    x[0, 1, 1, 0] = 100
    return x


@pytest.mark.parametrize(("kind", "name"), ALL)
class TestBlocks:
    def test_values_are_theirs(self, kind: str, name: str) -> None:
        blocks = ENCODE[kind](values())
        cache = READ[kind](torch.from_numpy(blocks), name, dtype=torch.float32)
        assert cache.shape == SHAPE and cache.length.tolist() == [5, 5] and cache.format.name == name
        assert np.array_equal(cache.dequantize().numpy(), VALUES[kind](blocks))

    def test_every_byte_survives(self, kind: str, name: str) -> None:
        """Any code, and scales of any sign and size: what is written is what was read."""
        rng = np.random.default_rng(5)
        blocks = rng.integers(0, 256, (*SHAPE[:3], 2, SIZE[kind])).astype(np.uint8)
        scale = rng.standard_normal((*SHAPE[:3], 2)).astype(np.float16)
        blocks[..., :2] = scale.view(np.uint8).reshape(*scale.shape, 2)
        flat = blocks.reshape(*SHAPE[:3], -1)
        cache = READ[kind](torch.from_numpy(flat), name, dtype=torch.float32)
        assert np.array_equal(cache.dequantize().numpy(), VALUES[kind](flat))
        assert torch.equal(WRITE[kind](cache), torch.from_numpy(flat))

    def test_a_llama_cpp_cache_in_its_own_axes(self, kind: str, name: str) -> None:
        blocks = torch.from_numpy(ENCODE[kind](values()))[0].transpose(0, 1).contiguous()
        cache = READ[kind](blocks, name, axes="thd", dtype=torch.float32)
        assert cache.shape == (5, 3, 64) and cache.axes == "thd"
        assert np.array_equal(cache.dequantize().numpy(), VALUES[kind](blocks.numpy()))
        assert torch.equal(WRITE[kind](cache), blocks)

    def test_lengths(self, kind: str, name: str) -> None:
        blocks = torch.from_numpy(ENCODE[kind](values()))
        cache = READ[kind](blocks, name, length=torch.tensor([5, 2]), dtype=torch.float32)
        assert cache.length.tolist() == [5, 2]
        want = VALUES[kind](blocks.numpy())
        want[1, :, 2:] = 0
        assert np.array_equal(cache.dequantize().numpy(), want)
        for wrong in (6, -1, torch.tensor([5, 6]), torch.tensor([1, 2, 3])):
            with pytest.raises(CapacityError, match="length of"):
                READ[kind](blocks, name, length=wrong)

    def test_bad_blocks(self, kind: str, name: str) -> None:
        blocks = torch.from_numpy(ENCODE[kind](values()))
        with pytest.raises(ShapeError, match=f"multiple of {SIZE[kind]}"):
            READ[kind](blocks[..., :-1], name)
        with pytest.raises(ShapeError, match="last axis"):
            READ[kind](blocks[..., :0], name)
        with pytest.raises(DtypeError, match="uint8"):
            READ[kind](blocks.view(torch.int8), name)
        with pytest.raises(FormatError, match="d last"):
            READ[kind](blocks, name, axes="bhdt")
        with pytest.raises(DtypeError, match="dtype of a cache"):
            READ[kind](blocks, name, dtype=torch.float64)


def test_nibbles_the_other_way_are_seen() -> None:
    blocks = foreign.q4_0(values(), neighbours=True)
    cache = llama_cpp.read_q4_0(torch.from_numpy(blocks), "q4_0_for_tests", dtype=torch.float32)
    assert not np.array_equal(cache.dequantize().numpy(), VALUES["q4_0"](foreign.q4_0(values())))


def test_swapped_scales_are_seen() -> None:
    blocks = foreign.q8_0(values()).reshape(*SHAPE[:3], 2, 34)
    broken = blocks.copy()
    broken[..., :2] = blocks[..., ::-1, :2]
    cache = llama_cpp.read_q8_0(
        torch.from_numpy(broken.reshape(*SHAPE[:3], -1)), "q8_0_for_tests", dtype=torch.float32
    )
    assert not np.array_equal(cache.dequantize().numpy(), foreign.q8_0_values(blocks.reshape(*SHAPE[:3], -1)))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_the_reference_of_llama_cpp_agrees(kind: str) -> None:
    quants = pytest.importorskip("gguf.quants", reason="gguf is not installed")
    blocks = getattr(quants, kind.upper()).quantize(values())
    assert np.array_equal(blocks, ENCODE[kind](values()))
    cache = READ[kind](torch.from_numpy(blocks), f"{kind}_for_tests", dtype=torch.float32)
    assert np.array_equal(cache.dequantize().numpy(), getattr(quants, kind.upper()).dequantize(blocks))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_rows_that_do_not_hold_such_blocks(kind: str) -> None:
    blocks = torch.from_numpy(ENCODE[kind](values()))
    with pytest.raises(UnknownFormatError, match=f"a row for {kind} blocks") as raised:
        READ[kind](blocks, "int5_group32_symmetric")
    assert "fp16 scale for 32 channels" in raised.value.allowed and "register" in raised.value.do
    other = {"q8_0": "q4_0", "q4_0": "q8_0"}[kind]
    for name in (
        "int8_per_token_head",
        "int4_group32",
        "none",
        "nvfp4",
        f"{other}_for_tests",
        f"{kind}_for_tests+hadamard",
    ):
        with pytest.raises(FormatError, match=f"a row for {kind} blocks"):
            READ[kind](blocks, name)
    cache = QuantizedKV.from_dense(torch.from_numpy(values()), "int4_group32")
    with pytest.raises(FormatError, match=f"a row for {kind} blocks"):
        WRITE[kind](cache)
    with pytest.raises(DtypeError, match="QuantizedKV"):
        WRITE[kind](torch.from_numpy(values()))


def test_a_row_with_the_right_planes_and_another_meaning() -> None:
    """Codes from 0 on: only decoding tells."""

    class Unsigned(_Offset8):
        @staticmethod
        def decode(planes: Mapping[str, Tensor], fmt: Format) -> Tensor:
            return unpack(planes["codes"], 4).float() * planes["scale"].float().repeat_interleave(32, -1)

    register_codec("unsigned4_for_tests", Unsigned())
    row = dataclasses.replace(
        get_format("q4_0_for_tests"), name="unsigned4_for_tests", codec="unsigned4_for_tests"
    )
    register_format(row, listed=False)
    with pytest.raises(FormatError, match="a row for q4_0 blocks"):
        llama_cpp.read_q4_0(torch.from_numpy(foreign.q4_0(values())), "unsigned4_for_tests")


def test_attention_reads_an_imported_cache() -> None:
    x = values()
    cache = llama_cpp.read_q8_0(torch.from_numpy(foreign.q8_0(x)), "q8_0_for_tests", dtype=torch.float32)
    query = torch.randn(2, 6, 1, 64)
    store, name = cache.store, cache.format.name
    out = torch.ops.kvq.attention(query, store, store, name, name, scale=0.125)
    want = checks.oracle.attention(query.numpy(), *[foreign.q8_0_values(foreign.q8_0(x))] * 2, scale=0.125)
    assert np.abs(out.numpy() - want).max() < 1e-5 * np.abs(want).max()

"""NVFP4 pages of vLLM and FlashInfer: read, written, encoded; and what is refused."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor

from kvq_ops import QuantizedKV
from kvq_ops.errors import CapacityError, DtypeError, FormatError, KVQError, ShapeError
from kvq_ops.interop import vllm
from tests.interop import foreign
from tests.ops import oracle_numbers, oracles

F32 = np.float32
PAGES, PAGE, HEADS, DIM = 4, 8, 3, 64
ROW = 9 * DIM // 16
LENGTHS = torch.tensor([13, 6])
TABLE = torch.tensor([[2, 0], [3, 77]], dtype=torch.int32)
ORDERS = ("linear", "swizzled")
SCALES = {"key_decode_scale": 0.5, "value_decode_scale": 0.0078125}
E4M3 = torch.float8_e4m3fn


def table_slots() -> np.ndarray:
    slots = np.full((2, 13), -1)
    for b, length in enumerate(LENGTHS.tolist()):
        for t in range(length):
            slots[b, t] = int(TABLE[b, t // PAGE]) * PAGE + t % PAGE
    return slots


def random_sides() -> list[foreign.Planes]:
    rng = np.random.default_rng(11)
    shape = (2, HEADS, 13, DIM)
    return [
        {
            "codes": rng.integers(0, 16, shape).astype(np.uint8),
            "block_scale": rng.integers(0, 127, (*shape[:3], DIM // 16)).astype(np.uint8),
        }
        for _ in range(2)
    ]


def filled(
    sides: list[foreign.Planes],
    layout: str,
    memory: str,
    order: str,
    slots: np.ndarray | None = None,
    **wrong: bool,
) -> Tensor:
    """Pages in logical ``layout`` whose memory runs as ``memory`` says."""
    flat = np.full(PAGES * 2 * PAGE * HEADS * ROW, 0xA5, np.uint8)
    slots = table_slots() if slots is None else slots
    foreign.fill_nvfp4(flat, memory, sides, slots, PAGE, order == "swizzled", **wrong)
    middle = (PAGE, HEADS) if memory == "NHD" else (HEADS, PAGE)
    pages = torch.from_numpy(flat).view(PAGES, 2, *middle, ROW)
    return pages if layout == memory else pages.transpose(2, 3)


def blank(like: Tensor) -> Tensor:
    """Pages of the same shape and strides, full of another byte."""
    return torch.full_like(like, 0xA5)


def matches(handle: QuantizedKV, planes: foreign.Planes) -> bool:
    codes = oracles.unpacked(handle.planes()[0].numpy(), 4)
    scales = handle.planes()[1].numpy()
    return all(
        np.array_equal(got[b, :, :length], want[b, :, :length]) and not got[b, :, length:].any()
        for b, length in enumerate(LENGTHS.tolist())
        for got, want in ((codes, planes["codes"]), (scales, planes["block_scale"]))
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("memory", ["NHD", "HND"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
class TestReading:
    def test_codes_and_scales_are_copied(self, layout: str, memory: str, order: str) -> None:
        sides = random_sides()
        pages = filled(sides, layout, memory, order)
        key, value = vllm.read_nvfp4(
            pages, TABLE, LENGTHS, value_scales=order, layout=layout, dtype=torch.float32, **SCALES
        )
        assert key.format.name == value.format.name == "nvfp4" and key.length.tolist() == [13, 6]
        assert matches(key, sides[0]) and matches(value, sides[1])
        for handle, planes, g in zip((key, value), sides, SCALES.values(), strict=True):
            sf = oracle_numbers.float8_values(planes["block_scale"], E4M3)
            want = oracle.nvfp4_decode(planes["codes"], sf, g)
            got = handle.dequantize().numpy()
            assert np.array_equal(got[0], want[0]) and np.array_equal(got[1, :, :6], want[1, :, :6])

    @pytest.mark.parametrize("wrong", ["swap_nibbles", "swap_sides", "interleaved"])
    def test_a_wrong_layout_is_seen(self, layout: str, memory: str, order: str, wrong: str) -> None:
        sides = random_sides()
        pages = filled(sides, layout, memory, order, **{wrong: True})
        key, value = vllm.read_nvfp4(pages, TABLE, LENGTHS, value_scales=order, layout=layout, **SCALES)
        assert not matches(key, sides[0]) and not matches(value, sides[1])

    def test_the_wrong_order_of_scales_is_seen(self, layout: str, memory: str, order: str) -> None:
        sides = random_sides()
        other = ORDERS[1 - ORDERS.index(order)]
        pages = filled(sides, layout, memory, other)
        key, value = vllm.read_nvfp4(pages, TABLE, LENGTHS, value_scales=order, layout=layout, **SCALES)
        assert matches(key, sides[0]) and not matches(value, sides[1])

    def test_written_pages_are_the_bytes_that_were_read(self, layout: str, memory: str, order: str) -> None:
        pages = filled(random_sides(), layout, memory, order)
        key, value = vllm.read_nvfp4(
            pages, TABLE, LENGTHS, value_scales=order, layout=layout, capacity=15, **SCALES
        )
        again = blank(pages)
        assert again.stride() == pages.stride()
        slots = vllm.slot_mapping(TABLE, LENGTHS, PAGE)
        given = vllm.write_nvfp4(again, key, value, slots, value_scales=order, layout=layout, **SCALES)
        assert torch.equal(again, pages)
        assert [scale.tolist() for scale in given] == [[s] for s in SCALES.values()]

    def test_encoding_by_their_rule(self, layout: str, memory: str, order: str) -> None:
        dense = [torch.randn(2, HEADS, 13, DIM) for _ in range(2)]
        dense[0][0, 0, 0, :16] = 1e-5  # too small for its scale: erased, as they do
        dense[0][0, 0, 0, 16:32] = torch.cat([torch.tensor([6.0, *oracle_ties()]), torch.zeros(8)]) * 0.5
        dense[1] *= 100  # block scales that saturate
        slots = table_slots()
        slots[0, 3] = -1
        sides = []
        for x, g in zip(dense, SCALES.values(), strict=True):
            codes, sf = foreign.nvfp4_encode(x.numpy(), g)
            sides.append(
                {
                    "codes": codes,
                    "block_scale": oracle_numbers.float8_bytes(sf, np.zeros(sf.shape, bool), E4M3),
                }
            )
        assert (sides[1]["block_scale"] == 0x7E).any() and (sides[0]["block_scale"] == 0).any()
        want = filled(sides, layout, memory, order, slots)
        got = blank(want)
        vllm.append_nvfp4(got, *dense, torch.from_numpy(slots), value_scales=order, layout=layout, **SCALES)
        assert torch.equal(got, want)


def oracle_ties() -> list[float]:
    return [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def test_golden_ties() -> None:
    pages = torch.zeros(1, 2, 4, 1, ROW, dtype=torch.uint8)
    x = torch.zeros(1, 1, 1, DIM)
    x[..., :8] = torch.tensor([*oracle_ties(), 6.0])
    vllm.append_nvfp4(
        pages,
        x,
        -x,
        torch.zeros(1, 1, dtype=torch.int64),
        key_decode_scale=1.0,
        value_decode_scale=1.0,
        value_scales="linear",
    )
    key = pages[0, 0].flatten()
    assert [int(b) >> 4 * half & 15 for b in key[:4] for half in (0, 1)] == [0, 2, 2, 4, 4, 6, 6, 7]
    # The scales of all four tokens follow the codes of all four tokens.
    assert key[4 * DIM // 2] == 0x38 and not key[4 * DIM // 2 + 1 :].any()
    assert [int(b) >> 4 * half & 15 for b in pages[0, 1].flatten()[:4] for half in (0, 1)][1:] == [
        10,
        10,
        12,
        12,
        14,
        14,
        15,
    ]


def test_own_codes_in_their_pages() -> None:
    x = torch.randn(2, HEADS, 13, DIM)
    key = QuantizedKV.from_dense(x, "nvfp4", length=LENGTHS)
    value = QuantizedKV.from_dense(3 * x, "nvfp4", length=LENGTHS)
    sides = [
        {"codes": oracles.unpacked(h.planes()[0].numpy(), 4), "block_scale": h.planes()[1].numpy()}
        for h in (key, value)
    ]
    want = filled(sides, "NHD", "HND", "swizzled")
    got = blank(want)
    scales = vllm.write_nvfp4(got, key, value, torch.from_numpy(table_slots()), value_scales="swizzled")
    assert torch.equal(got, want)
    assert torch.equal(scales[0], key.planes()[2]) and torch.equal(scales[1], value.planes()[2])
    # They are copies: the caches are as before when somebody changes them.
    scales[0].zero_()
    assert key.planes()[2].item() > 0


# ------------------------------------------------------------------------------------------------------------- refused


def _read(**change: object) -> None:
    arguments = {
        "pages": torch.zeros(PAGES, 2, PAGE, HEADS, ROW, dtype=torch.uint8),
        "block_table": TABLE,
        "lengths": LENGTHS,
        "value_scales": "linear",
        **SCALES,
    } | change
    vllm.read_nvfp4(**arguments)  # type: ignore[arg-type]


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


BAD: dict[str, tuple[type[KVQError], str, dict[str, object]]] = {
    "a last axis of no head_dim": (ShapeError, "D / 2", {"pages": _zeros(PAGES, 2, PAGE, HEADS, ROW + 1)}),
    "head_dim 32": (ShapeError, "multiple of 64", {"pages": _zeros(PAGES, 2, PAGE, HEADS, 18)}),
    "head_dim 80": (ShapeError, "multiple of 64", {"pages": _zeros(PAGES, 2, PAGE, HEADS, 45)}),
    "another head_dim": (ShapeError, "128 / 2", {"head_dim": 128}),
    "a page of six tokens": (ShapeError, "multiple of 4", {"pages": _zeros(PAGES, 2, 6, HEADS, ROW)}),
    "the other layout": (ShapeError, "HND", {"pages": _zeros(PAGES, 2, HEADS, PAGE, ROW)}),
    "no pair of sides": (ShapeError, "9", {"pages": _zeros(PAGES, PAGE, HEADS, ROW)}),
    "signed bytes": (DtypeError, "uint8", {"pages": _zeros(PAGES, 2, PAGE, HEADS, ROW).view(torch.int8)}),
    "some of the heads": (
        ShapeError,
        "without gaps",
        {"pages": _zeros(PAGES, 2, PAGE, HEADS + 1, ROW)[:, :, :, 1:]},
    ),
    "a page beyond the last": (CapacityError, "slot", {"block_table": TABLE + 1}),
    "a page before the first": (CapacityError, "block_table", {"block_table": TABLE - 3}),
    "too long": (CapacityError, "lengths", {"lengths": LENGTHS + 4}),
    "no scale": (FormatError, "key_decode_scale", {"key_decode_scale": 0.0}),
    "a negative scale": (FormatError, "value_decode_scale", {"value_decode_scale": -1.0}),
    "scales of several": (FormatError, "one positive", {"key_decode_scale": torch.ones(2)}),
    "an infinite scale": (FormatError, "finite", {"key_decode_scale": float("inf")}),
    "an unknown order": (FormatError, "swizzled", {"value_scales": "tiled"}),
    "an unknown layout": (FormatError, "NHD", {"layout": "HDN"}),
}


@pytest.mark.parametrize("case", BAD)
def test_reads_that_are_refused(case: str) -> None:
    error, message, change = BAD[case]
    _read()
    with pytest.raises(error, match=message) as raised:
        _read(**change)
    assert raised.value.got and raised.value.allowed


def test_the_order_of_the_value_scales_has_no_default() -> None:
    with pytest.raises(TypeError, match="value_scales"):
        vllm.read_nvfp4(_zeros(PAGES, 2, PAGE, HEADS, ROW), TABLE, LENGTHS, **SCALES)  # type: ignore[call-arg]


def test_writes_that_are_refused_leave_the_pages() -> None:
    pages = _zeros(PAGES, 2, PAGE, HEADS, ROW)
    x = torch.randn(2, HEADS, 13, DIM)
    key, value = (QuantizedKV.from_dense(x, "nvfp4") for _ in range(2))
    slots = torch.arange(26).view(2, 13)
    cases: list[tuple[type[KVQError], str, dict[str, object]]] = [
        (FormatError, "read with", {"key_decode_scale": 1.0}),
        (FormatError, "value_decode_scale", {"value_decode_scale": 1.0}),
        (FormatError, "'nvfp4'", {"key": QuantizedKV.from_dense(x, "int8_per_token_head")}),
        (DtypeError, "append_", {"key": x}),
        (CapacityError, "slot 32", {"slots": slots + 7}),
        (CapacityError, "beyond the length", {"key": QuantizedKV.from_dense(x, "nvfp4", length=LENGTHS)}),
        (ShapeError, "codes", {"key": QuantizedKV.from_dense(x[:, :2].contiguous(), "nvfp4")}),
        # An empty cache has no scale yet, which must not be taken for 1.
        (
            FormatError,
            "key_decode_scale",
            {"key": QuantizedKV.empty((2, HEADS, 13, DIM), "nvfp4"), "slots": -slots - 1},
        ),
    ]
    for error, message, change in cases:
        with pytest.raises(error, match=message):
            vllm.write_nvfp4(  # type: ignore[arg-type]
                **(
                    {"pages": pages, "key": key, "value": value, "slots": slots, "value_scales": "linear"}
                    | change
                )
            )
        assert not pages.any()
    vllm.write_nvfp4(pages, key, value, slots, value_scales="linear")
    assert pages.any()


def test_appends_that_are_refused() -> None:
    pages = _zeros(PAGES, 2, PAGE, HEADS, ROW)
    slots = torch.arange(2).view(1, 2)
    x = torch.randn(1, HEADS, 2, DIM)
    for bad, message in ((x[..., :24], "head_dim 24"), (x[..., :48], "codes"), (x[:, :1], "codes")):
        with pytest.raises(ShapeError, match=message):
            vllm.append_nvfp4(pages, bad, bad, slots, value_scales="linear", **SCALES)
    with pytest.raises(DtypeError, match="write_nvfp4 copies"):
        cache = QuantizedKV.from_dense(x, "nvfp4")
        vllm.append_nvfp4(pages, cache, x, slots, value_scales="linear", **SCALES)
    assert not pages.any()


def test_nan_is_coded_as_zero_and_spoils_nothing() -> None:
    pages = _zeros(1, 2, 4, 1, ROW)
    x = torch.ones(1, 1, 2, DIM)
    x[0, 0, 0, 3] = torch.nan
    vllm.append_nvfp4(pages, x, x, torch.arange(2).view(1, 2), value_scales="linear", **SCALES)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2])
    key, _ = vllm.read_nvfp4(pages, table, lengths, value_scales="linear", dtype=torch.float32, **SCALES)
    assert key.dequantize()[0, 0, 0, 3] == 0
    x[0, 0, 0, 3] = 0
    assert torch.allclose(key.dequantize(), x, rtol=1 / 16)

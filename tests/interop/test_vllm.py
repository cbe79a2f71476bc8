"""Pages of vLLM, int8 and fp8 per token and head: read, written, encoded; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq_ops import QuantizedKV
from kvq_ops.errors import CapacityError, DtypeError, FormatError, KVQError, ShapeError
from kvq_ops.interop import vllm
from tests.interop import foreign
from tests.ops import checks, oracle_numbers

F32 = np.float32
PAGES, PAGE, HEADS, DIM = 6, 4, 2, 16
LENGTHS = torch.tensor([9, 5])
# Pages out of order; what stands behind the last page in use is not looked at.
TABLE = torch.tensor([[5, 0, 2], [3, 1, 99]], dtype=torch.int32)
LAYOUTS = ("old", "new")
ELEMENTS = ("int8", "fp8")


def table_slots(tokens: int = 9) -> np.ndarray:
    """Slots by hand: -1 from the end of a sequence on."""
    slots = np.full((2, tokens), -1)
    for b, length in enumerate(LENGTHS.tolist()):
        for t in range(length):
            slots[b, t] = int(TABLE[b, t // PAGE]) * PAGE + t % PAGE
    return slots


def random_planes(element: str, tokens: int = 9) -> list[foreign.Planes]:
    rng = np.random.default_rng(7)
    shape = (2, HEADS, tokens, DIM)
    sides = []
    for _ in range(2):
        if element == "int8":
            codes = rng.integers(-128, 128, shape).astype(np.int8)
        else:
            codes = (
                rng.integers(0, 127, shape).astype(np.uint8) | rng.integers(0, 2, shape).astype(np.uint8) << 7
            )
        sides.append({"codes": codes, "scale": rng.lognormal(-4, 2, shape[:3]).astype(F32)})
    return sides


def filled(
    layout: str, element: str, sides: list[foreign.Planes], slots: np.ndarray, **wrong: bool
) -> Tensor:
    shape = foreign.pages_shape(layout, PAGES, PAGE, HEADS, DIM)
    memory = np.full(int(np.prod(shape)), 0xA5, np.uint8)
    foreign.fill_per_token_head(memory, layout, sides, slots, PAGE, **wrong)
    pages = torch.from_numpy(memory).view(shape)
    return pages.view(torch.int8) if element == "int8" else pages


def store_of(handle: QuantizedKV) -> dict[str, np.ndarray]:
    return {p.name: t.numpy() for p, t in zip(handle.format.planes, handle.planes(), strict=True)}


def matches(handle: QuantizedKV, planes: foreign.Planes) -> bool:
    store = store_of(handle)
    for b, length in enumerate(LENGTHS.tolist()):
        for name in ("codes", "scale"):
            got, want = store[name][b, :, :length], planes[name][b, :, :length]
            if got.tobytes() != want.tobytes() or store[name][b, :, length:].any():
                return False
    return True


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
class TestReading:
    def test_codes_and_scales_are_copied(self, layout: str, element: str) -> None:
        sides = random_planes(element)
        pages = filled(layout, element, sides, table_slots())
        key, value = vllm.read_per_token_head(pages, TABLE, LENGTHS, dtype=torch.float32)
        assert key.format.name == value.format.name == f"{element}_per_token_head"
        assert key.shape == (2, HEADS, 9, DIM) and key.length.tolist() == [9, 5]
        assert matches(key, sides[0]) and matches(value, sides[1])
        codes = sides[1]["codes"]
        values = (
            codes.astype(F32)
            if element == "int8"
            else oracle_numbers.float8_values(codes, torch.float8_e4m3fn)
        )
        want = values * sides[1]["scale"][..., None]
        got = value.dequantize().numpy()
        assert np.array_equal(got[0], want[0]) and np.array_equal(got[1, :, :5], want[1, :, :5])
        assert not got[1, :, 5:].any()

    @pytest.mark.parametrize("wrong", ["swap_sides", "permute_scales"])
    def test_a_wrong_layout_is_seen(self, layout: str, element: str, wrong: str) -> None:
        sides = random_planes(element)
        pages = filled(layout, element, sides, table_slots(), **{wrong: True})
        key, value = vllm.read_per_token_head(pages, TABLE, LENGTHS)
        assert not matches(key, sides[0]) and not matches(value, sides[1])

    def test_another_order_of_the_memory_reads_the_same(self, layout: str, element: str) -> None:
        pages = filled(layout, element, random_planes(element), table_slots())
        # Heads and tokens change places in memory, in the newer layout as under vLLM's layout NHD.
        swapped = pages.transpose(-3, -2).contiguous().transpose(-3, -2)
        assert swapped.stride() != pages.stride()
        for a, b in zip(
            vllm.read_per_token_head(pages, TABLE, LENGTHS),
            vllm.read_per_token_head(swapped, TABLE, LENGTHS),
            strict=True,
        ):
            checks.assert_same_planes(a.planes(), b.planes(), a.format)

    def test_room_to_grow(self, layout: str, element: str) -> None:
        sides = random_planes(element)
        pages = filled(layout, element, sides, table_slots())
        key, _ = vllm.read_per_token_head(pages, TABLE, LENGTHS, capacity=12, dtype=torch.float32)
        assert key.shape == (2, HEADS, 12, DIM) and matches(key, sides[0])
        key.narrow(2, 9, 1).copy_(torch.ones(2, HEADS, 1, DIM))
        assert key.length.tolist() == [10, 10] and matches_before(key, sides[0])
        with pytest.raises(CapacityError, match="capacity of pages"):
            vllm.read_per_token_head(pages, TABLE, LENGTHS, capacity=8)

    def test_float8_pages_read_as_bytes_do(self, layout: str, element: str) -> None:
        pages = filled(layout, element, random_planes(element), table_slots())
        if element == "int8":
            fp8, _ = vllm.read_per_token_head(pages.view(torch.uint8), TABLE, LENGTHS)
            assert fp8.format.name == "fp8_per_token_head"
            return
        typed = vllm.read_per_token_head(pages.view(torch.float8_e4m3fn), TABLE, LENGTHS)
        for a, b in zip(typed, vllm.read_per_token_head(pages, TABLE, LENGTHS), strict=True):
            checks.assert_same_planes(a.planes(), b.planes(), a.format)

    def test_written_pages_are_the_bytes_that_were_read(self, layout: str, element: str) -> None:
        pages = filled(layout, element, random_planes(element), table_slots())
        key, value = vllm.read_per_token_head(pages, TABLE, LENGTHS, capacity=11)
        again = torch.full_like(pages.view(torch.uint8), 0xA5).view(pages.dtype)
        slots = vllm.slot_mapping(TABLE, LENGTHS, PAGE)
        vllm.write_per_token_head(again, key, value, slots)
        assert torch.equal(again, pages)

    def test_skipped_slots_stay_untouched(self, layout: str, element: str) -> None:
        sides = random_planes(element)
        slots = table_slots()
        slots[0, 1::2] = -1
        want = filled(layout, element, sides, slots)
        key, value = vllm.read_per_token_head(filled(layout, element, sides, table_slots()), TABLE, LENGTHS)
        got = torch.full_like(want.view(torch.uint8), 0xA5).view(want.dtype)
        vllm.write_per_token_head(got, key, value, torch.from_numpy(slots))
        assert torch.equal(got, want)
        before = got.clone()
        vllm.write_per_token_head(got, key, value, torch.full((2, 9), -1))
        assert torch.equal(got, before)


def matches_before(handle: QuantizedKV, planes: foreign.Planes) -> bool:
    store = store_of(handle)
    return all(
        store[name][b, :, :length].tobytes() == planes[name][b, :, :length].tobytes()
        for b, length in enumerate(LENGTHS.tolist())
        for name in ("codes", "scale")
    )


def test_own_codes_in_vllm_pages() -> None:
    """A cache made here, written out: bytes as the oracle lays them, and its values by the reader's rule."""
    x = torch.randn(2, HEADS, 9, DIM)
    for element in ELEMENTS:
        key = QuantizedKV.from_dense(x, f"{element}_per_token_head", length=LENGTHS)
        value = QuantizedKV.from_dense(2 - x, f"{element}_per_token_head", length=LENGTHS)
        for layout in LAYOUTS:
            want = filled(layout, element, [store_of(key), store_of(value)], table_slots())
            got = torch.full_like(want.view(torch.uint8), 0xA5).view(want.dtype)
            vllm.write_per_token_head(got, key, value, torch.from_numpy(table_slots()))
            assert torch.equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["int8", "int8 truncated", "fp8"])
@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_encoding_by_their_rule(layout: str, mode: str, dtype: torch.dtype) -> None:
    element = mode.split()[0]
    dense = [torch.randn(2, HEADS, 9, DIM).to(dtype) for _ in range(2)]
    dense[0][0, 0, 0] = 0  # a scale at its floor
    dense[0][0, 1, 0] = 1e-7
    dense[1][0, 0, 1] = torch.linspace(-127, 127, DIM)  # ties
    dense[1][0, 0, 1, 1::2] = torch.arange(8) + 0.5
    slots = table_slots()
    slots[1, 2] = -1
    sides = []
    for x in dense:
        codes, scale = foreign.vllm_encode(oracle_numbers.array(x), element, mode.endswith("truncated"))
        if element == "fp8":
            codes = oracle_numbers.float8_bytes(
                codes, np.signbit(oracle_numbers.array(x)), torch.float8_e4m3fn
            )
        sides.append({"codes": codes, "scale": scale})
    want = filled(layout, element, sides, slots)
    got = torch.full_like(want.view(torch.uint8), 0xA5).view(want.dtype)
    vllm.append_per_token_head(
        got,
        *dense,
        torch.from_numpy(slots),
        rounding="truncate" if mode.endswith("truncated") else "nearest",
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("rounding", "codes"), [("nearest", [32, -64, 95, -127]), ("truncate", [31, -63, 95, -127])]
)
def test_golden_int8(rounding: str, codes: list[int]) -> None:
    pages = torch.zeros(1, 1, 1, 2 * 8, dtype=torch.int8)
    x = torch.tensor([1.0, -2.0, 3.0, -4.0]).view(1, 1, 1, 4)
    vllm.append_per_token_head(pages, x, -x, torch.zeros(1, 1, dtype=torch.int64), rounding=rounding)
    row = pages.flatten()
    assert row[:4].tolist() == codes
    assert row[4:8].view(torch.int32).item() == 0x3D010204
    assert row[12:16].view(torch.int32).item() == 0x3D010204


def test_slots() -> None:
    assert np.array_equal(vllm.slot_mapping(TABLE, LENGTHS, PAGE).numpy(), table_slots())
    assert np.array_equal(vllm.slot_mapping(TABLE, LENGTHS, PAGE, tokens=11).numpy(), table_slots(11))
    assert np.array_equal(
        vllm.slot_mapping(TABLE, LENGTHS, PAGE, start=3, tokens=4).numpy(), table_slots()[:, 3:7]
    )
    empty = vllm.slot_mapping(torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), PAGE)
    assert empty.shape == (0, 0)


def test_no_sequence_and_no_token() -> None:
    pages = torch.zeros(foreign.pages_shape("new", PAGES, PAGE, HEADS, DIM), dtype=torch.int8)
    key, _ = vllm.read_per_token_head(pages, TABLE[:0], LENGTHS[:0])
    assert key.shape == (0, HEADS, 0, DIM)
    key, value = vllm.read_per_token_head(pages, TABLE, torch.zeros(2, dtype=torch.int64))
    assert key.shape == (2, HEADS, 0, DIM)
    vllm.write_per_token_head(pages, key, value, torch.zeros(2, 0, dtype=torch.int64))
    assert not pages.any()


# ------------------------------------------------------------------------------------------------------------- refused


def _pages(**change: object) -> Tensor:
    shape = foreign.pages_shape("new", PAGES, PAGE, HEADS, DIM)
    return torch.zeros(shape, dtype=torch.int8)


def _bad_reads() -> dict[str, tuple[type[KVQError], str, dict[str, object]]]:
    return {
        "a last axis without scales": (ShapeError, "last axis", {"pages": _pages()[..., :-1]}),
        "a last axis of 4-bit pages": (ShapeError, "last axis", {"pages": _pages()[..., :4]}),
        "unaligned scales": (ShapeError, "multiple of 4", {"pages": _pages()[..., :-4]}),
        "another head_dim": (ShapeError, r"2 \* \(64 \+ 4\)", {"head_dim": 64}),
        "three axes": (ShapeError, "page_size", {"pages": _pages()[0]}),
        "no pair of sides": (ShapeError, "page_size", {"pages": _pages().unsqueeze(1)}),
        "half floats": (DtypeError, "float16", {"pages": _pages().half()}),
        "other float8": (DtypeError, "fnuz", {"pages": _pages().view(torch.float8_e4m3fnuz)}),
        "a page beyond the last": (CapacityError, "slot", {"block_table": TABLE + 1}),
        "a page before the first": (CapacityError, "block_table", {"block_table": TABLE - 1}),
        "too long": (CapacityError, "lengths", {"lengths": LENGTHS + 4}),
        "a negative length": (CapacityError, "lengths", {"lengths": LENGTHS - 6}),
        "lengths of another batch": (ShapeError, "lengths", {"lengths": LENGTHS[:1]}),
        "a flat block table": (ShapeError, "block_table", {"block_table": TABLE[0]}),
        "a table of floats": (DtypeError, "block_table", {"block_table": TABLE.float()}),
        "a dtype that no cache has": (DtypeError, "dtype of a cache", {"dtype": torch.float64}),
    }


@pytest.mark.parametrize("case", _bad_reads())
def test_reads_that_are_refused(case: str) -> None:
    error, message, change = _bad_reads()[case]
    arguments = {"pages": _pages(), "block_table": TABLE, "lengths": LENGTHS} | change
    with pytest.raises(error, match=message) as raised:
        vllm.read_per_token_head(**arguments)  # type: ignore[arg-type]
    assert raised.value.got and raised.value.allowed


def _bad_writes() -> dict[str, tuple[type[KVQError], str, dict[str, object]]]:
    x = torch.randn(2, HEADS, 9, DIM)
    key = QuantizedKV.from_dense(x, "int8_per_token_head")
    slots = torch.arange(18).view(2, 9)
    return {
        "a dense tensor": (DtypeError, "QuantizedKV", {"key": x}),
        "another format": (
            FormatError,
            "int8_per_token_head",
            {"key": QuantizedKV.from_dense(x, "int4_group32")},
        ),
        "fp8 into int8": (FormatError, "int8", {"value": QuantizedKV.from_dense(x, "fp8_per_token_head")}),
        "another head_dim": (
            ShapeError,
            "codes",
            {"value": QuantizedKV.from_dense(x[..., :8].contiguous(), "int8_per_token_head")},
        ),
        "other heads": (
            ShapeError,
            "codes",
            {
                n: QuantizedKV.from_dense(x[:, :1].contiguous(), "int8_per_token_head")
                for n in ("key", "value")
            },
        ),
        "a slot beyond the last": (CapacityError, "slot 24", {"slots": slots + 7}),
        "one slot twice": (ShapeError, "each slot at most once", {"slots": slots // 2}),
        "slots of another batch": (ShapeError, "slots", {"slots": slots[:1]}),
        "flat slots": (ShapeError, "slots", {"slots": slots.flatten()}),
        "slots of floats": (DtypeError, "slots", {"slots": slots.float()}),
        "tokens that are not there": (
            CapacityError,
            "beyond the length",
            {"key": QuantizedKV.from_dense(x, "int8_per_token_head", length=LENGTHS)},
        ),
    } | {"base": (KVQError, "", {"pages": _pages(), "key": key, "value": key, "slots": slots})}


@pytest.mark.parametrize("case", [c for c in _bad_writes() if c != "base"])
def test_writes_that_are_refused_leave_the_pages(case: str) -> None:
    cases = _bad_writes()
    error, message, change = cases[case]
    arguments = cases["base"][2] | change
    pages = arguments["pages"]
    assert isinstance(pages, Tensor)
    with pytest.raises(error, match=message):
        vllm.write_per_token_head(**arguments)  # type: ignore[arg-type]
    assert not pages.any()
    # The base is a write that goes through.
    vllm.write_per_token_head(**cases["base"][2])  # type: ignore[arg-type]


def test_appends_take_dense_tokens_only() -> None:
    x = torch.randn(1, HEADS, 2, DIM)
    cache = QuantizedKV.from_dense(x, "int8_per_token_head")
    slots = torch.arange(2).view(1, 2)
    with pytest.raises(DtypeError, match="write_per_token_head copies"):
        vllm.append_per_token_head(_pages(), cache, x, slots)
    with pytest.raises(DtypeError, match="floating"):
        vllm.append_per_token_head(_pages(), x.to(torch.int8), x, slots)
    with pytest.raises(FormatError, match="rounding='up'"):
        vllm.append_per_token_head(_pages(), x, x, slots, rounding="up")  # type: ignore[arg-type]

"""Orders of block scales: as pycute evaluates CuTe layouts, by the formulas of the projects, and pages there and back."""

from __future__ import annotations

import pytest
import torch

from cutlass_kernels import scale_layouts
from cutlass_kernels.scale_layouts import ORDERS
from kvq_ops import paged_append_, quantize
from kvq_ops.errors import CorruptStoreError, FormatError, ShapeError
from kvq_ops.formats import get_format
from kvq_ops.interop import vllm

SIZES = [(128, 4), (256, 16), (200, 6), (5, 3), (64, 8), (1, 1)]


def told(order: str, row: int, column: int, rows: int, columns: int) -> int:
    """Where a scale lies by the formulas of TensorRT-LLM (``get_sf_out_offset_*``) and FlashInfer, restated."""
    wide = -(-columns // 4)
    return {
        "linear": row * columns + column,
        "tokens4": row // 4 * 4 * columns + 4 * column + row % 4,
        "128x4": (row // 128 * wide + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4,
        "8x4": (row // 8 * wide + column // 4) * 32 + row % 8 * 4 + column % 4,
    }[order]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("order", ORDERS)
def test_offsets_are_those_of_the_projects(order: str, rows: int, columns: int) -> None:
    got = scale_layouts.offsets(order, rows, columns)
    want = [[told(order, r, c, rows, columns) for c in range(columns)] for r in range(rows)]
    assert got.tolist() == want
    size = scale_layouts.size(order, rows, columns)
    assert got.unique().numel() == rows * columns and int(got.max()) < size


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("order", ORDERS)
def test_offsets_are_those_of_pycute(order: str, rows: int, columns: int) -> None:
    pycute = pytest.importorskip("pycute", reason="pip install --no-deps nvidia-cutlass")
    modes = scale_layouts.layout(order, rows, columns)
    sizes, strides = (tuple(tuple(pair[i] for pair in mode) for mode in modes) for i in (0, 1))
    layout = pycute.Layout(sizes, strides)
    got = scale_layouts.offsets(order, rows, columns).tolist()
    assert all(got[r][c] == layout(r, c) for r in range(rows) for c in range(columns))
    # Whole tiles leave no gaps: the layout is a bijection onto the buffer.
    assert pycute.size(layout) == pycute.cosize(layout) == scale_layouts.size(order, rows, columns)


def test_the_atom_of_128x4_is_the_one_of_cutlass() -> None:
    """CUTLASS's K-major atom for 16 channels a scale (``Sm1xxBlockScaledBasicChunk``): (32, 4), (16, 4) : (16, 4), (0, 1).

    Its stride 0 repeats a scale for its 16 channels; and tiles go along K first.
    """
    pycute = pytest.importorskip("pycute", reason="pip install --no-deps nvidia-cutlass")
    atom = pycute.Layout(((32, 4), (16, 4)), ((16, 4), (0, 1)))
    whole = pycute.Layout(
        (((32, 4), 2), ((16, 4), 3)), (((16, 4), 3 * pycute.cosize(atom)), ((0, 1), pycute.cosize(atom)))
    )
    got = scale_layouts.offsets("128x4", 256, 12)
    for row in range(256):
        for channel in range(0, 192, 5):
            assert int(got[row, channel // 16]) == whole(row, channel)


@pytest.mark.parametrize("order", ORDERS)
def test_there_and_back(order: str) -> None:
    scales = torch.randint(256, (2, 3, 36, 6), dtype=torch.uint8)
    held = scale_layouts.swizzle(scales, order)
    assert held.shape == (2, 3, scale_layouts.size(order, 36, 6))
    assert torch.equal(scale_layouts.restore(held, 36, 6, order), scales)
    # What is not a scale is zero: 448 there would be a scale of rows that nobody wrote.
    assert int((held != 0).sum()) == int((scales != 0).sum())
    if order != "linear":
        with pytest.raises(AssertionError):
            assert torch.equal(held[..., : 36 * 6].view(scales.shape), scales)


def test_what_is_refused() -> None:
    with pytest.raises(FormatError, match="'128x4'"):
        scale_layouts.offsets("4x128", 8, 8)
    with pytest.raises(ShapeError, match="512: whole tiles"):
        scale_layouts.restore(torch.zeros(500, dtype=torch.uint8), 100, 4, "128x4")
    pool = get_format("nvfp4").empty_store(3, 2, 8, 64)
    with pytest.raises(FormatError, match="'linear' or 'tokens4'"):
        scale_layouts.separate_tensors(pool, pool, value_scales="128x4")  # type: ignore[arg-type]
    with pytest.raises(CorruptStoreError):
        other = get_format("mxfp4").empty_store(3, 2, 8, 64)
        scale_layouts.separate_tensors(other, other, value_scales="linear")
    for size, dim in ((6, 64), (8, 80)):
        odd = get_format("nvfp4").empty_store(3, 2, size, dim)
        with pytest.raises(ShapeError, match="multiple of 4 tokens, head_dim a multiple of 64"):
            scale_layouts.to_packed_pages(odd, odd, value_scales="linear")
    with pytest.raises(ShapeError, match="equal shapes"):
        wide = get_format("nvfp4").empty_store(3, 2, 8, 128)
        scale_layouts.to_packed_pages(pool, wide, value_scales="linear")
    with pytest.raises(FormatError, match="'NHD', 'HND'"):
        scale_layouts.to_packed_pages(pool, pool, value_scales="linear", layout="DHN")  # type: ignore[arg-type]
    scale = torch.ones(1)
    with pytest.raises(ShapeError, match="uint8"):
        scale_layouts.from_packed_pages(
            torch.zeros(3, 2, 2, 8, 35, dtype=torch.uint8),
            key_decode_scale=scale,
            value_decode_scale=scale,
            value_scales="linear",
        )


TABLE = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32)
LENGTHS = torch.tensor([13, 6])


def pools() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Pages of keys and of values, and the dense values in them."""
    sides, dense = [], []
    for _ in range(2):
        x = torch.randn(2, 3, 13, 64)
        pages = get_format("nvfp4").empty_store(4, 3, 8, 64)
        position = torch.arange(13).expand(2, -1).clone()
        position[position >= LENGTHS.unsqueeze(1)] = -1
        paged_append_(pages, TABLE, position, x, "nvfp4")
        sides.append(pages)
        dense.append(x)
    return sides[0], sides[1], dense


@pytest.mark.parametrize("order", ["linear", "tokens4"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_packed_pages_are_what_another_reader_takes(layout: str, order: str) -> None:
    """``kvq_ops.interop`` reads pages of vLLM and FlashInfer by its own formulas, checked against others' there."""
    key_pages, value_pages, _ = pools()
    pages = scale_layouts.to_packed_pages(key_pages, value_pages, value_scales=order, layout=layout)
    assert pages.shape == ((4, 2, 3, 8, 36) if layout == "HND" else (4, 2, 8, 3, 36))
    read = vllm.read_nvfp4(
        pages,
        TABLE,
        LENGTHS,
        key_decode_scale=key_pages[2],
        value_decode_scale=value_pages[2],
        value_scales="swizzled" if order == "tokens4" else "linear",
        layout=layout,
    )
    for handle, pool in zip(read, (key_pages, value_pages), strict=True):
        codes, scales = handle.planes()[:2]
        for b, length in enumerate(LENGTHS.tolist()):
            for t in range(length):
                place = int(TABLE[b, t // 8]), slice(None), t % 8
                assert torch.equal(codes[b, :, t], pool[0][place]) and torch.equal(
                    scales[b, :, t], pool[1][place]
                )
    back = scale_layouts.from_packed_pages(
        pages,
        key_decode_scale=key_pages[2],
        value_decode_scale=value_pages[2],
        value_scales=order,
        layout=layout,
        length=key_pages[3],
    )
    for got, pool in zip(back, (key_pages, value_pages), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, pool, strict=True))


@pytest.mark.parametrize("order", ["linear", "tokens4"])
def test_separate_tensors(order: str) -> None:
    key_pages, value_pages, _ = pools()
    given = scale_layouts.separate_tensors(key_pages, value_pages, value_scales=order)
    assert given.codes[0].data_ptr() == key_pages[0].data_ptr(), "codes are not copied"
    assert given.scales[0].data_ptr() == key_pages[1].data_ptr()
    assert all(s.dtype is torch.float8_e4m3fn and s.shape == (4, 3, 8, 4) for s in given.scales)
    held = given.scales[1].view(torch.uint8)
    for page, head, token, column in ((2, 0, 0, 0), (0, 1, 3, 2), (3, 2, 5, 3)):
        flat = told(order, token, column, 8, 4)
        assert int(held[page, head].reshape(-1)[flat]) == int(value_pages[1][page, head, token, column])


def test_scales_of_a_matrix_by_the_quantizer() -> None:
    """From a contiguous store to what a block-scaled GEMM takes as its operand."""
    store = quantize(torch.randn(1, 1, 200, 96), "nvfp4")
    held = scale_layouts.swizzle(store[1][0, 0], "128x4")
    assert held.numel() == 256 * 8
    assert torch.equal(scale_layouts.restore(held, 200, 6, "128x4"), store[1][0, 0])

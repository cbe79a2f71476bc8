"""The kernels write the bytes that plain torch writes, whatever the format, shape, layout or order of writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import paged
from kvq_ops.formats import get_format
from kvq_ops.triton_kernels import shapes
from kvq_ops.triton_kernels.append import append_, paged_append_
from kvq_ops.triton_kernels.encode import quantize
from kvq_ops.triton_kernels.spec import Spec, spec_of
from tests.cpu.stores import NAMES, empty, fits, implementation
from tests.ops.checks import array, copy, expected
from tests.ops.codec_data import KINDS, make
from tests.triton import interpreter
from tests.triton.stores import assert_same, both, spread

# Groups that fill no power of two of channels, after what needs whole vectors; groups of tokens in every way.
NAMES = (
    *NAMES,
    "int4_group48+hadamard",
    "int3_group24+hadamard+outlier3%",
    "int3_channel40_asym+hadamard+outlier3%+recent2+sink3",
    "int8_channel2+recent1",
    "int8_channel24_asym_bf16+hadamard",
)
PLAIN = tuple(n for n in NAMES if not get_format(n).windowed)
WINDOWED = tuple(n for n in NAMES if get_format(n).windowed)
# A scale that spans all tokens would see nothing but the largest kind.
SPANNING = tuple(n for n in NAMES if (get_format(n).base or get_format(n)).static_planes)


@pytest.fixture(autouse=True)
def whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes many rows, also of few: the interpreter's time goes by programs."""
    monkeypatch.setattr(shapes, "FEW_ROWS", 0)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_served(name: str) -> None:
    assert isinstance(spec_of(get_format(name)), Spec)


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name: str) -> None:
    """Two appends, the second with a head_dim that fills no tile in its turn."""
    for dim, counts in ((64, (37, 2)), (80, (33,))):
        if not fits(get_format(name), dim):
            continue
        mine, other = (empty(name, 1, 2, 40, dim) for _ in range(2))
        start = 0
        for count in counts:
            both(
                mine,
                other,
                torch.arange(start, start + count),
                torch.randn(1, 2, count, dim) * 3,
                name,
                f"D={dim}",
            )
            start += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_awkward_values(name: str, dtype: torch.dtype) -> None:
    """All kinds side by side, in tokens of their own; where tokens share a scale, one after the other."""
    fmt, dim = get_format(name), 32
    each = max(2, fmt.token_group)
    parts = []
    for kind in KINDS:
        x = make(kind, (1, 2, each, dim), dtype)
        x[0, 0, 1, 3:7] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]).to(dtype)
        x[0, 1, 0] = float("nan")
        parts.append(x)
    groups = [[part] for part in parts] if name in SPANNING and dtype is torch.float32 else [parts]
    for some in groups:
        x = torch.cat(some, 2)
        tail = fmt.window if fmt.windowed else 0
        x = torch.cat([x, torch.zeros(1, 2, tail, dim, dtype=dtype)], 2)
        mine, other = (empty(name, 1, 2, x.shape[2], dim, dtype) for _ in range(2))
        both(mine, other, torch.arange(x.shape[2]), x, name, f"{dtype}")


@pytest.mark.parametrize("name", NAMES)
def test_odd_head_dims_in_views(name: str) -> None:
    """Vectors that fill no tile; planes and ``x`` that are views, with strides of all kinds."""
    fmt = get_format(name)
    for dim in (6, 33, 100, 264):
        # One of them behind a long window, which takes long to fill.
        if not fits(fmt, dim) or fmt.recent > 100 and dim != 100:
            continue
        tokens = fmt.recent + 5 if fmt.windowed else 5
        x = torch.randn(2, tokens, 3, 2 * dim)[..., ::2].transpose(1, 2)
        other = empty(name, 2, 3, tokens, dim)
        mine = spread(other)
        both(mine, other, torch.arange(tokens, dtype=torch.int32), x, name, f"D={dim}")


@pytest.mark.parametrize("name", PLAIN)
def test_positions_in_any_order_and_rows_of_their_own(name: str) -> None:
    """A product that a compiler fuses with a sum must not show either."""
    mine, other = (empty(name, 2, 2, 11, 64) for _ in range(2))
    with interpreter.fused():
        both(mine, other, torch.tensor([4, 2, 9]), torch.randn(2, 2, 3, 64), name)
        both(mine, other, torch.tensor([[0, 7], [3, 1]]), torch.randn(2, 2, 2, 64), name)
    assert mine[-1].tolist() == [10, 10]


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_roll_back_and_grow_in_steps(name: str) -> None:
    """Rows of different lengths, steps of one and of many, cuts through groups, tokens that are not finite on their way."""
    fmt = get_format(name)
    room = fmt.window + 80
    mine, other = (empty(name, 2, 2, room, 24, torch.float16) for _ in range(2))
    starts = torch.zeros(2, dtype=torch.int64)
    steps = (
        (fmt.window + 7, (0, 0)),
        (1, (0, 6)),
        (fmt.token_group + 3, (fmt.token_group // 2 + 1, 0)),
        (2, (0, 0)),
    )
    with interpreter.fused():
        for count, back in steps:
            x = torch.randn(2, 2, count, 24).half()
            x[0, 0, 0, 3], x[1, 0, 0, 4] = torch.nan, torch.inf
            both(mine, other, starts.unsqueeze(1) + torch.arange(count), x, name, f"+{count}")
            starts = (starts + count - torch.tensor(back)).clamp_min(0)
    assert mine[-1].tolist() == starts.tolist() and mine[fmt.index("coded")].min() > 0


@pytest.mark.parametrize("name", NAMES)
def test_quantize(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole tensor, one row for each program."""
    monkeypatch.setattr(shapes, "FEW_ROWS", 512)
    fmt, x = get_format(name), torch.randn(2, 2, 3, 64)
    if fmt.calibrated:
        with pytest.raises(kvq_ops.errors.CalibrationError):
            quantize(x, fmt)
        store = fmt.empty_store(2, 2, 3, 64)
        with pytest.raises(kvq_ops.errors.CalibrationError):
            append_(store, torch.arange(3), x, fmt)
        return
    got = quantize(x, fmt)
    assert_same(got, implementation("quantize", "torch").run(x, fmt), fmt)
    assert got[-1].tolist() == [3, 3]


@pytest.mark.parametrize("name", [n for n in PLAIN if not get_format(n).calibrated])
def test_codes_of_the_oracle(name: str) -> None:
    """numpy, which shares no code with the package, from the formulas of the documentation."""
    fmt, x = get_format(name), torch.randn(1, 2, 4, 64)
    store = quantize(x, fmt)
    want = expected(fmt, x)
    for plane, tensor in zip(fmt.planes[:-1], store, strict=False):
        assert np.array_equal(array(tensor), want[plane.name]), plane.name


def pool(name: str, pages: int, size: int, dim: int) -> list[Tensor]:
    return empty(name, pages, 2, size, dim)


@pytest.mark.parametrize("name", PLAIN)
def test_pages(name: str) -> None:
    """In steps, with padding that would spoil every scale, into pages in no order."""
    fmt, dim, size = get_format(name), 64 if get_format(name).rotation else 24, 3
    dim = dim if fits(fmt, dim) else 64
    table = torch.tensor([[7, 2, 0], [-1, -1, -1], [4, 6, -1]], dtype=torch.int32)
    lengths = torch.tensor([8, 0, 5])
    x = torch.randn(3, 2, 8, dim)
    x[0, 1, 2, 3], x[0, 0, 4, 5] = torch.nan, torch.inf
    for b, length in enumerate(lengths.tolist()):
        x[b, :, length:] = torch.tensor([1e6, torch.inf, torch.nan]).repeat(dim)[:dim]
    other = pool(name, 9, size, dim)
    mine = spread(other)
    for start, stop in ((0, 4), (4, 5), (5, 8), (2, 4)):
        at = torch.arange(start, stop).expand(3, -1)
        at = torch.where(at < lengths.unsqueeze(1), at, -1)
        part = x[:, :, start:stop]
        paged.append_torch(other, table, at, part, fmt)
        paged_append_(mine, table, at.int(), part, fmt)
        assert_same(mine, other, fmt, f"{start}..{stop}")


@pytest.mark.parametrize("name", ["int8_per_token_head", "int8_per_tensor", "nuq4_keys", "kivi2_keys"])
def test_nothing_to_append(name: str) -> None:
    fmt, store = get_format(name), empty(name, 2, 2, 4, 64)
    before = copy(store)
    append_(store, torch.arange(0), torch.zeros(2, 2, 0, 64), fmt)
    if not fmt.windowed:
        nowhere = torch.full((2, 3), -1)
        paged_append_(store, nowhere, torch.full((2, 5), -1), torch.randn(2, 2, 5, 64), fmt)
    assert_same(store, before, fmt)


def test_a_scale_is_fitted_over_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than one program takes; the second launch gathers what they found."""
    monkeypatch.setattr(shapes, "TILE", 64)
    for name in ("int8_per_head_asym", "nvfp4", "fp8_e4m3"):
        mine, other = (empty(name, 1, 2, 7, 64) for _ in range(2))
        both(mine, other, torch.arange(7), torch.randn(1, 2, 7, 64), name)


def test_a_position_beyond_the_store_writes_nothing() -> None:
    """The operator refuses it where it can look at values; on a GPU nothing may leave its tensor."""
    fmt, store = get_format("int8_per_token_head"), empty("int8_per_token_head", 1, 2, 4, 64)
    before = copy(store)
    append_(store, torch.tensor([4, 9]), torch.randn(1, 2, 2, 64), fmt)
    assert_same(store, before, fmt)


def far(tensor: Tensor) -> Tensor:
    """A copy in memory where rows lie 2**30 elements apart, the last of three beyond what 32 bits can count. Hardly any of it is
    touched, and so it hardly takes any."""
    step, dims = 2**30, tensor.dim()
    if dims < 3:
        return tensor.clone()
    memory = torch.empty(step * (tensor.shape[0] - 1) + tensor[0].numel(), dtype=tensor.dtype)
    view = memory.as_strided(tensor.shape, (step, *tensor[0].contiguous().stride()))
    assert view.dim() == dims
    return view.copy_(tensor)


@pytest.mark.no_poison
@pytest.mark.parametrize(
    "name", ["int4_group32+outlier2%", "int8_per_token_head+recent1+sink1", "int4_channel16", "nuq4_keys"]
)
def test_offsets_beyond_32_bits(name: str) -> None:
    near = empty(name, 3, 1, 40, 32, torch.float16)
    store = [far(plane) for plane in near]
    for start, count in ((0, 35), (20, 1)):
        x = torch.randn(3, 1, count, 32).half()
        both(near, [p.clone() for p in near], torch.arange(start, start + count), x, name)
        append_(store, torch.arange(start, start + count), far(x), get_format(name))
        assert_same(store, near, get_format(name), f"from {start}")

"""Codes that are numbers of entries, of keys as they were before rotary embedding and of values: bit for bit against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import QuantizedKV, cache, codecs, errors
from kvq_ops.calibration import fit
from kvq_ops.codecs.rotary import turn
from kvq_ops.formats import get_format
from tests.ops import checks, oracles
from tests.ops.checks import DTYPES, F32
from tests.ops.codec_data import make

NAMES = (
    "nuq4_keys", "nuq3_keys", "nuq2_keys", "nuq4_values", "nuq3_values", "nuq2_values", "nuq4_keys+outlier1%",
    "nuq3_values+outlier5%", "nuq3_keys+hadamard", "nuq4_values+hadamard", "nuq3_keys+hadamard+outlier3%",
)  # fmt: skip
FEW = ("nuq4_keys", "nuq3_values", "nuq3_keys+hadamard+outlier3%")
KINDS = (
    "random",
    "zero",
    "negative_zero",
    "constant",
    "subnormal",
    "tiny",
    "huge",
    "all_positive",
    "one_outlier",
    "int4_ties",
)


def frequencies(head_dim: int) -> Tensor:
    return 10000.0 ** (-torch.arange(head_dim // 2) * 2.0 / head_dim)


def fitted(name: str, head_dim: int = 32, turned: bool = True, heads: int = 2) -> dict[str, Tensor]:
    x = torch.randn(2, heads, 64, head_dim, generator=torch.Generator().manual_seed(5))
    return fit(x + 0.3, get_format(name), inv_freq=frequencies(head_dim) if turned else None)


def arrays(static: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: checks.array(plane) for name, plane in static.items()}


def filled(x: Tensor, name: str, static: dict[str, Tensor]) -> list[Tensor]:
    return QuantizedKV.from_dense(x, name, static=static).store


# -------------------------------------------------------------------------------------------------------------- codes


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_codes_and_values_equal_the_oracle(name: str, turned: bool) -> None:
    fmt = get_format(name)
    if not turned and "position" not in fmt._index:
        pytest.skip("values are never turned")
    for head_dim in (32, 80):
        static = fitted(name, head_dim, turned)
        for kind in KINDS:
            if kind == "huge" and fmt.rotation:
                continue  # sums beyond the largest number of fp32
            for dtype in DTYPES:
                x = make(kind, (2, 2, 5, head_dim), dtype)
                store = filled(x, name, static)
                want = checks.expected(fmt, x, arrays(static))
                checks.assert_planes(store, fmt, want, f"{kind} D={head_dim} {dtype}")
                dense, largest = oracles.decoded(fmt, want), np.finfo(F32).max
                got = kvq_ops.dequantize(store, name)
                assert np.array_equal(got.numpy(), np.clip(dense, -largest, largest)), kind
                assert all(p.isfinite().all() for p in store if p.is_floating_point())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("position", [torch.tensor([4, 2, 5]), torch.tensor([[0, 1, 2], [1000, 7, 4000]])])
def test_keys_are_turned_back_by_the_slot_they_are_written_to(name: str, position: Tensor) -> None:
    fmt, static, x = get_format(name), fitted(name), torch.randn(2, 2, 3, 32)
    handle = QuantizedKV.empty((2, 2, 4096, 32), name, static=static)
    kvq_ops.append_(handle.store, position, x, name)
    want = checks.expected(fmt, x, arrays(static), position.numpy())
    rows = position.expand(2, 3)
    for i in fmt.token_planes:
        got = handle.store[i].transpose(1, 2)[torch.arange(2).unsqueeze(1), rows].transpose(1, 2)
        assert np.array_equal(checks.array(got), want[fmt.planes[i].name]), fmt.planes[i].name
    dense = handle.dequantize()
    held = torch.zeros(2, 4096, dtype=torch.bool).scatter_(1, rows, True)
    assert not dense.transpose(1, 2)[~held].any(), "slots that hold nothing read as zero"
    assert dense.transpose(1, 2)[held].any(-1).all()
    if "position" in fmt._index:
        elsewhere = checks.expected(fmt, x, arrays(static), position.numpy() + 1)
        assert not np.array_equal(elsewhere["codes"], want["codes"]), "the position would not show"


def test_turning_is_rotary_embedding_and_undoes_itself() -> None:
    """As models compute it (halves of the vector are paired), in float64; each sine is rounded once."""
    x, position, inv_freq = torch.randn(2, 3, 7, 16), torch.randint(0, 5000, (2, 1, 7)), frequencies(16)
    angle = torch.cat([position.double().unsqueeze(-1) * inv_freq.double()] * 2, -1)
    half = torch.cat([-x[..., 8:], x[..., :8]], -1).double()
    want = x.double() * angle.cos() + half * angle.sin()
    got = turn(x, position, inv_freq)
    assert torch.allclose(got.double(), want, atol=4 * 2.0**-24 * float(x.abs().max()) * 2, rtol=0)
    assert np.array_equal(got.numpy(), oracles.turned(x.numpy(), position.numpy(), inv_freq.numpy()))
    assert torch.allclose(turn(got, position, inv_freq, back=True), x, atol=1e-6)
    assert not torch.allclose(turn(got, position + 1, inv_freq, back=True), x, atol=1e-2)
    assert torch.equal(turn(x, position, torch.zeros(8)), x)


def test_a_value_on_a_midpoint_takes_the_lower_entry() -> None:
    """With centre 0 and half-range 1, entries at odd multiples of 1/8."""
    entries = torch.arange(-15, 16, 2) / 8
    static = {
        "codebook": entries,
        "centre": torch.zeros(1, 16, dtype=torch.half),
        "half_range": torch.ones(1, 16, dtype=torch.half),
        "inv_freq": torch.zeros(8),
    }
    middles = (entries[1:] + entries[:-1]) / 2
    x = torch.cat([middles, torch.tensor([99.0])]).view(1, 1, 1, 16)
    codes = checks.element_codes(get_format("nuq4_keys"), filled(x, "nuq4_keys", static)).flatten()
    assert codes.tolist() == [*range(15), 15]
    above = torch.nextafter(x, torch.tensor(100.0))
    codes = checks.element_codes(get_format("nuq4_keys"), filled(above, "nuq4_keys", static)).flatten()
    assert codes.tolist() == [*range(1, 16), 15]
    below = torch.nextafter(x, torch.tensor(-100.0))
    codes = checks.element_codes(get_format("nuq4_keys"), filled(below, "nuq4_keys", static)).flatten()
    assert codes.tolist() == [*range(15), 15]


@pytest.mark.parametrize("name", NAMES)
def test_errors_stay_within_half_a_gap(name: str) -> None:
    """Of the codebook, in half-ranges, in the space in which codes are made; and rounding of the fp16 centre."""
    fmt, static = get_format(name), fitted(name)
    x = torch.randn(2, 2, 9, 32) + 0.3
    store = filled(x, name, static)
    planes = {p.name: checks.array(t) for p, t in zip(fmt.planes, store, strict=True)}
    position = torch.arange(1, 10).view(1, 1, -1) if "position" in planes else None
    coded = checks.array(codecs.prepare(x, fmt, static, position)).astype(np.float64)
    read = checks.array(codecs.prepare(kvq_ops.dequantize(store, name), fmt, static, position))
    centre, half = (
        planes[n].astype(np.float64)[None, :, None]
        if fmt.group is None
        else planes[n].astype(np.float64)[..., None]
        for n in ("centre", "half_range")
    )
    entries = planes["codebook"].astype(np.float64)
    z = (coded - centre) / half
    above = np.clip(np.searchsorted(entries, z), 1, len(entries) - 1)
    gap = (entries[above] - entries[above - 1]) / 2
    gap = np.where(z < entries[0], entries[0] - z, np.where(z > entries[-1], z - entries[-1], gap))
    limit = gap * half * (1 + 1e-5) + 1e-5
    error = np.abs(read - coded)
    assert (error <= limit).all(), (error - limit).max()
    broken = checks.copy(store)
    broken[fmt.index("codebook")] = broken[fmt.index("codebook")] * 1.5
    wrong = checks.array(codecs.prepare(kvq_ops.dequantize(broken, name), fmt, static, position))
    assert (np.abs(wrong - coded) > limit).any()


def test_keys_before_rotary_embedding_need_fewer_bits() -> None:
    """Channels with a centre of their own: what the embedding spreads, turning back gathers."""
    offset = torch.randn(1, 2, 1, 32) * 4
    plain = torch.randn(1, 2, 256, 32) * 0.3 + offset
    inv_freq = frequencies(32)
    keys = turn(plain, torch.arange(256).view(1, 1, -1), inv_freq)
    fmt = get_format("nuq3_keys")

    def error(static: dict[str, Tensor]) -> float:
        return float(
            (QuantizedKV.from_dense(keys, "nuq3_keys", static=static).dequantize() - keys).norm()
            / keys.norm()
        )

    assert error(fit(keys, fmt, inv_freq=inv_freq)) < 0.3 * error(fit(keys, fmt))


# ----------------------------------------------------------------------------------------- chunks, rows and bad values


@pytest.mark.parametrize("name", NAMES)
def test_codes_do_not_depend_on_chunks_or_neighbours(name: str) -> None:
    fmt, static, x = get_format(name), fitted(name), torch.randn(2, 2, 43, 32)
    x[0] *= 100
    whole = filled(x, name, static)
    for sizes in ([1] * 43, [7] * 6 + [1]):
        handle, start = QuantizedKV.empty(x.shape, name, static=static), 0
        for size in sizes:
            kvq_ops.append_(
                handle.store, torch.arange(start, start + size), x[:, :, start : start + size], name
            )
            start += size
        checks.assert_same_planes(handle.store, whole, fmt, f"chunks of {sizes[0]}")
    alone = filled(x[1:], name, static)
    padded = QuantizedKV.from_dense(
        torch.cat([x, torch.full((2, 2, 5, 32), 1e3)], 2), name, length=torch.tensor([43, 20]), static=static
    )
    for i in fmt.token_planes:
        assert torch.equal(whole[i][1:], alone[i]), fmt.planes[i].name
        assert torch.equal(padded.store[i][1:, :, :20], alone[i][:, :, :20]), fmt.planes[i].name
    assert padded.length.tolist() == [43, 20]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_values_stay_in_their_place(name: str, bad: float) -> None:
    fmt = get_format(name)
    for turned in (True, False):
        static = fitted(name, turned=turned)
        dirty = torch.randn(2, 2, 4, 32)
        dirty[1, 0, 2, 7] = bad
        zero = dirty.clone()
        zero[1, 0, 2, 7] = 0.0
        store = filled(dirty, name, static)
        checks.assert_planes(store, fmt, checks.expected(fmt, dirty, arrays(static)), str(bad))
        a, b = kvq_ops.dequantize(store, name), kvq_ops.dequantize(filled(zero, name, static), name)
        assert a.isfinite().all()
        others = torch.ones(a.shape, dtype=torch.bool)
        others[1, 0, 2] = False
        assert torch.equal(a[others], b[others]), "another token changed"
        if fmt.rotation or "position" in fmt._index:
            assert torch.equal(a, b), "it counts as zero"
    hopeless = torch.full((1, 2, 3, 32), bad)
    assert kvq_ops.dequantize(filled(hopeless, name, static), name).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_head_dims_shapes_and_bytes(name: str) -> None:
    fmt = get_format(name)
    for head_dim in (8, 24, 64, 80, 256):
        static = fitted(name, head_dim)
        for shape in ((1, 2, 3, head_dim), (2, 2, 0, head_dim), (0, 2, 3, head_dim)):
            handle = QuantizedKV.empty(shape, name, static=static)
            x = torch.randn(shape)
            kvq_ops.append_(handle.store, torch.arange(shape[2]), x, name)
            assert handle.dequantize().shape == shape
            assert handle.nbytes == fmt.nbytes(*shape)
            assert [tuple(p.shape) for p in handle.store] == fmt.plane_shapes(*shape)
    wrong = 12 if fmt.pack == 8 else 6 if fmt.pack == 4 else 7
    with pytest.raises(errors.HeadDimError):
        QuantizedKV.empty((1, 2, 3, wrong), name)


# ---------------------------------------------------------------------------------------------- handles: codes that move


def tokens(handle: QuantizedKV) -> Tensor:
    return handle.dequantize().clone()


@pytest.mark.parametrize("name", FEW)
def test_moved_tokens_keep_reading_the_same_values(name: str, tmp_path: Any) -> None:
    """The position of a key moves with its codes; nothing is coded again."""
    static = fitted(name)
    handle = QuantizedKV.from_dense(torch.randn(3, 2, 12, 32), name, static=static, length=10)
    dense = tokens(handle)
    assert not dense[:, :, 10:].any()
    index = torch.tensor([9, 3, 3, 0])
    rows = torch.tensor([2, 0, 2])
    moves = {
        "roll": (handle.roll(-1, 2), dense.roll(-1, 2)),
        "index_select tokens": (handle.index_select(2, index), dense.index_select(2, index)),
        "index_select rows": (handle.index_select(0, rows), dense.index_select(0, rows)),
        "index_select heads": (handle.index_select(1, torch.tensor([1])), dense[:, 1:]),
        "slice": (handle[:, :, 2:9:3], dense[:, :, 2:9:3]),
        "one row": (handle[1:2], dense[1:2]),
        "one head": (handle[:, 1], dense[:, 1]),
        "transposed": (handle.transpose(1, 2), dense.transpose(1, 2)),
        "cat of rows": (torch.cat([handle[1:], handle]), torch.cat([dense[1:], dense])),
        "cat of tokens": (torch.cat([handle[:, :, 4:8], handle[:, :, 1:3]], 2), dense[:, :, [4, 5, 6, 7, 1, 2]]),
        "reordered": (cache.reorder(handle, [1, 1, 0]), dense[[1, 1, 0]]),
        "grown": (cache.grow(handle, 20)[:, :, :12], dense),
        "cloned": (handle.clone(), dense),
    }  # fmt: skip
    cache.save([handle], tmp_path / "caches")
    (loaded,) = cache.load(tmp_path / "caches")
    moves["loaded"] = (loaded, dense)
    for how, (moved, want) in moves.items():
        assert isinstance(moved, QuantizedKV), f"{how} gave up the codes"
        assert torch.equal(moved.dequantize(), want), how
    checks.assert_same_planes(loaded.store, handle.store, get_format(name))
    cut = cache.crop_(handle.clone(), torch.tensor([10, 4, 0]))
    for row, length in enumerate((10, 4, 0)):
        assert torch.equal(cut.dequantize()[row, :, :length], dense[row, :, :length])
        assert not cut.dequantize()[row, :, length:].any()


@pytest.mark.parametrize("name", FEW)
def test_a_rolled_cache_goes_on(name: str) -> None:
    """A sliding cache: everything moves down by one, and the newest token is written to the last slot."""
    fmt, static = get_format(name), fitted(name)
    handle = QuantizedKV.from_dense(torch.randn(1, 2, 6, 32), name, static=static)
    for _ in range(4):
        dense, new = tokens(handle), torch.randn(1, 2, 1, 32)
        moved = handle.roll(-1, 2)
        moved.index_copy_(2, torch.tensor([5]), new)
        handle.copy_(moved)
        want = checks.expected(fmt, new, arrays(static), np.array([5]))
        assert np.array_equal(checks.array(handle.store[0][:, :, 5:]), want["codes"])
        assert torch.equal(handle.dequantize()[:, :, :5], dense[:, :, 1:])
        assert np.array_equal(handle.dequantize()[:, :, 5:].numpy(), oracles.decoded(fmt, want))


@pytest.mark.parametrize("name", FEW)
def test_writes_through_views_know_their_slots(name: str) -> None:
    fmt, static = get_format(name), fitted(name)
    x, new = torch.randn(2, 2, 9, 32), torch.randn(2, 2, 2, 32)
    writes = {
        "slice": lambda h: h[:, :, 5:7].copy_(new),
        "narrow": lambda h: h.narrow(2, 4, 4)[:, :, 1:3].copy_(new),
        "index_copy_": lambda h: h.index_copy_(2, torch.tensor([5, 6]), new),
        "index_copy_ of a slice": lambda h: h[:, :, 3:].index_copy_(2, torch.tensor([2, 3]), new),
        "setitem": lambda h: h.__setitem__((slice(None), slice(None), slice(5, 7)), new),
        "index_put": lambda h: h.__setitem__((slice(None), slice(None), torch.tensor([5, 6])), new),
        "transposed": lambda h: h.transpose(1, 2)[:, 5:7].copy_(new.transpose(1, 2)),
    }
    want = checks.expected(fmt, new, arrays(static), np.array([5, 6]))
    dense = torch.from_numpy(oracles.decoded(fmt, want))
    for how, write in writes.items():
        handle = QuantizedKV.from_dense(x, name, static=static)
        before = tokens(handle)
        write(handle)
        assert torch.equal(handle.dequantize()[:, :, 5:7], dense), how
        before[:, :, 5:7] = dense
        assert torch.equal(handle.dequantize(), before), how
    grown = torch.cat([QuantizedKV.from_dense(x[:, :, :5], name, static=static), new], 2)
    assert torch.equal(grown.dequantize()[:, :, 5:], dense), "appended by cat"


def test_heads_of_turned_keys_are_written_together() -> None:
    """They share the slot of a token: after a roll, a head alone would take it from the others."""
    static = fitted("nuq4_keys")
    one, values = (
        torch.randn(2, 1, 2, 32),
        QuantizedKV.from_dense(torch.randn(2, 2, 9, 32), "nuq4_keys", static=static),
    )
    refused = {
        "select": lambda h: h[:, 0].index_copy_(1, torch.tensor([3, 4]), one[:, 0]),
        "slice": lambda h: h[:, :1, 3:5].copy_(one),
        "setitem": lambda h: h.__setitem__((slice(None), 1, slice(3, 5)), one[:, 0]),
        "rows": lambda h: h[:, :1].index_copy_(0, torch.tensor([1]), torch.randn(1, 1, 9, 32)),
        "rows and tokens": lambda h: h[:, :1].__setitem__(
            (torch.tensor([0, 1]), slice(None), torch.tensor([3, 4])), one[:, :, 0]
        ),
        "from a cache": lambda h: h[:, :1].copy_(values[:, :1]),
        "rows from a cache": lambda h: h[:, :1].index_copy_(0, torch.tensor([1]), values[:1, :1]),
        "an index of heads": lambda h: h.index_copy_(1, torch.tensor([1]), torch.randn(2, 1, 9, 32)),
    }
    for how, write in refused.items():
        handle = QuantizedKV.from_dense(torch.randn(2, 2, 9, 32), "nuq4_keys", static=static).roll(-1, 2)
        before = checks.copy(handle.store)
        with pytest.raises(errors.KVQError) as caught:
            write(handle)
        assert caught.value.got, how
        checks.assert_same_planes(handle.store, before, get_format("nuq4_keys"), how)
    assert torch.cat([values[:, :1], values[:, 1:]], 1).shape == values.shape
    other = QuantizedKV.from_dense(torch.randn(2, 2, 9, 32), "nuq4_values", static=fitted("nuq4_values"))
    other[:, :1, 3:5].copy_(one)
    assert other.dequantize()[:, 0, 3:5].any()


@pytest.mark.parametrize("name", ["nuq4_keys", "nuq4_values"])
def test_caches_of_unlike_codebooks_are_not_joined_as_one(name: str) -> None:
    """They are decoded, or refused; never read with the other's entries."""
    a, b = (
        QuantizedKV.from_dense(
            torch.randn(1, 2, 4, 32), name, static=fitted(name, turned=turned) | {"codebook": book}
        )
        for turned, book in ((True, torch.linspace(-1, 1, 16)), (True, torch.linspace(-2, 2, 16)))
    )
    for dim in (0, 1, 2):
        joined = torch.cat([a, b], dim)
        dense = joined.dequantize() if isinstance(joined, QuantizedKV) else joined
        assert torch.equal(dense + 0, torch.cat([a.dequantize(), b.dequantize()], dim)), dim

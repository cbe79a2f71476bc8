"""Dropping tokens of a handle: what is left reads as before, in codes that were moved, and the cache goes on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvq_ops import (
    QuantizedKV,
    errors,
    eviction_ops,  # noqa: F401  registers the operators
    get_format,
    quantize,
)
from kvq_ops.eviction import choose_tokens, keep_newest, keep_tokens_, token_unit
from kvq_ops.formats import Format, names
from tests.ops import checks, windows

FORMATS = (*names(), "int4_group32+outlier5%", "int2_group32+hadamard", *windows.SMALL, *windows.CALIBRATED)
T, MORE = 240, 60


def empty(name: str, shape: tuple[int, ...]) -> QuantizedKV:
    return QuantizedKV(checks.empty(name, *shape), name, "bhtd", torch.float32)


def cache_of(name: str, x: Tensor, capacity: int) -> QuantizedKV:
    handle = empty(name, (*x.shape[:2], capacity, x.shape[3]))
    handle.index_copy_(2, torch.arange(x.shape[2]), x)
    return handle


def chosen(fmt: Format, count: int) -> Tensor:
    """Slots ``[B, H, K]``, others in each head: whole groups, the first and the newest among them."""
    unit = token_unit([fmt])
    mass = torch.rand(2, 3, T)
    if any(plane.axes.startswith("B1T") for plane in fmt.planes):
        mass = mass[:, :1].expand(2, 3, T)
    return choose_tokens(
        mass,
        torch.zeros(2, dtype=torch.int64),
        count,
        sinks=12,
        recent=max(20, fmt.window if fmt.windowed else 0),
        unit=unit,
    )


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_kept_reads_as_before_and_the_cache_goes_on(name: str, elsewhere: bool) -> None:
    fmt = get_format(name)
    x = torch.randn(2, 3, T + MORE, 32)
    whole = cache_of(name, x[:, :, :T], T + MORE)
    source = cache_of(name, x[:, :, :T], T)
    kept = chosen(fmt, 225)
    count = kept.shape[2]
    target = empty(name, (2, 3, 300, 32)) if elsewhere else cache_of(name, x[:, :, :T], 300)
    keep_tokens_(target, source if elsewhere else target, kept)

    def gathered(tensor: Tensor) -> Tensor:
        return tensor.gather(2, kept.unsqueeze(3).expand(*kept.shape, 32))

    assert target.length.tolist() == [count] * 2 and 225 - token_unit([fmt]) < count <= 225
    assert torch.equal(target.dequantize()[:, :, :count], gathered(whole.dequantize()))
    assert not target.dequantize()[:, :, count:].any()
    # Codes, bit by bit.
    for plane, new, old in zip(fmt.planes, target.planes(), source.planes(), strict=True):
        if plane.per_token:
            coded = int(target.plane_coded[0]) if fmt.windowed else count
            at = kept[:, : old.shape[1], : coded : plane.tokens] // plane.tokens
            shape = [*at.shape, *old.shape[3:]]
            want = old.gather(2, at.reshape(*at.shape, *[1] * (old.dim() - 3)).expand(shape))
            assert torch.equal(new[:, :, : at.shape[2]], want), plane.name
        elif plane.static:
            assert torch.equal(new, old), plane.name
    if "position" in [plane.name for plane in fmt.planes]:
        return  # what comes later is coded as standing elsewhere, which reads nearly the same
    # Tokens that come later are coded as they are behind the whole cache.
    for start in range(0, MORE, 7):
        part = x[:, :, T + start : T + min(start + 7, MORE)]
        for handle, at in ((whole, T + start), (target, count + start)):
            handle.index_copy_(2, torch.arange(part.shape[2]) + at, part)
    assert torch.equal(target.dequantize()[:, :, :count], gathered(whole.dequantize())) or fmt.windowed
    recent = slice(-MORE - 20, None)
    assert torch.equal(
        target.dequantize()[:, :, : count + MORE][:, :, recent], whole.dequantize()[:, :, recent]
    )


@pytest.mark.parametrize(
    "name", ["none", "int8_per_token_head", "test_keys_g8r8", "int4_group32+recent4+sink3"]
)
def test_the_operator_moves_codes_or_dense_values(name: str) -> None:
    x = torch.randn(2, 3, 40, 32)
    handle = cache_of(name, x, 44)
    dense = handle.dequantize()
    kept = keep_newest(handle, 40, 8)
    for cache in (handle, dense):
        torch.ops.kvq.keep_tokens_(cache, kept)
    assert torch.equal(handle.dequantize()[:, :, 3:], dense[:, :, 3:])
    assert torch.equal(handle.dequantize(), dense) and not dense[:, :, 32:].any()


def test_slices_are_refused() -> None:
    handle = QuantizedKV.empty((1, 2, 8, 32), "int8_per_token_head")
    with pytest.raises(errors.UnsupportedWriteError):
        keep_tokens_(handle[:, :, :4], handle, torch.zeros(1, 2, 1, dtype=torch.int64))


# --------------------------------------------------------------------------------------------------------- the choice


def test_the_heaviest_stay_with_the_first_and_the_newest() -> None:
    mass = torch.tensor(
        [[[9.0, 1.0, 5.0, 7.0, 5.0, 2.0, 0.0, 0.0], [0.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]]]
    )
    none = torch.zeros(1, dtype=torch.int64)
    assert choose_tokens(mass, none, 5).tolist() == [[[0, 2, 3, 4, 5], [1, 2, 3, 4, 5]]]
    # Of equals the earlier stays; the first and the newest stay whatever they weigh.
    assert choose_tokens(mass, none, 5, sinks=1, recent=2).tolist() == [[[0, 2, 3, 6, 7], [0, 1, 2, 6, 7]]]
    # Padding goes first, and what is protected begins behind it.
    pads = torch.tensor([3])
    assert choose_tokens(mass, pads, 6, sinks=1, recent=2).tolist() == [
        [[0, 3, 4, 5, 6, 7], [0, 3, 4, 5, 6, 7]]
    ]
    assert choose_tokens(mass, pads, 4, sinks=1, recent=2).tolist() == [[[3, 4, 6, 7], [3, 4, 6, 7]]]
    # Groups go as one; six of eight in pairs.
    assert choose_tokens(mass, none, 7, unit=2).tolist() == [[[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]]
    assert choose_tokens(mass[:, :, :7], none, 5, unit=3).tolist() == [[[0, 1, 2, 6], [0, 1, 2, 6]]]
    assert choose_tokens(mass, none, 8).tolist() == [[list(range(8))] * 2]


def test_storage_is_not_shared_with_what_was_dropped() -> None:
    store = quantize(torch.randn(1, 1, 8, 32), "int8_per_token_head")
    handle = QuantizedKV(store, "int8_per_token_head", "bhtd", torch.float32)
    addresses = [plane.data_ptr() for plane in handle.planes()]
    keep_tokens_(handle, handle, torch.tensor([[[1, 5]]]))
    assert [plane.data_ptr() for plane in handle.planes()] == addresses

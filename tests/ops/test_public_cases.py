"""Cases from public reports on every implementation of the operators, each with the value that it should have.

The ids are those of the reports; ``tests/cases`` has the same at the level of caches, passes and models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import registry
from kvq_ops.errors import CapacityError, DtypeError
from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.attention_cases import HKV, HQ, TQ, B, D, T, case

WINDOW = "int8_per_channel"


@pytest.fixture(params=checks.implementations("append_"))
def run_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every operator by one implementation; what it does not serve here is not tried."""
    fmt = get_format("int8_per_token_head")
    if reason := checks.refusal(request.param, "append_", [fmt], [D], torch.float32):
        pytest.skip(f"{request.param}: {reason}")
    with registry.use_implementation(request.param):
        yield request.param


def appended(name: str, x: Tensor, sizes: list[int], capacity: int | None = None) -> list[Tensor]:
    """A store of ``x`` after appends of ``sizes`` tokens."""
    store = get_format(name).empty_store(
        x.shape[0], x.shape[1], capacity or x.shape[2], x.shape[3], dtype=x.dtype
    )
    start = 0
    for size in sizes:
        kvq_ops.append_(store, torch.arange(start, start + size), x[:, :, start : start + size], name)
        start += size
    return store


# --------------------------------------------------------------------------------------------------------- attention


def test_A2_a_mask_is_never_dropped(run_by: str) -> None:
    """What a mask closes may hold anything: 1000 more in its keys and values changes no bit."""
    name = "int8_per_token_head"
    mask = torch.rand(B, 1, TQ, T) < 0.6
    mask[..., 0], mask[..., 5] = True, False
    made = case(name, mask=torch.where(mask, 0.0, -math.inf))
    made.check_tight(made.run())
    key, value = made.key.clone(), made.value.clone()
    key[:, :, 5] += 1e3
    value[:, :, 5] += 1e3
    moved = [kvq_ops.quantize(x, name) for x in (key, value)]
    assert torch.equal(made.run(key_store=moved[0], value_store=moved[1]), made.run())
    assert not torch.allclose(made.run(key_store=moved[0], value_store=moved[1], mask=None), made.run())


def test_A4_a_soft_cap_is_applied_and_a_wide_one_is_none(run_by: str) -> None:
    made = case(softcap=5.0, scale=1.0)
    made.query *= (
        40.0 / (made.query.unsqueeze(3) @ made.key.repeat_interleave(2, 1).unsqueeze(2).mT).abs().max()
    )
    made.check_tight(made.run())
    plain = made.run(softcap=0.0)
    # tanh(x) is x up to x ** 3 / 3, here of 40 in a million.
    assert torch.allclose(made.run(softcap=1e6), plain, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(made.run(), plain, atol=1e-2)


def test_A5_query_heads_read_their_kv_head_in_order(run_by: str) -> None:
    """Heads 0 and 1 read kv head 0: what ``repeat_interleave`` gives, and tiling does not."""
    made = case()
    want = made.run()
    for repeat, right in (
        (lambda p: p.repeat_interleave(2, 1), True),
        (lambda p: p.repeat(1, 2, 1, 1), False),
    ):
        stores = [
            [repeat(p) if p.dim() == 4 else repeat(p.unsqueeze(-1)).squeeze(-1) for p in store[:-1]]
            + [store[-1]]
            for store in (made.key_store, made.value_store)
        ]
        out = made.run(key_store=stores[0], value_store=stores[1])
        assert torch.allclose(out, want, atol=1e-5) == right


def test_D8_a_window_of_four(run_by: str) -> None:
    """A prompt of eleven at once and in threes, then six steps; with a learned sink and without."""
    name, total = "int8_per_token_head", 17
    key, value = torch.randn(1, 1, total, D), torch.randn(1, 1, total, D)
    query = torch.randn(1, 2, total, D)
    for sizes, sinks in (([11] + [1] * 6, None), ([3, 3, 3, 2] + [1] * 6, torch.randn(2))):
        stores = [get_format(name).empty_store(1, 1, total, D) for _ in range(2)]
        start = 0
        for size in sizes:
            now = slice(start, start + size)
            for store, x in zip(stores, (key, value), strict=True):
                kvq_ops.append_(store, torch.arange(now.start, now.stop), x[:, :, now], name)
            out = kvq_ops.attention(query[:, :, now], *stores, name, name, causal=True, window=4, sinks=sinks)
            held = [checks.decoded(get_format(name), store) for store in stores]
            want = checks.exact_attention(
                query[:, :, now], *held, causal=True, window=4, sinks=sinks, lengths=[now.stop]
            )
            checks.assert_tight(out, want)
            start += size


@pytest.mark.parametrize("smallest", [torch.float32, torch.bfloat16])
def test_E5_a_row_of_the_smallest_number_is_not_closed(run_by: str, smallest: torch.dtype) -> None:
    """Masks of padded rows hold ``finfo.min`` throughout: such a row is the mean of its values, minus infinity closes."""
    lowest = torch.finfo(smallest).min
    mask = torch.zeros(B, 1, TQ, T, dtype=smallest)
    mask[0, :, 0] = lowest
    mask[0, :, 1] = lowest
    mask[0, :, 1, :4] = -math.inf
    mask[1, :, :, 3:] = lowest
    made = case(mask=mask)
    out = made.run()
    made.check_tight(out)
    values = torch.from_numpy(made.decoded()[1]).repeat_interleave(HQ // HKV, 1)
    assert torch.allclose(out[0, :, 0], values[0].mean(1), atol=1e-5)
    assert torch.allclose(out[0, :, 1], values[0, :, 4:].mean(1), atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize("name", ["none", "int8_per_token_head", "int4_group8"])
def test_B1_results_are_new_and_mutations_are_seen(run_by: str, name: str) -> None:
    x = torch.randn(1, 2, 3, D)
    store = kvq_ops.quantize(x, name)
    back = kvq_ops.dequantize(store, name)
    out = kvq_ops.attention(x, store, store, name, name)
    memory = {t.untyped_storage().data_ptr() for t in (x, *store)}
    assert not memory & {t.untyped_storage().data_ptr() for t in (back, out)}
    assert x.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in store}
    before = [plane._version for plane in store]
    kept = x.clone()
    kvq_ops.append_(store, torch.arange(2), x[:, :, :2], name)
    assert torch.equal(x, kept)
    for plane, was, now in zip(get_format(name).planes, before, store, strict=True):
        assert now._version > was, plane.name


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_D2_a_second_prompt_on_one_cache(run_by: str, dtype: torch.dtype) -> None:
    """Ten tokens, three steps, six more: a length of 19, and results in the dtype of the query."""
    for name in ("none", "int4_group8+recent4"):
        x = torch.randn(B, HKV, 19, D).to(dtype)
        store = appended(name, x, [10, 1, 1, 1, 6])
        assert store[-1].tolist() == [19] * B
        assert kvq_ops.attention(x[:, :, :1], store, store, name, name).dtype == dtype
        other = torch.float16 if dtype is torch.float32 else torch.float32
        if get_format(name).keeps_exact:
            with pytest.raises(DtypeError):
                kvq_ops.append_(store, torch.arange(1), x[:, :, :1].to(other), name)


# ---------------------------------------------------------------------------------------------------------------- cache


def test_D3_the_newest_and_the_first_are_exact(run_by: str) -> None:
    x = torch.randn(1, 2, 20, D)
    store = appended("int4_group8+recent8+sink2", x, [20])
    back = kvq_ops.dequantize(store, "int4_group8+recent8+sink2")
    assert torch.equal(back[:, :, 12:], x[:, :, 12:]) and torch.equal(back[:, :, :2], x[:, :, :2])
    assert (back[:, :, 2:12] != x[:, :, 2:12]).any(-1).all()


def test_D4_codes_do_not_depend_on_how_tokens_arrive(run_by: str) -> None:
    """Groups and a window of eight, 43 tokens: at once, singly, in sevens."""
    name = "int4_channel8+recent8"
    fmt, x = get_format(name), torch.randn(1, 1, 43, 8)
    whole, *others = (appended(name, x, sizes) for sizes in ([43], [1] * 43, [7] * 6 + [1]))
    for store in others:
        checks.assert_same_planes(store, whole, fmt)
    coded = int(whole[fmt.index("coded")])
    assert coded == 32 and 43 - coded <= 8 + 8
    error = (kvq_ops.dequantize(whole, name) - x).abs()
    assert (error[:, :, :coded].amax(-1) > 0).all() and not error[:, :, coded:].any()


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_group8", "turbo4", "int4_channel4+recent3"])
def test_D5_neighbours_and_padding_do_not_enter_a_row(run_by: str, name: str) -> None:
    """Lengths 9 and 5, padding of 1000, and a neighbour that is a hundred times as loud: the same bits as alone."""
    fmt, x = get_format(name), torch.randn(2, 2, 9, 8)
    x[0] *= 100
    alone = appended(name, x[1:, :, :5].contiguous(), [5], 9)
    store = fmt.empty_store(2, 2, 9, 8)
    if fmt.windowed:
        rows = [
            [p if plane.static else p[b : b + 1] for plane, p in zip(fmt.planes, store, strict=True)]
            for b in (0, 1)
        ]
        for row, count, b in zip(rows, (9, 5), (0, 1), strict=True):
            kvq_ops.append_(row, torch.arange(count), x[b : b + 1, :, :count], name)
    else:
        padded = x.clone()
        padded[1, :, 5:] = 1e3
        kvq_ops.append_(store, torch.arange(9), padded, name)
        store[-1].copy_(torch.tensor([9, 5]))
    for plane, got, want in zip(fmt.planes, store, alone, strict=True):
        part = slice(0, -(-5 // plane.tokens)) if plane.per_token and not fmt.windowed else slice(None)
        mine, other = got[1:], want
        if plane.per_token and plane.name not in ("recent", "sinks"):
            mine, other = mine[:, :, part], other[:, :, part]
        assert torch.equal(mine, other), plane.name


def test_D5_padding_enters_no_scale_of_a_pool(run_by: str) -> None:
    """A scale for the whole pool is fitted to what is written, not to what is skipped."""
    for name in ("fp8_e4m3", "int8_per_head", "nvfp4"):
        fmt, x = get_format(name), torch.randn(2, 2, 9, 16)
        padded = x.clone()
        padded[1, :, 5:] = 1e3
        pools = []
        for given in (x, padded):
            pool = fmt.empty_store(6, 2, 4, 16)
            position = torch.arange(9).expand(2, -1).clone()
            position[1, 5:] = -1
            kvq_ops.paged_append_(pool, torch.tensor([[4, 0, 2], [1, 3, -1]]), position, given, name)
            pools.append(pool)
        checks.assert_same_planes(*pools, fmt)


def test_D12_the_ninth_token_and_no_token(run_by: str) -> None:
    for name in ("int8_per_token_head", "int4_group8+recent2", WINDOW):
        x = torch.randn(1, 2, 9, 8)
        store = appended(name, x, [8], 8)
        before = checks.copy(store)
        with pytest.raises(CapacityError):
            kvq_ops.append_(store, torch.tensor([8]), x[:, :, 8:], name)
        kvq_ops.append_(store, torch.arange(0), x[:, :, :0], name)
        checks.assert_same_planes(store, before, get_format(name))


# -------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "name",
    ["int8_per_token_head", "int4_group32", "int2_group32", "nvfp4", "mxfp4", "mxfp8", "fp8_e4m3", "turbo3"],
)
def test_F1_zeros_constants_and_one_large_value(run_by: str, name: str) -> None:
    zeros = kvq_ops.quantize(torch.zeros(1, 2, 2, 32), name)
    assert not kvq_ops.dequantize(zeros, name).any()
    constant = kvq_ops.dequantize(kvq_ops.quantize(torch.full((1, 2, 2, 32), 3.0), name), name)
    if "minimum" in get_format(name)._index:
        assert (constant == 3.0).all()
    assert constant.isfinite().all()
    if not get_format(name).rotation:
        assert ((constant - 3.0).abs() <= 3.0 / 16).all()
    x = torch.randn(1, 2, 2, 32).bfloat16()
    x[0, 0, 0, 9] = -70000.0
    store = kvq_ops.quantize(x, name)
    assert all(plane.isfinite().all() for plane in store if plane.is_floating_point())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert kvq_ops.dequantize(store, name, dtype).isfinite().all()
    assert kvq_ops.attention(x[:, :, :1], store, store, name, name).isfinite().all()


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_group32", "mxfp4", "turbo4"])
def test_F1_exactly_k_outliers_under_ties(run_by: str, name: str) -> None:
    """1% of 256 is three; the lowest indices among equals."""
    name = f"{name}+outlier1%"
    fmt, x = get_format(name), torch.randn(1, 1, 3, 256)
    x[:, :, 1] = torch.sign(x[:, :, 1])
    x[:, :, 2] = 0
    store = kvq_ops.quantize(x, name)
    index, value = (store[fmt.index(plane)] for plane in ("outlier_index", "outlier_value"))
    assert index.shape == (1, 1, 3, 3) and (index.diff() > 0).all()
    assert index[0, 0, 2].tolist() == [0, 1, 2]
    if not fmt.rotation:
        # Around zero all are as far out as each other; else those of the sign that the lower median has not.
        far = torch.arange(256)
        if "minimum" in fmt._index:
            far = (x[0, 0, 1] != x[0, 0, 1].median()).nonzero().flatten()
        assert index[0, 0, 1].tolist() == far[:3].tolist()
        assert torch.equal(value, x.gather(-1, index.long()))
        assert torch.equal(kvq_ops.dequantize(store, name).gather(-1, index.long()), value)


def test_F2_bytes_of_what_does_not_fit(run_by: str) -> None:
    """Float8 with a scale of one: saturation, NaN as zero, subnormals, ties to even; the bytes written out."""
    given = {
        1000.0: 0x7E, -1000.0: 0xFE, math.inf: 0x7E, -math.inf: 0xFE, math.nan: 0x00, 449.0: 0x7E, 464.5: 0x7E,
        448.0: 0x7E, 432.0: 0x7E, 416.0: 0x7D, 2.0**-9: 0x01, 2.0**-10: 0x00, 1.5 * 2.0**-9: 0x02, 2.5 * 2.0**-9: 0x02,
        2.0**-6: 0x08, 1e-40: 0x00, 0.5: 0x30, 2.5: 0x42, 1.0625: 0x38, 1.1875: 0x3A,
    }  # fmt: skip
    x = torch.tensor(list(given)).view(1, 1, 1, -1)
    store = get_format("fp8_e4m3").empty_store(*x.shape)
    store[1].fill_(1.0)
    kvq_ops.append_(store, torch.tensor([0]), x, "fp8_e4m3")
    assert store[0].flatten().tolist() == list(given.values())
    # e5m2: the largest is 57344; from 61440 on a plain conversion gives infinity.
    wide = {
        60000.0: 0x7B,
        61440.0: 0x7B,
        -math.inf: 0xFB,
        math.nan: 0,
        2.0**-16: 0x01,
        2.0**-17: 0x00,
        1.125: 0x3C,
    }
    x = torch.tensor(list(wide)).view(1, 1, 1, -1)
    store = get_format("fp8_e5m2").empty_store(*x.shape)
    store[1].fill_(1.0)
    kvq_ops.append_(store, torch.tensor([0]), x, "fp8_e5m2")
    assert store[0].flatten().tolist() == list(wide.values())


def test_F2_integers_divide_and_round_to_even(run_by: str) -> None:
    """Steps of one, halves between them: neither truncation nor rounding away; and quotients that a reciprocal gets wrong."""
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 1e-40, math.inf, -math.inf, math.nan])
    store = kvq_ops.quantize(x.view(1, 1, 1, -1), "int8_per_token_head")
    assert store[1].item() == 1.0
    assert store[0].flatten().tolist() == [127, 0, 2, 2, 0, -2, -2, 126, 0, 127, -127, 0]
    wide = torch.randn(1, 1, 8, 64)
    for name in ("int8_per_token_head", "int4_group32", "nvfp4"):
        fmt = get_format(name)
        checks.assert_planes(kvq_ops.quantize(wide, name), fmt, checks.expected(fmt, wide), run_by)
    scale = (np.abs(wide.numpy()).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    assert (np.trunc(wide.numpy() / scale) != np.rint(wide.numpy() / scale)).mean() > 0.4


def test_F2_e2m1_ties(run_by: str) -> None:
    """0.25, 0.75 and so on with scales of one: the even code, as in the golden vectors."""
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, 7.0, -7.0, 0.0, 0.0, 0.0, 0.0])
    want = [0, 2, 2, 4, 4, 6, 6, 7, 8, 14, 7, 15, 0, 0, 0, 0]
    store = kvq_ops.quantize(torch.cat((x, x)).view(1, 1, 1, 32), "mxfp4")
    assert store[1].flatten().tolist() == [127], "floor(log2 7) - 2 is 0"
    codes = torch.stack((store[0] & 15, store[0] >> 4), -1).flatten()
    assert codes.tolist() == want * 2


@pytest.mark.parametrize("name", ["int4_group64", "int2_group64", "int4_group64_bf16"])
def test_F4_tail_lanes_do_not_widen_a_range(run_by: str, name: str) -> None:
    """D=96 and 100, so that the last group is short, data in [5, 6]: half a step of the true range."""
    fmt = get_format(name)
    for dim in (96, 100):
        x = torch.rand(1, 2, 3, dim) + 5
        store = kvq_ops.quantize(x, name)
        scale, minimum = store[fmt.index("scale")].float(), store[fmt.index("minimum")].float()
        low = torch.stack([x[..., :64].amin(-1), x[..., 64:].amin(-1)], -1)
        high = torch.stack([x[..., :64].amax(-1), x[..., 64:].amax(-1)], -1)
        eps = torch.finfo(store[fmt.index("scale")].dtype).eps
        step = (high - low) / (2**fmt.bits - 1)
        assert ((scale - step).abs() <= eps * step).all() and ((minimum - low).abs() <= eps * low).all()
        error = (kvq_ops.dequantize(store, name) - x).abs()
        # The minimum is rounded too, and what lies beyond the last code then saturates.
        assert error.max() <= float((step / 2 + 2 * eps * high).max())


def test_F6_scales_lie_in_the_order_of_their_blocks(run_by: str) -> None:
    """Every block of sixteen another power of two: relative L2 within 0.15, permuted scales far off."""
    fmt = get_format("nvfp4")
    power = 2.0 ** (torch.randperm(16) - 8).repeat_interleave(16)
    x = torch.randn(1, 2, 3, 256) * power
    store = kvq_ops.quantize(x, "nvfp4")

    def worst(planes: list[Tensor]) -> float:
        wrong, right = (
            t.unflatten(-1, (16, 16)).square().sum((0, 1, 2, 4))
            for t in (kvq_ops.dequantize(planes, "nvfp4") - x, x)
        )
        return float((wrong / right).sqrt().max())

    assert worst(store) <= 0.15
    at = fmt.index("block_scale")
    for order in (lambda p: p.roll(1, -1), lambda p: p.unflatten(-1, (4, 4)).mT.flatten(-2)):
        broken = checks.copy(store)
        broken[at] = order(broken[at]).contiguous()
        assert worst(broken) > 0.5

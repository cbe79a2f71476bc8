"""Group D, cache behaviour, over every format of the table.

D8 is beside this file. Cases that need a whole model are beside the models: D9 and D10 in ``tests/hf`` and ``tests/models``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import QuantizedKV, get_format, quantize
from kvq_ops.cache import crop_, reorder
from kvq_ops.errors import CapacityError, DtypeError, KVQError
from kvq_ops.formats import parse_kv_format
from tests.cases import every
from tests.cases.every import HKV, HQ, LOSSY, OF_A_TOKEN, ROWS, SPECS, B, D, T
from tests.ops import checks

SHORT = "+recent4"


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(checks.raw(a), checks.raw(b))


def differing(a: QuantizedKV, b: QuantizedKV) -> list[str]:
    """Planes of rows in which two caches differ."""
    other = every.per_token_planes(b)
    return [name for name, plane in every.per_token_planes(a).items() if not same_bytes(plane, other[name])]


def short_window(name: str) -> str:
    """The format with a window of four tokens: with the 128 of KIVI nothing here would ever be coded."""
    fmt = get_format(name)
    return name if fmt.lossless or fmt.recent == 0 and fmt.base is None or fmt.recent < 9 else name + SHORT


# ------------------------------------------------------------------------------------------------------------------ D1


@pytest.mark.parametrize("name", ROWS)
def test_d1_reorder_repeat_select_and_crop_move_codes(name: str) -> None:
    """B=3, T=11, R=4: every plane of every row goes along, and reading afterwards is reading the old rows."""
    name = short_window(name)
    x = torch.randn(3, HKV, 11, D)
    cache = every.filled(name, x)
    crop_(cache, torch.tensor([11, 9, 5]))  # across the border of what is coded
    assert cache.length.tolist() == [11, 9, 5]
    before, read = every.per_token_planes(cache), cache.dequantize()
    moves = {"reorder": [2, 0, 0], "select": [1], "repeat": [0, 0, 1, 1, 2, 2]}
    for how, index in moves.items():
        moved = reorder(cache, index) if how != "repeat" else cache.repeat_interleave(2, 0)
        assert isinstance(moved, QuantizedKV), how
        for plane, tensor in every.per_token_planes(moved).items():
            assert same_bytes(tensor, before[plane][index]), (how, plane)
        assert torch.equal(moved.dequantize(), read[index]), how
    wrong = reorder(cache, [0, 2, 0])
    assert "codes" in differing(wrong, reorder(cache, [2, 0, 0])) or "recent" in differing(
        wrong, reorder(cache, [2, 0, 0])
    )


@pytest.mark.parametrize("name", ROWS)
def test_d1_a_rejected_draft_leaves_what_was_never_drafted(name: str) -> None:
    """Draft five, reject three: the cache of two, but for tokens that the draft made old, which read as their codes."""
    name = short_window(name)
    fmt = get_format(name)
    x, draft = torch.randn(B, HKV, 24, D), torch.randn(B, HKV, 5, D)
    for kept in (5, 11, 16):
        drafted_text = torch.cat([x[:, :, :kept], draft], 2)
        drafted = every.filled(name, drafted_text, [kept, 5], 24, sample=x)
        never = every.filled(name, drafted_text[:, :, : kept + 2], [kept, 2], 24, sample=x)
        flushed = fmt.windowed and not torch.equal(drafted.plane_coded, never.plane_coded)
        crop_(drafted, kept + 2)
        assert drafted.length.tolist() == [kept + 2] * B
        if not flushed:
            assert torch.equal(drafted.dequantize(), never.dequantize()), kept
            if not fmt.windowed:
                assert not differing(drafted, never), kept
            continue
        # Each token is exact, or its code in the text as it was drafted.
        codes = every.coded(name, drafted_text, sample=x)
        got, want = drafted.dequantize(), never.dequantize()
        for t in range(kept + 2):
            one = got[:, :, t]
            assert torch.equal(one, want[:, :, t]) or torch.equal(one, codes[:, :, t]), (kept, t)
        # It goes on as any other.
        more = torch.randn(B, HKV, 3, D)
        every.append(drafted, torch.cat([got[:, :, : kept + 2], more], 2), [3], kept + 2)
        assert torch.equal(drafted.dequantize()[:, :, kept + 4], more[:, :, 2]) or fmt.recent == 0


# ------------------------------------------------------------------------------------------------------------------ D2


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_d2_a_second_prompt_on_one_cache(spec: str, dtype: torch.dtype) -> None:
    """Prefill 10, decode 3, prefill 6: length 19, each output in the query's dtype and tight."""
    pair = parse_kv_format(spec)
    key, value = (torch.randn(B, HKV, 19, D).to(dtype) for _ in range(2))
    caches = [every.empty(pair.key.name, key, 24), every.empty(pair.value.name, value, 24)]
    start = 0
    for size in (10, 1, 1, 1, 6):
        for cache, x in zip(caches, (key, value), strict=True):
            every.append(cache, x, [size], start)
        start += size
        query = torch.randn(B, HQ, size, D).to(dtype)
        out = every.attend(query, *caches, causal=True)
        assert out.dtype == dtype
        every.check_tight(out, query, *caches, causal=True)
    assert [cache.length.tolist() for cache in caches] == [[19, 19]] * 2
    other = torch.float16 if dtype != torch.float16 else torch.float32
    with pytest.raises(DtypeError, match=f"got: +{other}"):
        every.append(caches[0], key.to(other)[:, :, :1].expand(-1, -1, 20, -1), [1], 19)
    assert caches[0].length.tolist() == [19, 19]
    # A query of another dtype is answered in its own.
    out = every.attend(torch.randn(B, HQ, 1, D).to(other), *caches)
    assert out.dtype == other and out.isfinite().all()


@pytest.mark.parametrize("way", ["compile", "export"])
@pytest.mark.parametrize("spec", SPECS)
def test_d2_turns_compiled_and_exported_equal_eager_ones(spec: str, way: str) -> None:
    """The same steps through the graph passes: the same bytes in the caches, and attention of eager mode."""
    query, key, value = torch.randn(B, HQ, 24, D), torch.randn(B, HKV, 24, D), torch.randn(B, HKV, 24, D)
    calls = every.calls_of(query, key, value, [6] * 4)
    outs, planes = every.run_eagerly(spec, calls, key, value, 30)
    got, left = every.run(way, spec, calls, key, value, 30)
    pair = parse_kv_format(spec)
    for plane, tensor, want in zip((*pair.key.planes, *pair.value.planes), left, planes, strict=True):
        if way == "export" and plane.per_token:
            # Slots that nothing was written to hold the coded zeros of the buffer that was exported.
            tensor, want = (p[:, :, : -(-24 // plane.tokens)] for p in (tensor, want))
        if way == "compile" or plane.name != "length":
            assert same_bytes(tensor, want), plane.name
    for out, want in zip(got, outs, strict=True):
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "spec", ["key=int4_channel8+recent4,value=int4_group8+recent4", "int8_per_token_head"]
)
def test_d2_turns_through_inductor_equal_eager_ones(spec: str) -> None:
    query, key, value = torch.randn(B, HQ, 24, D), torch.randn(B, HKV, 24, D), torch.randn(B, HKV, 24, D)
    calls = every.calls_of(query, key, value, [10, 1, 1, 1, 6])
    outs, planes = every.run_eagerly(spec, calls, key, value, 24)
    got, left = every.run("inductor", spec, calls, key, value, 24)
    assert all(same_bytes(a, b) for a, b in zip(left, planes, strict=True))
    for out, want in zip(got, outs, strict=True):
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------ D3


@pytest.mark.parametrize("name", LOSSY)
def test_d3_the_newest_and_the_first_tokens_are_exact(name: str) -> None:
    """R=8, S=3, prefill 20: the last eight and the first three bit for bit, the rest as coded."""
    bare = name.split("+recent")[0].split("+sink")[0]
    name = f"{bare}+recent8+sink3"
    x = torch.randn(B, HKV, 20, D)
    back = every.filled(name, x).dequantize()
    assert torch.equal(back[:, :, -8:], x[:, :, -8:]) and torch.equal(back[:, :, :3], x[:, :, :3])
    fmt = get_format(name)
    old = 12 // fmt.token_group * fmt.token_group
    assert fmt.base is not None
    if old:
        want = every.coded(name, x[:, :, :old], sample=x)
        assert torch.equal(back[:, :, 3:old], want[:, :, 3:])
        assert not torch.equal(back[:, :, 3:old], x[:, :, 3:old]), "or nothing was quantized"
    assert torch.equal(back[:, :, old:], x[:, :, old:])


# ------------------------------------------------------------------------------------------------------------------ D4


@pytest.mark.parametrize("name", LOSSY)
def test_d4_any_split_of_43_tokens_gives_the_same_codes(name: str) -> None:
    bare = name.split("+recent")[0].split("+sink")[0]
    name = f"{bare}+recent8"
    fmt = get_format(name)
    x = torch.randn(B, HKV, 43, D)
    at_once, singly, sevens = (every.filled(name, x, sizes) for sizes in ([43], [1] * 43, [7] * 6 + [1]))
    coded = (43 - 8) // fmt.token_group * fmt.token_group
    assert at_once.plane_coded.tolist() == [coded] * B and 43 - coded <= 8 + fmt.token_group
    assert not differing(singly, at_once) and not differing(sevens, at_once)
    error = (at_once.dequantize() - x).abs().amax(-1)
    assert not error[:, :, coded:].any()
    assert (error[:, :, :coded] > 0).float().mean() > 0.99
    # Static planes were given and are as they were.
    for i in fmt.static_planes:
        assert same_bytes(at_once.planes()[i], singly.planes()[i])


@pytest.mark.parametrize("name", [name for name in LOSSY if not get_format(name).windowed])
def test_d4_any_split_without_a_window(name: str) -> None:
    x = torch.randn(B, HKV, 43, D)
    at_once = every.filled(name, x)
    for sizes in ([1] * 43, [7] * 6 + [1]):
        assert not differing(every.filled(name, x, sizes), at_once)
    assert "codes" in differing(every.filled(name, x.roll(1, 2)), at_once)


# ------------------------------------------------------------------------------------------------------------------ D5


@pytest.mark.parametrize("name", ROWS)
def test_d5_neighbours_and_pads_never_enter_a_row(name: str) -> None:
    """Lengths 9 and 5, pads of 1e3 behind, row A a hundred times as loud: row B is its solo run, byte for byte."""
    name = short_window(name)
    x = torch.randn(2, HKV, T, D)
    lengths = torch.tensor([9, 5])
    loud = x.clone()
    loud[0] *= 100
    loud[1, :, 5:] = 1e3
    # Scales that span rows are given; fitted ones are of all rows by definition.
    static = every.static_for(name, x) or None
    solo = QuantizedKV.from_dense(x[1:, :, :5], name, static=static)
    both = QuantizedKV.from_dense(loud, name, length=lengths, static=static)
    assert both.length.tolist() == [9, 5]
    assert torch.equal(both.dequantize()[1, :, :5], solo.dequantize()[0])
    assert not both.dequantize()[1, :, 5:].any()
    mine, alone = every.per_token_planes(both[1:]), every.per_token_planes(solo)
    for plane in get_format(name).planes:
        if plane.per_token and not get_format(name).windowed:
            count = -(-5 // plane.tokens)
            assert same_bytes(mine[plane.name][:, :, :count], alone[plane.name][:, :, :count]), plane.name


@pytest.mark.parametrize("name", [n for n in OF_A_TOKEN if not get_format(n).windowed])
def test_d5_pads_in_front_are_masked_and_touch_no_other_token(name: str) -> None:
    """Four pads of 1e3 before row B: its tokens have the codes of a solo run, and masked attention does not see the pads."""
    x = torch.randn(2, HKV, T, D)
    padded = x.clone()
    padded[1, :, :4] = 1e3
    padded[1, :, 4:] = x[1, :, : T - 4]
    static = every.static_for(name, x) or None
    both = QuantizedKV.from_dense(padded, name, static=static)
    solo = QuantizedKV.from_dense(x[1:, :, : T - 4], name, static=static)
    mine, alone = every.per_token_planes(both[1:]), every.per_token_planes(solo)
    for plane in get_format(name).planes:
        # A position is that of the slot, which the pads have moved.
        if plane.per_token and plane.name != "position":
            assert same_bytes(mine[plane.name][:, :, 4:], alone[plane.name]), plane.name
    query = torch.randn(2, HQ, 1, D)
    mask = torch.ones(2, 1, 1, T, dtype=torch.bool)
    mask[1, ..., :4] = False
    out = every.attend(query, both, both, mask=mask)
    every.check_tight(out, query, both, both, mask=mask)
    with pytest.raises(AssertionError):
        every.check_tight(every.attend(query, both, both), query, both, both, mask=mask)


@pytest.mark.parametrize("name", ROWS)
def test_d5_rows_that_arrive_raggedly(name: str) -> None:
    """Rows at different lengths in one append: each is as if it had come alone."""
    name = short_window(name)
    x = torch.randn(2, HKV, 14, D)
    static = every.static_for(name, x) or None
    both = QuantizedKV.from_dense(x[:, :, :12], name, length=torch.tensor([9, 5]), static=static)
    both = QuantizedKV.like(both, both.store)
    new = torch.stack([x[0, :, 9:12], x[1, :, 5:8]])
    position = torch.tensor([[9, 10, 11], [5, 6, 7]])
    kvq_ops.append_(both.store, position, new, name)
    for row, length in ((0, 12), (1, 8)):
        solo = QuantizedKV.from_dense(x[row : row + 1, :, :12], name, length=length, static=static)
        assert both.length[row] == length
        assert torch.equal(both.dequantize()[row, :, :length], solo.dequantize()[0, :, :length]), row


# ------------------------------------------------------------------------------------------------------------------ D9


@pytest.mark.parametrize("name", OF_A_TOKEN)
def test_d9_the_oldest_token_is_seen_by_full_attention_alone(name: str) -> None:
    """T = 3W: with another first token a window gives the very same, full attention something else."""
    name = short_window(name)
    x = torch.randn(B, HKV, 12, D)
    other = x.clone()
    other[:, :, 0] = torch.randn(B, HKV, D)
    query = torch.randn(B, HQ, 1, D)
    kv = [every.filled(name, text, sample=x) for text in (x, other)]
    windowed = [every.attend(query, c, c, causal=True, window=4) for c in kv]
    full = [every.attend(query, c, c, causal=True) for c in kv]
    assert torch.equal(*windowed) and not torch.allclose(*full, rtol=1e-3, atol=1e-3)
    every.check_tight(windowed[0], query, kv[0], kv[0], causal=True, window=4)


# ----------------------------------------------------------------------------------------------------------------- D12


@pytest.mark.parametrize("name", ROWS)
def test_d12_a_ninth_token_and_no_token(name: str) -> None:
    """Capacity 8: the ninth write is one clear error that changes nothing; nothing to write changes nothing."""
    x = torch.randn(B, HKV, 9, D)
    cache = every.filled(name, x[:, :, :8], [5, 3], sample=x)
    before = [plane.clone() for plane in cache.planes()]
    for how in (
        lambda: cache.index_copy_(2, torch.tensor([8]), x[:, :, 8:]),
        lambda: kvq_ops.append_(cache.store, torch.tensor([8]), x[:, :, 8:], name),
        lambda: kvq_ops.append_(cache.store, torch.arange(7, 9), x[:, :, 7:], name),
    ):
        with pytest.raises(CapacityError, match="allowed"):
            how()
        assert all(same_bytes(a, b) for a, b in zip(before, cache.planes(), strict=True))
    nothing = torch.empty(B, HKV, 0, D)
    cache.index_copy_(2, torch.empty(0, dtype=torch.long), nothing)
    kvq_ops.append_(cache.store, torch.empty(0, dtype=torch.long), nothing, name)
    assert all(same_bytes(a, b) for a, b in zip(before, cache.planes(), strict=True))


@pytest.mark.parametrize("spec", SPECS)
def test_d12_empty_caches_and_no_rows(spec: str) -> None:
    pair = parse_kv_format(spec)
    x = torch.randn(B, HKV, 8, D)
    key, value = every.empty(pair.key.name, x), every.empty(pair.value.name, x)
    out = every.attend(torch.randn(B, HQ, 1, D), key, value)
    assert out.shape == (B, HQ, 1, D) and not out.any(), "nothing to attend to gives zeros"
    for shape in ((0, HKV, 8, D), (B, HKV, 0, D)):
        static = [every.static_for(row, x) or None for row in (pair.key, pair.value)]
        caches = [
            QuantizedKV.empty(shape, row, static=planes)
            for row, planes in zip((pair.key, pair.value), static, strict=True)
        ]
        out = every.attend(torch.randn(shape[0], HQ, 1, D), *caches)
        assert out.shape == (shape[0], HQ, 1, D) and not out.any()
    if not pair.needs_calibration:
        for row in (pair.key, pair.value):
            store = quantize(torch.empty(0, HKV, 4, D), row.name)
            assert store[0].shape[0] == 0


def test_d12_a_format_that_must_be_calibrated_says_so() -> None:
    rows = [name for name in ROWS if get_format(name).calibrated]
    assert rows
    for name in rows:
        cache = QuantizedKV.empty((B, HKV, 8, D), name)
        with pytest.raises(KVQError, match="alibrat"):
            cache.index_copy_(2, torch.tensor([0]), torch.randn(B, HKV, 1, D))
        assert cache.length.tolist() == [0] * B

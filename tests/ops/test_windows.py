"""Exact tokens beside coded ones: what is coded depends on the tokens alone, and no token is coded twice."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import codecs, errors, registry, window
from kvq_ops.formats import get_format
from tests.ops import checks, oracles
from tests.ops.checks import DTYPES
from tests.ops.windows import (
    CALIBRATED,
    GROUPED,
    KIVI,
    SEVENS,
    SINGLE,
    SMALL,
    T,
    check,
    data,
    empty,
    filled,
    tokens_for,
)

EVERY = SMALL + KIVI


def splits(tokens: int) -> dict[str, list[int]]:
    chosen = random.Random(5)
    made = {"at once": [tokens], "singly": [1] * tokens, "sevens": [7] * (tokens // 7) + [tokens % 7]}
    for i in range(4):
        left, sizes = tokens, []
        while left:
            sizes.append(min(left, chosen.randint(1, (5, 12, 40, tokens)[i])))
            left -= sizes[-1]
        made[f"random {i}"] = sizes
    return made


# ------------------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("name", EVERY + CALIBRATED)
def test_codes_depend_on_the_tokens_alone(name: str) -> None:
    """At once, singly, in sevens, in random pieces: the codes of the oracle, and after every append."""
    x = data(name)
    tokens = x.shape[2]
    for how, sizes in splits(tokens).items():
        check(filled(name, x, sizes), name, x, [tokens] * 2, how)
    store, start = empty(get_format(name), x), 0
    for size in splits(tokens)["random 1"]:
        kvq_ops.append_(store, torch.arange(start, start + size), x[:, :, start : start + size], name)
        start += size
        check(store, name, x, [start] * 2, f"after {start}")


@pytest.mark.parametrize("name", SMALL)
def test_quantize_is_an_append_to_nothing(name: str) -> None:
    fmt = get_format(name)
    for dtype in DTYPES:
        x = data(name, dtype=dtype)
        store = kvq_ops.quantize(x, name)
        assert [p.dtype for p in store] == fmt.plane_dtypes(dtype)
        assert [tuple(p.shape) for p in store] == fmt.plane_shapes(*x.shape)
        if not fmt.static_planes:
            check(store, name, x, [T] * 2, str(dtype))
        assert sum(p.untyped_storage().nbytes() for p in store) == fmt.nbytes(*x.shape, dtype)
        assert sum(
            p.untyped_storage().nbytes() for p in fmt.empty_store(*x.shape, dtype=dtype)
        ) == fmt.nbytes(*x.shape, dtype)


@pytest.mark.parametrize("name", SMALL + CALIBRATED)
def test_no_token_is_coded_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token enters an encoder once, and a code that is written never changes."""
    fmt = get_format(name)
    assert fmt.base is not None
    x = data(name)
    seen: list[float] = []
    real = codecs.encode

    def counting(values: Tensor, *args: Any) -> Any:
        marks = values[0, 0, :, 0]
        seen.extend(marks[~marks.isnan()].tolist())
        return real(values, *args)

    monkeypatch.setattr(window, "encode", counting)
    store, before, known = empty(fmt, x), [], 0
    for t in range(T):
        with registry.use_implementation("torch"):  # others do not go through ``window.encode``
            kvq_ops.append_(store, torch.tensor([t]), x[:, :, t : t + 1], name)
        for plane, tensor, old in zip(fmt.planes, store, before, strict=False):
            if plane.per_token:
                old_part, part = old[:, :, : known // plane.tokens], tensor[:, :, : known // plane.tokens]
                assert torch.equal(old_part, part), plane.name
        before, known = checks.copy(store), int(store[fmt.index("coded")][0])
    assert (
        seen == x[0, 0, :known, 0].tolist()
        and known == max(0, T - fmt.recent) // fmt.token_group * fmt.token_group
    )


@pytest.mark.parametrize("name", ["test_keys_g8r8", "int4_group32+recent4", "kivi4_keys"])
def test_a_step_codes_no_more_than_one_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token must not cost an encoding of the whole window."""
    fmt = get_format(name)
    sizes: list[int] = []
    real = codecs.encode
    monkeypatch.setattr(window, "encode", lambda v, *a: (sizes.append(v.shape[2]), real(v, *a))[1])
    x = data(name)
    with registry.use_implementation("torch"):
        filled(name, x, [40, 1, 1])
    assert sizes[1:] == [fmt.token_group] * 2


def test_D3_the_newest_and_the_first_tokens_are_exact() -> None:
    """R=8, prefill 20: the last eight, and sinks where asked for, bit for bit; the others are coded."""
    for name, first in (
        ("int4_group32+recent8", 0),
        ("int4_group32+recent8+sink4", 4),
        ("test_keys_g8r8", 0),
    ):
        x = torch.randn(2, 2, 20, 32)
        back = kvq_ops.dequantize(kvq_ops.quantize(x, name), name)
        assert torch.equal(back[:, :, 12:], x[:, :, 12:]) and torch.equal(back[:, :, :first], x[:, :, :first])
        coded = get_format(name).token_group * (12 // get_format(name).token_group)
        changed = (back != x).any(-1).all(1).all(0)
        assert changed.tolist() == [first <= t < coded for t in range(20)]
    # One key channel a hundred times as loud: scales per token lose the others, scales per channel do not.
    x = torch.randn(1, 2, 64, 64)
    x[..., 11] = x[..., 11] * 10 + 100
    quiet = torch.arange(64) != 11

    def error(name: str) -> float:
        back = kvq_ops.dequantize(kvq_ops.quantize(x, name), name)
        return float(((back - x)[..., quiet] ** 2).mean() / (x[..., quiet] ** 2).mean())

    assert (
        error("int4_per_token_head") > 0.5
        and error("test_keys_g8r0") < 0.01
        and error("kivi4_keys+recent0") < 0.02
    )


@pytest.mark.parametrize("name", ["test_keys_g8r8"])
def test_D4_groups_of_eight_under_a_window_of_eight(name: str) -> None:
    """43 tokens at once, singly, in sevens: the same codes; old tokens have an error, the exact tail is at most R + G."""
    fmt, x = get_format(name), data(name)
    stores = [filled(name, x, sizes) for sizes in ([T], [1] * T, SEVENS)]
    for store in stores:
        coded = int(store[fmt.index("coded")][0])
        assert coded == 32 and T - coded <= 16
        back = kvq_ops.dequantize(store, name)
        assert ((back - x)[:, :, :coded].abs().amax(-1) > 0).all() and torch.equal(
            back[:, :, coded:], x[:, :, coded:]
        )
    for store in stores[1:]:
        for i in fmt.token_planes:
            size = 32 // fmt.planes[i].tokens
            assert torch.equal(store[i][:, :, :size], stores[0][i][:, :, :size])
    tails = [T - filled(name, x[:, :, :n], [n])[fmt.index("coded")][0].item() for n in range(1, T + 1)]
    assert max(tails[i] - (T - i - 1) for i in range(T)) == 15


# -------------------------------------------------------------------------------------------------- rows and neighbours


@pytest.mark.parametrize("name", SMALL + CALIBRATED)
def test_D5_ragged_rows_with_loud_neighbours(name: str) -> None:
    """Rows at their own positions, one a hundred times as loud: each holds what it would hold alone."""
    x = data(name, rows=3)
    x[0] *= 100
    fmt, chosen = get_format(name), random.Random(3)
    store, at = empty(fmt, x, T + 9), [0, 0, 0]
    for row, size in ((0, 1), (0, 9), (1, 4), (2, 17)):  # fills that make them ragged
        rows = [
            plane[row : row + 1] if not spec.static else plane
            for spec, plane in zip(fmt.planes, store, strict=True)
        ]
        part = x[row : row + 1, :, at[row] : at[row] + size]
        kvq_ops.append_(rows, torch.arange(at[row], at[row] + size), part, name)
        at[row] += size
    while max(at) < T:
        size = min(chosen.choice((1, 1, 2, 5, 11)), T - max(at))
        position = torch.tensor([[a + i for i in range(size)] for a in at])
        part = torch.stack([x[row, :, a : a + size] for row, a in enumerate(at)])
        kvq_ops.append_(store, position, part, name)
        at = [a + size for a in at]
        check(store, name, x, at, f"at {at}")
    assert len(set(at)) == 3


@pytest.mark.parametrize(
    "name", ["test_keys_g8r8", "int8_per_token_head+recent8+sink4", "kivi4_keys+recent0"]
)
def test_D5_padding_enters_no_scale(name: str) -> None:
    """Padding of 1e3 that a row's length leaves out, on the right, and a row alone."""
    x = torch.randn(2, 2, 40, 32)
    padded = torch.cat([x, torch.full((2, 2, 24, 32), 1e3)], 2)
    lengths = torch.tensor([40, 33])
    handle = kvq_ops.QuantizedKV.from_dense(padded, name, length=lengths)
    check(handle.store, name, padded, lengths.tolist(), "from_dense")
    alone = kvq_ops.quantize(x[1:, :, :33], name)
    assert torch.equal(handle.dequantize()[1, :, :33], kvq_ops.dequantize(alone, name)[0])


# ------------------------------------------------------------------------------------------------------------ roll-back


@pytest.mark.parametrize("name", SMALL + CALIBRATED)
def test_a_draft_that_flushed_nothing_leaves_no_trace(name: str) -> None:
    """Draft some tokens, append at an earlier position: as if they had never been there."""
    fmt, x = get_format(name), data(name)
    other = torch.randn(2, 2, 12, 32)
    for kept in range(1, T - 12):
        coded = (max(0, kept - fmt.recent) // fmt.token_group + 1) * fmt.token_group
        room = min(12, coded + fmt.recent - kept - 1)  # drafts that make no further group old
        if room < 1:
            continue
        store = filled(name, x, [kept])
        kvq_ops.append_(store, torch.arange(kept, kept + room), other[:, :, :room], name)
        kvq_ops.append_(store, torch.arange(kept, kept + 3), x[:, :, kept : kept + 3], name)
        check(store, name, x, [kept + 3] * 2, f"kept {kept} of {kept + room}")


@pytest.mark.parametrize("name", SMALL + CALIBRATED)
def test_a_roll_back_past_coded_tokens(name: str) -> None:
    """Whole groups stay coded as they were; of one that is cut through, the rest is exact as what it reads as."""
    fmt, x = get_format(name), data(name)
    group = fmt.token_group
    full = filled(name, x, [T])
    coded, before = int(full[fmt.index("coded")][0]), kvq_ops.dequantize(full, name)
    for kept in (0, 1, 5, 8, 13, 16, 27, 31, 32, 40, T):
        store = checks.copy(full)
        window.roll_back_(store, torch.full((2,), kept), fmt)
        assert store[-1].tolist() == [kept] * 2
        whole = min(coded, kept // group * group)
        assert store[fmt.index("coded")].tolist() == [whole] * 2
        back = kvq_ops.dequantize(store, name)
        assert torch.equal(back[:, :, :kept], before[:, :, :kept]), (
            f"{kept}: a token that stays changed its value"
        )
        assert not back[:, :, kept:].any()
        for plane, a, b in zip(fmt.planes, store, full, strict=True):
            if plane.per_token:
                assert torch.equal(a[:, :, : whole // plane.tokens], b[:, :, : whole // plane.tokens])
        # Going on from there: what was kept is the start of another text.
        text = torch.cat([back[:, :, :kept], torch.randn(2, 2, T - kept, 32)], 2)
        for size in (1, T):
            again, at = checks.copy(store), kept
            while at < T:
                step = min(size, T - at)
                kvq_ops.append_(again, torch.arange(at, at + step), text[:, :, at : at + step], name)
                at += step
            end = kvq_ops.dequantize(again, name)
            assert torch.equal(end[:, :, T - fmt.recent :], text[:, :, T - fmt.recent :]) or not fmt.recent
            assert torch.equal(end[:, :, :whole], before[:, :, :whole]), "a token was coded twice"
            if kept and not fmt.static_planes and whole < coded:
                values = checks.array(text[:, :, whole:])
                new = max(0, T - fmt.recent) // group * group - whole
                assert fmt.base is not None
                want = oracles.expected(fmt.base, values[:, :, :new])
                for i in fmt.token_planes:
                    plane = fmt.planes[i]
                    got = checks.array(again[i])[:, :, whole // plane.tokens : (whole + new) // plane.tokens]
                    assert np.array_equal(got, want[plane.name]), f"{plane.name} after {kept}"


@pytest.mark.parametrize("name", ["test_keys_g8r5s3", "int8_per_token_head+recent8+sink4"])
def test_rows_roll_back_on_their_own(name: str) -> None:
    x = data(name, rows=3)
    store = filled(name, x, [T])
    before = kvq_ops.dequantize(store, name)
    lengths = torch.tensor([T, 21, 2])
    kvq_ops.append_(
        store, lengths.unsqueeze(1) - 1, before[torch.arange(3), :, lengths - 1].unsqueeze(2), name
    )
    assert store[-1].tolist() == lengths.tolist()
    back = kvq_ops.dequantize(store, name)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(back[row, :, :length], before[row, :, :length]) and not back[row, :, length:].any()


def test_reopened_tokens_fit_the_dtype_of_the_ring() -> None:
    """The last step of a code may lie beyond the largest half."""
    name = "test_keys_g8r0"
    x = torch.full((1, 1, 16, 8), 65504.0).half()
    x[:, :, ::3] = -65504.0
    store = kvq_ops.quantize(x, name)
    window.roll_back_(store, torch.tensor([11]), get_format(name))
    assert store[get_format(name).index("recent")].isfinite().all()
    assert kvq_ops.dequantize(store, name, torch.float16).isfinite().all()


# ---------------------------------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize(
    "name", ["test_keys_g8r8", "test_keys_g8r20s11", "kivi4_keys", "int4_group32+recent8+sink4"]
)
def test_a_capacity_below_window_or_group(name: str) -> None:
    for capacity in (1, 3, 7, 8, 9, 15, 17):
        x = torch.randn(2, 1, capacity, 32)
        for sizes in ([capacity], [1] * capacity):
            store = filled(name, x, sizes)
            check(store, name, x, [capacity] * 2, f"capacity {capacity}")
        with pytest.raises(errors.CapacityError, match="nothing was written"):
            kvq_ops.append_(store, torch.tensor([capacity]), x[:, :, :1], name)
        check(store, name, x, [capacity] * 2, "after a refused append")


@pytest.mark.parametrize("name", EVERY)
def test_nothing_at_all(name: str) -> None:
    fmt = get_format(name)
    for shape in ((2, 2, 0, 32), (0, 2, 9, 32), (2, 0, 9, 32), (0, 2, 0, 32)):
        store = kvq_ops.quantize(torch.randn(shape), name)
        assert [tuple(p.shape) for p in store] == fmt.plane_shapes(*shape)
        assert kvq_ops.dequantize(store, name).shape == shape
        query = torch.randn(shape[0], shape[1] * 2, 3, 32)
        assert not kvq_ops.attention(query, store, store, name, name).any()
        kvq_ops.append_(store, torch.zeros(0, dtype=torch.int64), torch.zeros(*shape[:2], 0, 32), name)
    store = filled(name, data(name), [9])
    before = checks.copy(store)
    kvq_ops.append_(store, torch.zeros(0, dtype=torch.int64), torch.zeros(2, 2, 0, 32), name)
    checks.assert_same_planes(store, before, fmt)


@pytest.mark.parametrize("name", ["test_keys_g8r8", "nvfp4+sink2", "kivi4_values"])
def test_positions_that_jump_lose_nothing(name: str) -> None:
    fmt, x = get_format(name), torch.randn(2, 2, 20, 32)
    store = filled(name, x, [9], capacity=20)
    before = checks.copy(store)
    for position in (
        [10], [19], [9, 11], [9, 9], [10, 9], [11, 10, 9], [-1, 0], [19, 20], [8, 7], [[9], [10]], [[9, 10], [9, 8]],
    ):  # fmt: skip
        at = torch.tensor(position)
        with pytest.raises(errors.CapacityError, match=r"(?s)got:.*positions.*allowed:"):
            kvq_ops.append_(store, at, torch.randn(2, 2, at.shape[-1], 32), name)
        checks.assert_same_planes(store, before, fmt, str(position))
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(errors.DtypeError, match="exact"):
            kvq_ops.append_(store, torch.tensor([9]), torch.randn(2, 2, 1, 32).to(dtype), name)
    checks.assert_same_planes(store, before, fmt)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_values_do_not_wait_to_do_harm(name: str, bad: float) -> None:
    """What is not finite reads as finite while it is exact, enters no scale once it is coded, however it arrived."""
    fmt = get_format(name)
    for dtype in (torch.float32, torch.float16):
        x = data(name, dtype=dtype)
        x[0, 1, 13, 5] = 0
        spoilt = x.clone()
        spoilt[0, 1, 13, 5] = bad
        stores = []
        for sizes in ([T], [1] * T, [15, 20, 8]):
            store, at = empty(fmt, x), 0
            for size in sizes:
                kvq_ops.append_(store, torch.arange(at, at + size), spoilt[:, :, at : at + size], name)
                at += size
                assert kvq_ops.dequantize(store, name, dtype).isfinite().all()
            stores.append(store)
        for store in stores[1:]:
            for i in fmt.token_planes:
                size = int(store[fmt.index("coded")][0]) // fmt.planes[i].tokens
                assert torch.equal(store[i][:, :, :size], stores[0][i][:, :, :size]), "codes depend on chunks"
        a, b = kvq_ops.dequantize(filled(name, x, [T]), name), kvq_ops.dequantize(stores[0], name)
        others = torch.ones(a.shape, dtype=torch.bool)
        others[0, 1, 13] = False
        assert torch.equal(a[others], b[others])


def test_scales_that_span_tokens_are_fitted_to_what_is_coded() -> None:
    name = "fp8_e4m3+recent6"
    fmt, x = get_format(name), torch.randn(1, 2, 20, 32)
    x[:, :, 12:] *= 50
    store = fmt.empty_store(1, 2, 20, 32)
    kvq_ops.append_(store, torch.arange(6), x[:, :, :6], name)
    assert not store[fmt.index("scale")].any(), "nothing is coded yet"
    kvq_ops.append_(store, torch.arange(6, 12), x[:, :, 6:12], name)
    assert store[fmt.index("scale")].item() == np.float32(x[:, :, :6].abs().max()) / np.float32(448)


def test_the_oracle_would_notice() -> None:
    """Each claim of ``check`` fails when its part of the store is wrong."""
    name = "test_keys_g8r5s3"
    fmt, x = get_format(name), data("test_keys_g8r5s3")
    for plane, at in (
        ("codes", (1, 1, 9, 0)),
        ("scale", (0, 0, 2, 3)),
        ("recent", (1, 0, 40 % 13, 2)),
        ("sinks", (0, 1, 2, 4)),
        ("coded", (1,)),
    ):
        store = filled(name, x, [T])
        spoilt = store[fmt.index(plane)]
        spoilt[at] = spoilt[at] + 1
        with pytest.raises(AssertionError):
            check(store, name, x, [T] * 2)
    assert len(GROUPED) + len(SINGLE) == len(SMALL) and tokens_for(KIVI[0]) > 128 + 32


@pytest.mark.parametrize(
    "name", ["fp8_e4m3", "fp8_per_head", "nvfp4", "int4_per_head", "int8_per_tensor_asym"]
)
@pytest.mark.parametrize("implementation", ["torch", "cpu"])
def test_a_scale_is_fitted_to_all_tokens_that_are_known_when_the_first_is_coded(
    name: str, implementation: str
) -> None:
    """A quiet first token must not set the scale of those that follow, when they come one by one after it."""
    x = torch.randn(1, 2, 40, 16)
    x[:, :, 0] *= 0.01
    fmt, want = get_format(f"{name}+recent16"), kvq_ops.quantize(x[:, :, :17], name)
    store = fmt.empty_store(1, 2, 40, 16)
    with kvq_ops.use_implementation(implementation):
        for t in range(40):
            if t == 16:
                assert not any(store[i].any() for i in fmt.static_planes), "nothing is coded yet"
            kvq_ops.append_(store, torch.arange(t, t + 1), x[:, :, t : t + 1], fmt.name)
    for i in fmt.static_planes:
        assert torch.equal(store[i], want[get_format(name).index(fmt.planes[i].name)])

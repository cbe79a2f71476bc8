"""Exact tokens beside coded ones: what is coded depends on the tokens alone, and no token is coded twice."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kvq_ops
from kvq_ops import codecs, errors, reference, registry, window
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
    window_state,
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


# ------------------------------------------------------------------------------------------------------------ attention

PAIRS = (
    ("test_keys_g8r8", "int4_group32+recent8"),
    ("test_keys_g8r5s3", "test_keys_g8r20s11"),
    ("int8_per_channel", "none"),
    ("int8_per_token_head+recent8+sink4", "nvfp4+sink2"),
    ("int3_group32+hadamard+recent3+sink2", "int4_group32+outlier5%+recent4"),
)


def ragged(name: str, x: Tensor, lengths: list[int]) -> list[Tensor]:
    return kvq_ops.QuantizedKV.from_dense(x, name, length=torch.tensor(lengths)).store


@pytest.mark.parametrize(("key_name", "value_name"), PAIRS)
def test_attention_is_tight(key_name: str, value_name: str) -> None:
    """Against float64 over what the oracle says the store holds; ragged rows, masks, windows, and the buffer as a whole."""
    lengths = [T, 21, 9]
    key, value = torch.randn(3, 2, T, 32), torch.randn(3, 2, T, 64)
    stores = [ragged(key_name, key, lengths), ragged(value_name, value, lengths)]
    dense = []
    for name, store in ((key_name, stores[0]), (value_name, stores[1])):
        fmt = get_format(name)
        if fmt.base is None or fmt.static_planes:
            dense.append(kvq_ops.dequantize(store, name).numpy())
        else:
            x = checks.array(key if name == key_name else value)
            rows = [window_state(fmt, x[r : r + 1], length)[2] for r, length in enumerate(lengths)]
            dense.append(np.concatenate(rows))
    query = torch.randn(3, 4, 5, 32)
    trimming = torch.zeros(T, dtype=torch.bool)
    trimming[:13] = True
    for options in (
        {},
        {"causal": True},
        {"causal": True, "window": 6, "softcap": 3.0},
        {"mask": torch.randn(3, 1, 5, T).masked_fill(torch.rand(3, 1, 5, T) < 0.3, -torch.inf)},
        {"mask": trimming},  # no query reaches token 13: what is read ends inside a group
        {"mask": trimming.view(1, 1, 1, T).expand(3, 1, 5, T), "scale": 0.3},
        {"mask": torch.zeros(5, T, dtype=torch.bool)},
        {"sinks": torch.tensor([0.0, 5.0, -math.inf, 1.0])},
    ):
        for use_length in (True, False):
            given: dict[str, Any] = {**options, "use_length": use_length}
            out = kvq_ops.attention(query, *stores, key_name, value_name, **given)
            known = lengths if use_length else None
            checks.assert_tight(out, checks.exact_attention(query, *dense, lengths=known, **options))
            wide = reference.attention(
                query, *stores, get_format(key_name), get_format(value_name), compute=torch.float64, **given
            )
            assert (wide - out.double()).abs().max() < 1e-5
    swapped = checks.exact_attention(query, dense[0], np.roll(dense[1], 1, 2), lengths=lengths)
    with pytest.raises(AssertionError):
        checks.assert_tight(kvq_ops.attention(query, *stores, key_name, value_name), swapped)


def test_a_mask_may_end_anywhere_in_a_group() -> None:
    name = "test_keys_g8r5s3"
    x, query = data(name), torch.randn(2, 2, 1, 32)
    store = filled(name, x, [T])
    dense = kvq_ops.dequantize(store, name).numpy()
    for reach in range(1, T + 1):
        mask = torch.arange(T) < reach
        out = kvq_ops.attention(query, store, store, name, name, mask=mask)
        checks.assert_tight(out, checks.exact_attention(query, dense, dense, mask=mask, lengths=[T] * 2))


# ---------------------------------------------------------------------------------------------------------- as operators


@pytest.mark.parametrize(
    "name", ["test_keys_g8r5s3", "kivi2_values", "int4_group32+outlier1%+hadamard+recent2+sink2"]
)
def test_opcheck(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(2, 2, 20, 32)
    store = filled(name, x, [17], capacity=24)
    kvq = torch.ops.kvq
    query = torch.randn(2, 4, 3, 32)
    for op, args, kwargs in (
        (kvq.quantize, (x, name), {}),
        (kvq.dequantize, (store, name, torch.float16), {}),
        (kvq.append_, (checks.copy(store), torch.arange(17, 20), x[:, :, 17:], name), {}),
        (
            kvq.append_,
            (fmt.empty_store(2, 2, 9, 32), torch.zeros(2, 1, dtype=torch.int64), x[:, :, :1], name),
            {},
        ),
        (
            kvq.attention,
            (query, store, store, name, name),
            {"mask": torch.rand(3, 24) > 0.5, "use_length": False},
        ),
        (
            kvq.attention,
            (query, store, kvq_ops.quantize(torch.randn(2, 2, 24, 64), "none"), name, "none"),
            {},
        ),
    ):
        results = torch.library.opcheck(op.default, args, kwargs)
        assert set(results.values()) == {"SUCCESS"}


class Step(nn.Module):
    """One decoding step over stores that are buffers."""

    def __init__(self, key_name: str, value_name: str, tokens: int) -> None:
        super().__init__()
        self.names, self.count = (key_name, value_name), []
        for side, name in zip("kv", self.names, strict=True):
            store = get_format(name).empty_store(1, 2, tokens, 32)
            self.count.append(len(store))
            for i, plane in enumerate(store):
                self.register_buffer(f"{side}{i}", plane)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        stores = [
            [getattr(self, f"{side}{i}") for i in range(n)] for side, n in zip("kv", self.count, strict=True)
        ]
        for store, name in zip(stores, self.names, strict=True):
            torch.ops.kvq.append_(store, position, x, name)
        out: Tensor = torch.ops.kvq.attention(x, *stores, *self.names, causal=True)
        return out


@pytest.mark.parametrize(
    "names", [("test_keys_g8r5s3", "int4_group32+recent4"), ("int8_per_channel", "mxfp4+sink2")]
)
@pytest.mark.parametrize("how", ["compile", "export"])
def test_compiled_and_exported_steps_equal_eager_ones(how: str, names: tuple[str, str]) -> None:
    eager, other = Step(*names, 40), Step(*names, 40)
    x = torch.randn(1, 2, 40, 32)
    with torch.no_grad():
        if how == "compile":
            torch._dynamo.reset()
            run: Any = torch.compile(other, backend="aot_eager", fullgraph=True)
        else:
            run = torch.export.export(other, (x[:, :, :1], torch.tensor([0]))).module()
        for t in range(36):
            token, position = x[:, :, t : t + 1], torch.tensor([t])
            assert torch.equal(run(token, position), eager(token, position))
    buffers = dict(run.named_buffers()) if how == "export" else dict(other.named_buffers())
    for name, plane in eager.named_buffers():
        assert torch.equal(plane, buffers[name]), name
    fmt = get_format(names[0])
    assert (
        int(eager.get_buffer(f"k{fmt.index('coded')}")) > 0
        and int(eager.get_buffer(f"k{len(fmt.planes) - 1}")) == 36
    )


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

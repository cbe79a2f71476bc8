"""Attention by the kernels, tight against float64 over the decoded store, on every path that runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import reference
from kvq_ops.formats import get_format
from tests.cpu.stores import NAMES, empty, fits, implementation
from tests.ops.attention_cases import OPTIONS, B, case
from tests.ops.checks import DTYPES, assert_tight


def filled(
    name: str, batch: int, heads: int, tokens: int, dim: int, lengths: list[int] | None = None
) -> list[Tensor]:
    """A store of ``tokens`` slots whose rows hold ``lengths`` tokens."""
    store = empty(name, batch, heads, tokens, dim)
    x = torch.randn(batch, heads, tokens, dim)
    for b, length in enumerate(lengths or [tokens] * batch):
        # Static planes belong to all rows: a row is appended through a view of its own.
        row = [
            p if plane.static else p[b : b + 1]
            for plane, p in zip(get_format(name).planes, store, strict=True)
        ]
        if length:
            kvq_ops.append_(row, torch.arange(length), x[b : b + 1, :, :length], name)
    return store


def check(
    query: Tensor, key: list[Tensor], value: list[Tensor], names: tuple[str, str], **options: Any
) -> Tensor:
    fmts = [get_format(name) for name in names]
    out: Tensor = implementation("attention", "cpu").run(query, key, value, *fmts, **options)
    want = reference.attention(query, key, value, *fmts, compute=torch.float64, **options)
    assert out.dtype == query.dtype and out.is_contiguous()
    assert_tight(out, want.numpy())
    return out


@pytest.mark.parametrize(
    "name", ["none", "int8_per_token_head", "fp8_e5m2", "int4_group32", "int2_group32", "turbo3"]
)
def test_options_for_every_capability(capability: str, name: str) -> None:
    """Few query rows and many, which go through different products."""
    for option in OPTIONS.values():
        made = case(name, dim=64, **option())
        fmts = get_format(name), get_format(name)
        for repeat in (1, 5):
            query = made.query.repeat_interleave(repeat, 0)[:B]
            out = implementation("attention", "cpu").run(
                query, made.key_store, made.value_store, *fmts, **made.options
            )
            want = reference.attention(
                query, made.key_store, made.value_store, *fmts, compute=torch.float64, **made.options
            )
            assert_tight(out, want.numpy())


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_every_format(name: str, queries: int) -> None:
    """A long history in rows of different lengths, with and without what was never written."""
    lengths = [211, 150]
    for dim in (64, 40, 100):
        if not fits(get_format(name), dim):
            continue
        key, value = (filled(name, 2, 2, 230, dim, lengths) for _ in range(2))
        query = torch.randn(2, 6, queries, dim)
        check(query, key, value, (name, name), causal=True)
        check(query, key, value, (name, name), causal=True, window=50, softcap=3.0)
        mask = torch.rand(2, 1, queries, 230) < 0.7
        check(query, key, value, (name, name), mask=mask, use_length=False)


@pytest.mark.parametrize("name", NAMES)
def test_every_format_for_every_capability(capability: str, name: str) -> None:
    dim = 64
    key, value = (filled(name, 1, 2, 80, dim) for _ in range(2))
    for queries in (1, 9):
        check(torch.randn(1, 4, queries, dim), key, value, (name, name), causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads", [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (7, 1), (8, 1), (9, 1), (6, 2), (40, 2)]
)
def test_group_sizes(heads: tuple[int, int], dtype: torch.dtype) -> None:
    for name in ("int8_per_token_head", "int4_group32", "none"):
        key, value = (filled(name, 2, heads[1], 77, 72, [77, 12]) for _ in range(2))
        for queries in (1, 2, 33):
            check(torch.randn(2, heads[0], queries, 72).to(dtype), key, value, (name, name), causal=True)


@pytest.mark.parametrize("dims", [(64, 128), (128, 48), (66, 34), (2, 6), (320, 256), (1000, 8)])
def test_head_dims_of_keys_and_values_differ(dims: tuple[int, int]) -> None:
    names = ("int8_per_token_head", "fp8_per_head")
    key, value = (filled(n, 1, 2, 90, d) for n, d in zip(names, dims, strict=True))
    for queries in (1, 20):
        check(torch.randn(1, 4, queries, dims[0]), key, value, names)
        check(torch.randn(1, 4, queries, dims[1]), value, key, names[::-1])


@pytest.mark.parametrize(
    "name", ["int4_group16", "int4_group32", "int4_per_token_head", "nvfp4", "mxfp4", "int2_group32"]
)
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_rows_of_which_several_fill_a_vector(name: str, dim: int) -> None:
    """Codes of 16 or 32 bytes: lengths that end within a vector, stores that are part of a larger one, other keys than values."""
    for tokens in (1, 3, 31, 33, 66, 150):
        key, value = (filled(name, 2, 2, tokens, dim, [tokens, (tokens + 1) // 2]) for _ in range(2))
        for group in (1, 3, 4):
            query = torch.randn(2, 2 * group, 1, dim)
            check(query, key, value, (name, name), causal=True)
            apart = [
                torch.stack([x, x], 2)[:, :, 0] if x.dim() > 2 else x for x in key
            ]  # heads lie twice as far apart
            check(query, apart, value, (name, name))
            wide = [
                torch.cat([x, x], 3)[..., : x.shape[3]] if x.dim() == 4 else x for x in value
            ]  # so do tokens
            check(query, key, wide, (name, name))
    other = filled("int8_per_token_head", 2, 2, 150, dim)
    check(torch.randn(2, 4, 1, dim), other, value, ("int8_per_token_head", name))
    check(torch.randn(2, 4, 1, dim), value, other, (name, "int8_per_token_head"))


def test_long_histories_are_cut_and_merged() -> None:
    """Over many cuts, also when everything lies in one of them, or when weights are concentrated on a few keys."""
    for name in ("int8_per_token_head", "int4_group32"):
        key, value = (filled(name, 2, 2, 3000, 64, [3000, 700]) for _ in range(2))
        for sharpness in (0.1, 1.0, 30.0):
            query = torch.randn(2, 8, 1, 64) * sharpness
            check(query, key, value, (name, name), causal=True, sinks=torch.randn(8))
            check(query, key, value, (name, name), window=5, causal=True)
            only = torch.zeros(1, 1, 1, 3000, dtype=torch.bool)
            only[..., 650:653] = True
            check(query, key, value, (name, name), mask=only, use_length=False)


def test_the_number_of_threads_changes_nothing() -> None:
    key, value = (filled("int8_per_token_head", 1, 2, 2000, 64) for _ in range(2))
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for queries in (1, 70):
                query = torch.randn(1, 8, queries, 64, generator=torch.Generator().manual_seed(1))
                seen.append(check(query, key, value, ("int8_per_token_head",) * 2, causal=True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(seen, seen[2:], strict=False))


@pytest.mark.parametrize("how", ["length", "bool", "float", "window"])
def test_what_is_not_filled_is_not_read(how: str) -> None:
    """Slots that hold NaN would show in every result; a whole tile of them must not even be decoded."""
    key, value = (filled("none", 1, 2, 1000, 64) for _ in range(2))
    for store in (key, value):
        store[0][:, :, 128:] = float("nan")
        store[0][:, :, :64] = float("nan") if how == "window" else 0.0
    options: dict[str, Any] = {}
    if how == "length":
        key[-1].fill_(128), value[-1].fill_(128)
    elif how == "window":
        key[-1].fill_(128), value[-1].fill_(128)
        options = {"causal": True, "window": 60}
    else:
        open_ = torch.arange(1000) < 128
        mask = open_ if how == "bool" else torch.where(open_, 0.0, -torch.inf)
        options = {"mask": mask, "use_length": False}
    for queries in (1, 3, 64) if how != "window" else (1, 3):
        query = torch.randn(1, 4, queries, 64)
        fmt = get_format("none")
        assert implementation("attention", "cpu").run(query, key, value, fmt, fmt, **options).isfinite().all()


@pytest.mark.parametrize("name", ["none", "int8_per_token_head", "int4_group32+hadamard"])
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("tokens", [1, 3, 1000])
def test_what_is_not_a_number_is_not_hidden(name: str, queries: int, tokens: int) -> None:
    """A model that produces NaN must see it again, in the rows that it is in and in no other."""
    fmt, key, value = get_format(name), *(filled(name, 1, 1, tokens, 64) for _ in range(2))
    clean = torch.randn(1, 2, queries, 64)
    bad = torch.zeros(1, 2, queries, 1, dtype=torch.bool)
    bad[0, 1, -1] = True
    run = implementation("attention", "cpu").run
    query = clean.masked_fill(bad & (torch.arange(64) == 5), torch.nan)
    assert torch.equal(run(query, key, value, fmt, fmt).isnan(), bad.expand_as(clean))
    mask = torch.zeros(1, 2, queries, tokens).masked_fill(
        bad & (torch.arange(tokens) == tokens // 2), torch.nan
    )
    assert torch.equal(run(clean, key, value, fmt, fmt, mask=mask).isnan(), bad.expand_as(clean))
    sinks = torch.tensor([0.0, torch.nan])
    assert run(clean, key, value, fmt, fmt, sinks=sinks)[:, 1].isnan().all()
    # A row that may attend to nothing is zero all the same.
    closed = torch.zeros(tokens, dtype=torch.bool)
    assert not run(query, key, value, fmt, fmt, mask=closed).any()


def test_masks_of_any_layout() -> None:
    name = "int8_per_token_head"
    key, value = (filled(name, 2, 2, 70, 64) for _ in range(2))
    wide = torch.randn(70, 5, 2, 8)
    masks = {
        "transposed": wide.permute(2, 3, 1, 0)[:, :4],
        "every second": torch.randn(2, 1, 5, 140)[..., ::2],
        "expanded": torch.randn(1, 1, 5, 1).expand(2, 4, 5, 70),
        "of heads": torch.randn(4, 1, 1),
        "bool strided": (torch.rand(5, 140) < 0.5)[:, ::2],
        "half": torch.randn(5, 70).bfloat16(),
        "double": torch.randn(2, 1, 5, 70).double(),
    }
    for mask in masks.values():
        check(torch.randn(2, 4, 5, 64), key, value, (name, name), mask=mask)
        check(torch.randn(2, 4, 1, 64), key, value, (name, name), mask=mask[..., :1, :])

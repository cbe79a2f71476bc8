"""Attention by the Triton kernels, in the interpreter, against float64 attention over the decoded store.

fp32 queries to within 1e-5; fp16 and bf16 queries to within what their arithmetic can lose, see ``attention_bound``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq_ops import paged, reference
from kvq_ops.formats import get_format
from kvq_ops.triton_kernels import attention as launcher
from tests.cpu.stores import NAMES, fits
from tests.cpu.test_attention import filled
from tests.ops.attention_cases import OPTIONS, case
from tests.ops.checks import allowed_pairs, array, assert_tight
from tests.triton.attention_bound import half_bound

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Cut tokens into so many parts, few as they are."""

    def cut(count: int) -> None:
        monkeypatch.setattr(launcher, "count_splits", lambda programs, blocks, slots: count)

    return cut


def check(
    query: Tensor,
    stores: Sequence[Sequence[Tensor]],
    names: tuple[str, str],
    pages: tuple[list[list[Tensor]], Tensor, Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """Attention over ``stores``, or, holding the same, over pages; what it has to be comes from the stores."""
    fmts = [get_format(name) for name in names]
    if pages is None:
        out = launcher.attention(query, *stores, *fmts, **options)
    else:
        pools, table, length = pages
        out = launcher.paged_attention(query, *pools, table, length, *fmts, **options)
    want = reference.attention(query, *stores, *fmts, compute=torch.float64, **options).numpy()
    assert out.dtype == query.dtype and out.is_contiguous()
    if query.dtype is torch.float32:
        assert_tight(out, want)
        return out
    mask = options.get("mask")
    open_ = allowed_pairs(
        query.shape,
        stores[0][0].shape[2],
        mask=None if mask is None else array(mask),
        causal=options.get("causal", False),
        window=options.get("window", 0),
        lengths=stores[0][-1].tolist() if options.get("use_length", True) else None,
    )
    scale = options.get("scale") or query.shape[-1] ** -0.5
    limit = half_bound(query, stores, fmts, want, open_, scale)
    info = torch.finfo(query.dtype)
    limit = limit + info.eps / 2 * np.abs(want) + info.smallest_normal * info.eps / 2
    error = np.abs(array(out).astype(np.float64) - want)
    assert (error <= limit).all(), (
        f"off by {error.max():.3g}, {(error / limit).max():.3g} times what is allowed"
    )
    return out


def in_pages(
    stores: Sequence[Sequence[Tensor]], names: tuple[str, str], size: int, dtype: torch.dtype = torch.int32
) -> tuple[list[list[Tensor]], Tensor, Tensor]:
    """The same stores, cut into pages that lie anywhere in a pool, between pages of garbage."""
    batch, heads, tokens = stores[0][0].shape[:3]
    blocks = -(-tokens // size)
    order = torch.randperm(batch * blocks + 2)[: batch * blocks].view(batch, blocks)
    pools = []
    for store, name in zip(stores, names, strict=True):
        fmt = get_format(name)
        dim = fmt.logical_shape(store)[3]
        pool = fmt.empty_store(batch * blocks + 2, heads, size, dim, dtype=torch.float32)
        for plane, from_, to in zip(fmt.planes[:-1], store, pool, strict=False):
            if not plane.per_token:
                to.copy_(from_)
                continue
            to.copy_(torch.randint(1, 100, to.shape).to(to.dtype))
            for b in range(batch):
                for block in range(blocks):
                    part = from_[b, :, block * size : (block + 1) * size]
                    to[order[b, block], :, : part.shape[1]] = part
        pools.append(pool)
    table = order.to(dtype).clone()
    for b, length in enumerate(stores[0][-1].tolist()):
        table[b, -(-length // size) :] = -1
    return pools, table, stores[0][-1].to(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_every_format(name: str, splits: Any) -> None:
    """Rows of different lengths, merged from two parts; a channel count that is no power of two where it fits."""
    splits(2)
    dim = next(d for d in (40, 48, 64) if fits(get_format(name), d))
    stores = [filled(name, 2, 2, 100, dim, [97, 33]) for _ in range(2)]
    query = torch.randn(2, 4, 2, dim)
    check(query, stores, (name, name), causal=True)
    check(query.to(HALVES[len(name) % 2]), stores, (name, name), causal=True)


@pytest.mark.parametrize("name", [n for n in NAMES if not get_format(n).windowed])
@pytest.mark.parametrize("size", [16, 64])
def test_every_format_in_pages(name: str, size: int, splits: Any) -> None:
    """Pages that are smaller than a tile and larger, in any order, and sequences that end before their table does."""
    splits(2)
    dim = 32
    stores = [filled(name, 2, 1, 96, dim, [85, 20]) for _ in range(2)]
    pages = in_pages(stores, (name, name), size, torch.int64 if size == 16 else torch.int32)
    dtype = torch.float32 if size == 16 else HALVES[len(name) % 2]
    check(torch.randn(2, 2, 2, dim).to(dtype), stores, (name, name), pages, causal=True, window=60)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    "name, dtype", [("int4_group32", torch.float32), ("int8_per_token_head_asym_fp32", torch.float16)]
)
def test_every_option(option: str, name: str, dtype: torch.dtype) -> None:
    made = case(name, dim=32, value_dim=16, dtype=dtype, **OPTIONS[option]())
    check(made.query, [made.key_store, made.value_store], (name, name), **made.options)


@pytest.mark.parametrize(
    "option", ["everything", "bias", "sinks_causal_window", "closed_row_bool", "all_closed_bias_sinks"]
)
def test_options_over_parts(option: str, splits: Any) -> None:
    """Over three tiles and two parts; masks are those of the cases, repeated."""
    splits(2)
    names = ("fp8_per_token_head", "int2_group32")
    stores = [filled(n, 2, 2, 81, 32, [81, 50]) for n in names]
    options = OPTIONS[option]()
    mask = options.get("mask")
    if mask is not None:
        options["mask"] = mask.repeat(*[1] * (mask.dim() - 1), 9)
    check(torch.randn(2, 4, 3, 32), stores, names, **options)


def test_options_in_pages() -> None:
    names = ("int8_per_token_head", "nvfp4")
    stores = [filled(n, 2, 2, 36, 32, [30, 36]) for n in names]
    pages = in_pages(stores, names, 12)
    for option in ("everything", "window_and_causal", "softcap", "mask_per_head"):
        options = OPTIONS[option]()
        if "mask" in options:
            options["mask"] = options["mask"].repeat(1, 1, 1, 4)
        check(torch.randn(2, 4, 3, 32), stores, names, pages, **options)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (5, 1), (6, 2), (17, 1)])
def test_group_sizes(heads: tuple[int, int]) -> None:
    for queries, dtype in ((1, torch.float32), (7, torch.float16)):
        stores = [filled("int8_per_token_head", 1, heads[1], 37, 16) for _ in range(2)]
        check(
            torch.randn(1, heads[0], queries, 16).to(dtype), stores, ("int8_per_token_head",) * 2, causal=True
        )


@pytest.mark.parametrize("dims", [(24, 66), (66, 8), (2, 6), (130, 16)])
def test_head_dims_of_keys_and_values_differ(dims: tuple[int, int]) -> None:
    names = ("int8_per_token_head", "fp8_per_head")
    stores = [filled(n, 1, 2, 40, d) for n, d in zip(names, dims, strict=True)]
    check(torch.randn(1, 4, 2, dims[0]), stores, names)
    check(torch.randn(1, 4, 2, dims[1]).half(), stores[::-1], names[::-1])


@pytest.mark.parametrize("stored", [torch.float32, *HALVES])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_exact_tokens_of_any_dtype(stored: torch.dtype, dtype: torch.dtype) -> None:
    """Plain stores, and windows, whose exact tokens may be beyond fp16: large ones are brought into its range."""
    for name in ("none", "int8_per_token_head+recent5+sink2", "int4_group32+outlier5%"):
        fmt = get_format(name)
        size = 1e-3 if stored is torch.float16 else 1e6
        stores = []
        for scale in (1 / size, size):
            store = fmt.empty_store(1, 1, 40, 32, dtype=stored)
            x = (torch.randn(1, 1, 38, 32) * scale).to(stored)
            reference.append_(store, torch.arange(38), x, fmt)
            stores.append(store)
        query = (torch.randn(1, 2, 2, 32) * (1e2 if stored is torch.float16 else 1)).to(dtype)
        want = reference.attention(query, *stores, fmt, fmt, compute=torch.float64, scale=size)
        if want.abs().max() >= torch.finfo(dtype).max:
            stores[1] = [p / size if p.is_floating_point() else p for p in stores[1]]
        if dtype is torch.float32:
            out = launcher.attention(query, *stores, fmt, fmt, scale=size)
            want = reference.attention(query, *stores, fmt, fmt, compute=torch.float64, scale=size)
            assert ((out - want).abs() <= 1e-5 * want.abs().max()).all()
        else:
            check(query, stores, (name, name), scale=size)


def test_prefill() -> None:
    """Many queries, in blocks of rows that see different tokens; the store holds more than the queries."""
    for name, dtype in (("int4_group32", torch.float32), ("int8_per_token_head", torch.float16)):
        stores = [filled(name, 1, 1, 70, 32, [66]) for _ in range(2)]
        for options in ({"causal": True}, {"causal": True, "window": 20}, {"window": 9}):
            check(torch.randn(1, 2, 45, 32).to(dtype), stores, (name, name), **options)


@pytest.mark.parametrize("paged_", [False, True])
def test_long_prefill_decodes_once(paged_: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is decoded into the dtype of the query then, which rounds it."""
    monkeypatch.setattr(launcher, "_DENSE_ROWS", 60)
    decoded: list[torch.dtype] = []
    dense = launcher.dense
    monkeypatch.setattr(launcher, "dense", lambda *a, **k: decoded.append(a[2]) or dense(*a, **k))
    names = ("fp8_per_token_head", "int4_group32+hadamard")
    stores = [filled(n, 2, 1, 64, 32, [64, 51]) for n in names]
    query = torch.randn(2, 2, 33, 32).half()
    fmts = [get_format(name) for name in names]
    if paged_:
        pools, table, length = in_pages(stores, names, 16)
        out = launcher.paged_attention(query, *pools, table, length, *fmts, causal=True)
    else:
        out = launcher.attention(query, *stores, *fmts, causal=True)
    assert decoded == [torch.float16] * 2, "keys and values, once each"
    plain = [[reference.decode_store(s, f).half(), s[-1]] for s, f in zip(stores, fmts, strict=True)]
    none = get_format("none")
    want = reference.attention(query, *plain, none, none, compute=torch.float64, causal=True).numpy()
    open_ = allowed_pairs(query.shape, 64, causal=True, lengths=[64, 51])
    limit = half_bound(query, plain, [none, none], want, open_, 32**-0.5) + 2.0**-11 * np.abs(want) + 2.0**-24
    error = np.abs(array(out).astype(np.float64) - want)
    assert (error <= limit).all(), (error / limit).max()


@pytest.mark.parametrize("how", ["length", "bool", "float", "window"])
@pytest.mark.parametrize("queries", [1, 3])
def test_what_is_not_seen_is_not_read(how: str, queries: int) -> None:
    """Slots that hold NaN would show in every result; the kernel may not even load them."""
    stores = [filled("none", 1, 2, 200, 16) for _ in range(2)]
    for store in stores:
        store[0][:, :, 100:] = float("nan")
        if how == "window":
            store[0][:, :, :41] = float("nan")
    options: dict[str, Any] = {}
    if how in ("length", "window"):
        for store in stores:
            store[-1].fill_(100)
    if how == "window":
        options = {"causal": True, "window": 56}
    if how in ("bool", "float"):
        open_ = torch.arange(200) < 100
        options = {
            "mask": open_ if how == "bool" else torch.where(open_, 0.0, -torch.inf),
            "use_length": False,
        }
    none = get_format("none")
    assert launcher.attention(torch.randn(1, 4, queries, 16), *stores, none, none, **options).isfinite().all()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["none", "int8_per_token_head", "int4_group32+hadamard"])
def test_what_is_not_a_number_is_not_hidden(name: str, count: int, splits: Any) -> None:
    """A model that produces NaN must see it again, in the rows that it is in and in no other."""
    splits(count)
    fmt = get_format(name)
    stores = [filled(name, 1, 1, 70, 32) for _ in range(2)]
    clean = torch.randn(1, 2, 2, 32)
    bad = torch.zeros(1, 2, 2, 1, dtype=torch.bool)
    bad[0, 1, -1] = True
    query = clean.masked_fill(bad & (torch.arange(32) == 5), torch.nan)
    for dtype in (torch.float32, torch.float16):
        out = launcher.attention(query.to(dtype), *stores, fmt, fmt)
        assert torch.equal(out.isnan(), bad.expand_as(clean))
    mask = torch.zeros(1, 2, 2, 70).masked_fill(bad & (torch.arange(70) == 40), torch.nan)
    assert torch.equal(launcher.attention(clean, *stores, fmt, fmt, mask=mask).isnan(), bad.expand_as(clean))
    sinks = torch.tensor([0.0, torch.nan])
    assert launcher.attention(clean, *stores, fmt, fmt, sinks=sinks)[:, 1].isnan().all()
    # A row that may attend to nothing is zero all the same.
    closed = torch.zeros(70, dtype=torch.bool)
    assert not launcher.attention(query, *stores, fmt, fmt, mask=closed).any()


def test_masks_and_stores_of_any_layout() -> None:
    name = "int8_per_token_head"
    fmt = get_format(name)
    stores = [filled(name, 2, 2, 40, 16) for _ in range(2)]
    # Heads behind tokens, and channels that do not lie densely.
    apart = [
        [p.transpose(1, 2).contiguous().transpose(1, 2) if p.dim() > 2 else p for p in stores[0]],
        [torch.stack((p, p), -1)[..., 0] for p in stores[1]],
    ]
    wide = torch.randn(40, 5, 2, 8)
    masks = (
        wide.permute(2, 3, 1, 0)[:, :4],
        torch.randn(2, 1, 5, 80)[..., ::2],
        torch.randn(1, 1, 5, 1).expand(2, 4, 5, 40),
        torch.randn(4, 1, 1),
        (torch.rand(5, 80) < 0.5)[:, ::2],
        torch.randn(5, 40).bfloat16(),
        torch.randn(2, 1, 5, 40).double(),
    )
    query = torch.randn(2, 5, 4, 16).transpose(1, 2)
    for mask in masks:
        check(query, apart, (name, name), mask=mask)
    assert torch.equal(
        launcher.attention(query, *apart, fmt, fmt), launcher.attention(query, *stores, fmt, fmt)
    )


def test_nothing_to_attend_to() -> None:
    fmt = get_format("int8_per_token_head")
    for batch, tokens in ((1, 0), (0, 5), (2, 4)):
        stores = [fmt.empty_store(batch, 1, tokens, 8) for _ in range(2)]
        out = launcher.attention(torch.randn(batch, 2, 3, 8), *stores, fmt, fmt, causal=True)
        assert out.shape == (batch, 2, 3, 8) and not out.any()


def test_the_number_of_parts() -> None:
    """As few as fill the processors: none where there are programs enough, many for one long row, never more than blocks."""
    assert launcher.count_splits(264, 512, 264) == launcher.count_splits(220, 512, 264) == 1
    assert launcher.count_splits(8, 2, 264) == 1
    assert launcher.count_splits(8, 512, 264) == 29  # 232 programs, 88 % of a wave
    assert launcher.count_splits(64, 512, 264) == 4  # 256
    assert launcher.count_splits(1, 512, 264) >= 100
    for programs in (1, 3, 8, 40, 100, 200):
        for blocks in (1, 3, 8, 100):
            assert 1 <= launcher.count_splits(programs, blocks, 264) <= max(1, blocks // 2)


def test_paged_reference_is_what_it_should_be() -> None:
    """The pages of these tests hold what the stores hold."""
    names = ("int4_group32", "fp8_per_head")
    stores = [filled(n, 2, 2, 36, 32, [30, 36]) for n in names]
    pools, table, length = in_pages(stores, names, 8)
    query, fmts = torch.randn(2, 2, 1, 32), [get_format(n) for n in names]
    got = paged.attention_torch(query, *pools, table, length, *fmts)
    assert torch.allclose(got, reference.attention(query, *stores, *fmts), atol=1e-6)

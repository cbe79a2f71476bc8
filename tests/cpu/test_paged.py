"""Pages by the kernels: the bytes of plain torch, and the very numbers of a contiguous cache, wherever the pages lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq_ops import paged
from kvq_ops.cpu import build
from kvq_ops.formats import Format, get_format
from tests.cpu.stores import NAMES, empty, fits, implementation
from tests.cpu.test_asan import _run
from tests.ops.checks import assert_tight, copy

PAGED = tuple(n for n in NAMES if not (get_format(n).windowed or get_format(n).token_group > 1))
HEADS = 2


def tables(
    lengths: list[int], size: int, blocks: int, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, int]:
    """A page for each block of tokens, in no order, with gaps; ``-1`` where there are no tokens. And the size of the pool."""
    table = torch.full((len(lengths), blocks), -1, dtype=dtype)
    used = [(b, i) for b, length in enumerate(lengths) for i in range(-(-length // size))]
    count = len(used) + 3
    pages = torch.randperm(count, generator=torch.Generator().manual_seed(size))[: len(used)]
    for (b, i), page in zip(used, pages.tolist(), strict=True):
        table[b, i] = page
    return table, count


def positions(lengths: list[int], start: int, stop: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Of tokens ``start .. stop`` of every sequence; those beyond its length are padding."""
    at = torch.arange(start, stop, dtype=dtype).expand(len(lengths), -1)
    return torch.where(at < torch.tensor(lengths).unsqueeze(1), at, -1).to(dtype)


def spread(tensor: Tensor) -> Tensor:
    """The same values, every stride twice what it was, the last two axes swapped in memory where there are two."""
    if tensor.dim() < 2:
        return tensor.repeat_interleave(2)[::2]
    wide = tensor.transpose(-1, -2).repeat_interleave(2, -2)
    return wide[..., ::2, :].transpose(-1, -2)


def tokens_first(pool: list[Tensor]) -> list[Tensor]:
    """The planes laid out ``[P, S, H, ...]`` in memory."""
    return [
        p.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) if p.dim() > 2 else p
        for p in pool
    ]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def fill(
    name: str, lengths: list[int], size: int, dim: int, x: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """A pool and a store that hold the same tokens, and the table."""
    fmt = get_format(name)
    blocks = -(-x.shape[2] // size)
    table, count = tables(lengths, size, blocks)
    pool = empty(name, count, HEADS, size, dim)
    at = positions(lengths, 0, x.shape[2])
    implementation("paged_append_", "cpu").run(pool, table, at, x, fmt)
    store = paged.gather(pool, table, fmt)
    store[-1] = torch.tensor(lengths)
    return pool, store, table


@pytest.mark.parametrize("size", [1, 5, 64])
@pytest.mark.parametrize("name", PAGED)
def test_append_writes_the_bytes_of_plain_torch(name: str, size: int) -> None:
    """In steps, with padding that would spoil every scale, and into a pool whose scales nothing has fitted yet."""
    fmt, lengths = get_format(name), [13, 0, 6]
    made = torch.Generator().manual_seed(1)
    for dim in (64, 24):
        if not fits(fmt, dim):
            continue
        table, count = tables(lengths, size, 13)
        x = torch.randn(3, HEADS, 13, dim, generator=made)
        x[0, 1, 2, 3], x[0, 0, 4, 5] = torch.nan, torch.inf
        for b, length in enumerate(lengths):
            x[b, :, length:] = torch.tensor([1e6, torch.inf, torch.nan]).repeat(dim)[:dim]
        want = empty(name, count, HEADS, size, dim)
        got = [tokens_first(copy(want)), copy(want)]
        for start, stop in ((0, 7), (7, 8), (8, 13), (2, 4)):
            at, part = positions(lengths, start, stop), x[:, :, start:stop]
            paged.append_torch(want, table, at, part, fmt)
            run = implementation("paged_append_", "cpu").run
            run(got[0], table.int(), at.int(), part, fmt)
            run(got[1], spread(table), spread(at), spread(part), fmt)
            for planes in got:
                for plane, a, b in zip(fmt.planes, planes, want, strict=True):
                    assert torch.equal(as_bytes(a), as_bytes(b)), plane.name


@pytest.mark.parametrize(
    "name", ["none", "int8_per_token_head", "int4_group32", "int8_per_tensor", "nuq4_keys"]
)
def test_append_of_nothing_but_padding(name: str) -> None:
    fmt = get_format(name)
    pool = empty(name, 3, HEADS, 4, 64)
    before = copy(pool)
    table, at = torch.full((2, 3), -1), torch.full((2, 5), -1)
    implementation("paged_append_", "cpu").run(pool, table, at, torch.randn(2, HEADS, 5, 64), fmt)
    assert all(torch.equal(a, b) for a, b in zip(pool, before, strict=True))


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("name", PAGED)
def test_attention_is_that_over_a_contiguous_cache(name: str, queries: int) -> None:
    """Bit for bit, whatever the pages: tokens meet queries in the same order. And tight against float64."""
    fmt, lengths = get_format(name), [150, 0, 90]
    made = torch.Generator().manual_seed(2)
    run, plain = (implementation(op, "cpu").run for op in ("paged_attention", "attention"))
    for dim, size in ((64, 16), (64, 100), (40, 3)):
        if not fits(fmt, dim):
            continue
        x, y = (torch.randn(3, HEADS, 150, dim, generator=made) for _ in range(2))
        query = torch.randn(3, 6, queries, dim, generator=made)
        keys, key_store, table = fill(name, lengths, size, dim, x)
        values, value_store, _ = fill(name, lengths, size, dim, y)
        mask = torch.rand(3, 1, queries, table.shape[1] * size, generator=made) < 0.7
        for options in (
            {"causal": True},
            {"causal": True, "window": 50, "softcap": 3.0, "sinks": torch.randn(6, generator=made)},
            {"mask": mask, "scale": 0.3},
        ):
            got = run(query, keys, values, table, torch.tensor(lengths), fmt, fmt, **options)
            assert torch.equal(got, plain(query, key_store, value_store, fmt, fmt, **options))
            assert got.abs().sum((1, 2, 3)).gt(0).tolist() == [True, False, True]
        want = paged.attention_torch(
            query, keys, values, table, torch.tensor(lengths), fmt, fmt, compute=torch.float64, **options
        )
        assert_tight(got, want.numpy())


@pytest.mark.parametrize(
    "name", ["none", "int8_per_token_head", "int4_group32", "fp8_e4m3", "turbo3", "nuq4_keys"]
)
def test_attention_on_every_path(capability: str, name: str) -> None:
    """Every capability; few query rows and many; integers of either width; pages and tables laid out anyhow."""
    fmt, lengths, size, dim = get_format(name), [140, 65], 16, 64
    made = torch.Generator().manual_seed(3)
    x, y = (torch.randn(2, HEADS, 140, dim, generator=made) for _ in range(2))
    keys, _, table = fill(name, lengths, size, dim, x)
    values, _, _ = fill(name, lengths, size, dim, y)
    length = torch.tensor(lengths)
    run = implementation("paged_attention", "cpu").run
    for heads, queries in ((2, 1), (8, 1), (6, 40)):
        query = torch.randn(2, heads, queries, dim, generator=made)
        want = paged.attention_torch(
            query, keys, values, table, length, fmt, fmt, compute=torch.float64, causal=True
        )
        got = run(query, keys, values, table, length, fmt, fmt, causal=True)
        assert_tight(got, want.numpy())
        assert torch.equal(run(query, keys, values, table.int(), length.int(), fmt, fmt, causal=True), got)
        for a, b in (
            (tokens_first(keys), tokens_first(values)),
            ([spread(p) for p in keys], [spread(p) for p in values]),
        ):
            again = run(query, a, b, spread(table), spread(length), fmt, fmt, causal=True)
            assert_tight(again, want.numpy())


def test_sequences_share_pages_that_nobody_writes() -> None:
    """A common prefix: rows of the table that name the same pages, one of them without memory of its own."""
    name, fmt = "int4_group32", get_format("int4_group32")
    keys, store, table = fill(name, [70], 16, 64, torch.randn(1, HEADS, 70, 64))
    query = torch.randn(3, 4, 1, 64)
    length = torch.tensor([70, 33, 70], dtype=torch.int32)
    got = implementation("paged_attention", "cpu").run(
        query, keys, keys, table.expand(3, -1), length, fmt, fmt
    )
    rows = [p.expand(3, *p.shape[1:]) if p.shape[0] == 1 and p.dim() > 2 else p for p in store]
    rows[-1] = length.long()
    want = implementation("attention", "cpu").run(query, rows, rows, fmt, fmt)
    assert torch.equal(got, want)


def test_keys_and_values_in_different_formats() -> None:
    key, value, lengths = "nuq4_keys", "int8_per_token_head", [50, 81]
    keys, _, table = fill(key, lengths, 16, 64, torch.randn(2, HEADS, 81, 64))
    values, _, _ = fill(value, lengths, 16, 32, torch.randn(2, HEADS, 81, 32))
    query, length = torch.randn(2, 4, 2, 64), torch.tensor(lengths)
    fmts = get_format(key), get_format(value)
    got = implementation("paged_attention", "cpu").run(query, keys, values, table, length, *fmts, causal=True)
    want = paged.attention_torch(
        query, keys, values, table, length, *fmts, compute=torch.float64, causal=True
    )
    assert got.shape == (2, 4, 2, 32)
    assert_tight(got, want.numpy())


def test_many_threads_and_one_give_the_same() -> None:
    name, lengths = "int8_per_token_head", [900, 400]
    fmt: Format = get_format(name)
    x = torch.randn(2, HEADS, 900, 64)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            keys, _, table = fill(name, lengths, 16, 64, x)
            query = torch.ones(2, 4, 1, 64)
            run = implementation("paged_attention", "cpu").run
            results.append([*keys, run(query, keys, keys, table, torch.tensor(lengths), fmt, fmt)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [name for name in build.CAPABILITIES if name in ("native", "default")])
def test_nothing_is_read_or_written_outside_the_pool(tmp_path: Path, capability: str) -> None:
    done = _run(capability, tmp_path, ["-m", "tests.cpu.test_paged"])
    assert done.returncode == 0 and done.stdout.startswith("ran "), done.stderr[-4000:]


def main() -> None:
    """The kernels once over pools of exact size, for a run under AddressSanitizer; every page is in use."""
    torch.set_num_threads(2)
    ran = 0
    for name in PAGED:
        fmt = get_format(name)
        for dim in (2, 7, 16, 24, 33, 64, 72, 128):
            if not fits(fmt, dim):
                continue
            for size in (1, 16, 67):
                blocks = -(-67 // size)
                table = torch.randperm(2 * blocks).view(2, blocks)
                pool = empty(name, 2 * blocks, HEADS, size, dim)
                at = torch.arange(67).expand(2, -1)
                implementation("paged_append_", "cpu").run(
                    pool, table, at, torch.randn(2, HEADS, 67, dim), fmt
                )
                for heads, queries in ((2, 1), (8, 1), (6, 11)):
                    query = torch.randn(2, heads, queries, dim)
                    run = implementation("paged_attention", "cpu").run
                    out = run(query, pool, pool, table, torch.tensor([67, 40]), fmt, fmt, causal=True)
                    assert out.isfinite().all(), name
            ran += 1
    print("ran", ran)


if __name__ == "__main__":
    main()

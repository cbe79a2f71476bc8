"""Tiles of tokens that a mask closes for all rows of a program are not read, wherever they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from kvq_ops.formats import get_format
from kvq_ops.triton_kernels import attention as launcher
from kvq_ops.triton_kernels import attention_kernel
from tests.cpu.test_attention import filled
from tests.triton.planted import plant
from tests.triton.test_attention import check, in_pages

TILE = 32
"""Tokens of a tile in the interpreter."""


def as_kind(open_: Tensor, kind: str) -> Tensor:
    return open_ if kind == "bool" else torch.where(open_, torch.randn(open_.shape), -torch.inf)


def stripes(batch: int, queries: int, tokens: int) -> Tensor:
    """First tokens and newest ones, as StreamingLLM sees them; the next row of a batch is padded in its middle."""
    token = torch.arange(tokens)
    rows = [(token < 4) | (token >= tokens - 40), (token < 70) | (token > tokens - 9)]
    return torch.stack(rows[:batch]).view(batch, 1, 1, tokens).expand(batch, 1, queries, tokens).contiguous()


def poisoned(store: list[Tensor], name: str, seen: Tensor) -> list[Tensor]:
    """The same with NaN in numbers, or else in scales, of every tile that ``seen [B, T]`` has nothing of."""
    out = [plane.clone() for plane in store]
    tiles = torch.nn.functional.pad(seen, (0, -seen.shape[1] % TILE)).view(seen.shape[0], -1, TILE).any(-1)
    hidden = ~tiles.repeat_interleave(TILE, 1)[:, : seen.shape[1]]
    assert hidden.any()
    plane = 0 if get_format(name).lossless else 1
    out[plane].masked_fill_(hidden.view(*hidden.shape[:1], 1, -1, *[1] * (out[plane].dim() - 3)), torch.nan)
    return out


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("queries", [1, 9, 40])
@pytest.mark.parametrize("name", ["none", "int8_per_token_head", "int4_group32"])
def test_holes_are_not_read(name: str, queries: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN would show in every result. All tokens are one part, so that holes do not lie at its ends."""
    monkeypatch.setattr(launcher, "count_splits", lambda *_: 1)
    stores = [filled(name, 2, 1, 230, 32) for _ in range(2)]
    open_ = stripes(2, queries, 230)
    mask = as_kind(open_, kind)
    for dtype in (torch.float32, torch.float16) if queries == 1 else (torch.float32,):
        query = torch.randn(2, 2, queries, 32).to(dtype)
        want = check(query, stores, (name, name), mask=mask)
        spoiled = [poisoned(store, name, open_[:, 0, 0]) for store in stores]
        fmt = get_format(name)
        assert torch.equal(launcher.attention(query, *spoiled, fmt, fmt, mask=mask), want)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("size", [16, 64])
def test_holes_are_not_read_in_pages(size: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two parts, both have holes."""
    monkeypatch.setattr(launcher, "count_splits", lambda *_: 2)
    names = ("int8_per_token_head", "int8_per_token_head")
    fmt = get_format(names[0])
    stores = [filled(name, 2, 1, 256, 32) for name in names]
    open_ = stripes(2, 1, 256) | (torch.arange(256) == 130)
    mask, query = as_kind(open_, kind), torch.randn(2, 2, 1, 32)
    want = check(query, stores, names, in_pages(stores, names, size), mask=mask)
    spoiled = [poisoned(store, names[0], open_[:, 0, 0]) for store in stores]
    pools, table, length = in_pages(spoiled, names, size)
    assert torch.equal(launcher.paged_attention(query, *pools, table, length, fmt, fmt, mask=mask), want)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First tokens of the tiles that kernels work on, in turn."""
    seen: list[int] = []
    stock = attention_kernel.attend_tile

    def counted(*args: Any) -> Any:
        seen.append(int(args[5].handle.data.item()))
        return stock(*args)

    monkeypatch.setattr(attention_kernel, "attend_tile", counted)
    return seen


def test_documents_side_by_side(tiles: list[int]) -> None:
    """Packed documents of 64 tokens: blocks of 16 rows (8 queries of 2 heads) see one each, and work on no other."""
    name = "int8_per_token_head"
    stores = [filled(name, 1, 1, 192, 32) for _ in range(2)]
    document = torch.arange(192) // 64
    mask = document[:, None] == document[None, :]
    check(torch.randn(1, 2, 192, 32), stores, (name, name), mask=mask, causal=True)
    # Without the mask block i would see 1 to 6 tiles. Of its document it sees the first alone, or both.
    assert len(tiles) == 3 * (4 * 1 + 4 * 2)


def test_far_more_tiles_than_are_looked_at_together(tiles: list[int]) -> None:
    """A few open tokens beside borders of what is looked at together, and a row that sees nothing at all."""
    tokens, name = 2100, "none"
    stores = [filled(name, 1, 1, tokens, 16) for _ in range(2)]
    spots = torch.tensor([31 * TILE - 1, 31 * TILE, 62 * TILE, tokens - 1])
    mask = torch.zeros(3, tokens, dtype=torch.bool)
    mask[0, spots], mask[2, spots[:1]] = True, True
    out = check(torch.randn(1, 1, 3, 16), stores, (name, name), mask=mask)
    assert sorted(tiles) == [30 * TILE, 31 * TILE, 62 * TILE, 65 * TILE]
    assert not out[:, :, 1].any() and out[:, :, 0].all()


@pytest.mark.parametrize(
    "fault", ["every tile is read", "a tile is lost", "edges are lost", "one looked at too few"]
)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, wrong = {
        "every tile is read": ("tl.reshape(seen.to", "tl.reshape(inside.to"),
        "a tile is lost": ("main = main & (main - 1)", "main = main & (main - 1) & (main - 2)"),
        "edges are lost": ("edges = opened & ~main", "edges = opened & ~main & 1"),
        "one looked at too few": ("range(first, last, WIDE)", "range(first, last - WIDE, WIDE)"),
    }[fault]
    monkeypatch.setattr(launcher, "count_splits", lambda *_: 1)
    name = "none"
    stores = [filled(name, 2, 1, 230, 32) for _ in range(2)]
    open_ = stripes(2, 1, 230)
    open_[0, ..., 64:90] = True
    query = torch.randn(2, 2, 1, 32)
    want = check(query, stores, (name, name), mask=open_)
    stores, fmt = [poisoned(store, name, open_[:, 0, 0]) for store in stores], get_format(name)
    assert torch.equal(launcher.attention(query, *stores, fmt, fmt, mask=open_), want)
    plant(monkeypatch, tmp_path, attention_kernel, right, wrong)
    with pytest.raises((AssertionError, InterpreterError)):
        assert torch.equal(launcher.attention(query, *stores, fmt, fmt, mask=open_), want)

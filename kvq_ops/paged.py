"""Paged caches: tokens of many sequences in pages of one pool, found through a table for each sequence.

    kvq::paged_append_(Tensor(a!)[] pages, Tensor block_table, Tensor position, Tensor x, str format) -> ()
    kvq::paged_attention(Tensor query, Tensor[] key_pages, Tensor[] value_pages, Tensor block_table, Tensor length,
                         str key_format, str value_format, *, ...) -> Tensor

A pool is a store whose rows are pages: planes ``[P, H, S, ...]`` for ``P`` pages of ``S`` tokens, made by
``get_format(name).empty_store(P, H, S, D)``. A page carries its own scales and takes nothing from its neighbours, except for
scales that span tokens, which the pool shares. ``block_table [B, N]`` holds the page of each ``S`` tokens of a sequence; a
negative entry is no page. Token ``t`` of sequence ``b`` lies in page ``block_table[b, t // S]`` at ``t % S``. The plane
``length [P]`` counts what a page holds; how long a sequence is, the caller knows.

Formats whose tokens wait in a window, or share scales with other tokens, do not fit pages and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import reference
from .checks import check_device, check_finite, check_gradient, check_kept, check_over, check_values
from .codecs import encode
from .errors import CapacityError, DtypeError, FormatError, ShapeError
from .formats import Format, get_format
from .options import SCHEMA, Options
from .registry import Implementation, Request, register, select
from .triton_kernels.inline import inline

__all__ = ["paged_append_", "paged_attention"]

_lib = torch.library.Library("kvq", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_lib.define(
    "paged_append_(Tensor(a!)[] pages, Tensor block_table, Tensor position, Tensor x, str format) -> ()",
    tags=_TAGS,
)
_lib.define(
    "paged_attention(Tensor query, Tensor[] key_pages, Tensor[] value_pages, Tensor block_table, Tensor length, "
    f"str key_format, str value_format, *, {SCHEMA}) -> Tensor",
    tags=_TAGS,
)


# ------------------------------------------------------------------------------------------------------------- public


def paged_append_(
    pages: Sequence[Tensor], block_table: Tensor, position: Tensor, x: Tensor, format: str
) -> None:
    """Encode ``x`` and write its tokens into the pages of their sequences, in place.

    Args:
        pages: a pool of pages, see the module.
        block_table: int32 or int64 ``[B, N]``.
        position: of each token in its sequence, int32 or int64 ``[B, T]``; a negative one is skipped, as padding.
        x: ``[B, H, T, D]``.

    Nothing is written when an argument is rejected. Two sequences may share a page only if nobody writes to it.
    """
    torch.ops.kvq.paged_append_(pages, block_table, position, x, format)


def paged_attention(
    query: Tensor,
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    block_table: Tensor,
    length: Tensor,
    key_format: str,
    value_format: str,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`kvq_ops.attention` over paged keys and values.

    Args:
        query: ``[B, Hq, Tq, D]``.
        block_table: ``[B, N]``, for keys and values alike.
        length: int32 or int64 ``[B]``, the tokens of each sequence; at most ``N`` pages of them.
        mask: broadcastable to ``[B, Hq, Tq, N * S]``.

    Returns:
        ``[B, Hq, Tq, Dv]``, contiguous, in the dtype of ``query``. Row ``i`` of ``Tq`` stands at ``length - Tq + i``.
    """
    result: Tensor = torch.ops.kvq.paged_attention(
        query,
        key_pages,
        value_pages,
        block_table,
        length,
        key_format,
        value_format,
        mask=mask,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return result


# ------------------------------------------------------------------------------------------------------------- checks


def _paged_format(name: str) -> Format:
    fmt = get_format(name)
    if fmt.windowed or fmt.token_group > 1:
        raise FormatError(
            f"pages in format {name!r}",
            got="a format whose tokens wait to be coded, or share scales with others",
            allowed="formats that code each token by itself",
            do="use a contiguous cache for it, or another format for pages",
        )
    return fmt


def _check_table(op: str, table: Tensor, batch: int, pages: int) -> None:
    if table.dim() != 2 or table.shape[0] != batch:
        raise ShapeError(
            f"kvq::{op} block_table",
            got=f"{tuple(table.shape)}",
            allowed=f"[{batch}, N]: a row of pages for each sequence",
            do="give the numbers of the pages of every sequence, in the order of its tokens",
        )
    if table.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            f"kvq::{op} block_table",
            got=str(table.dtype),
            allowed="int32, int64",
            do="cast it: block_table.int()",
        )
    if _values_known(table) and table.numel() and int(table.max()) >= pages:
        raise CapacityError(
            f"kvq::{op} block_table",
            got=f"page {int(table.max())}",
            allowed=f"0..{pages - 1}, or negative for no page",
            do="allocate more pages, or correct the table",
        )


def _values_known(tensor: Tensor) -> bool:
    # Kernels trust the table, so that any tensor with memory is looked at, a parameter too.
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def _check_append(pages: Sequence[Tensor], table: Tensor, position: Tensor, x: Tensor, fmt: Format) -> None:
    check_values("paged_append_", x)
    count, heads, size, head_dim = fmt.check_store(pages)
    if x.shape[1] != heads or x.shape[3] != head_dim:
        raise ShapeError(
            f"kvq::paged_append_ into pages [{count}, {heads}, {size}, {head_dim}]",
            got=f"x {tuple(x.shape)}",
            allowed=f"[B, {heads}, T, {head_dim}]",
            do="check kv heads and head_dim of the pages against the model",
        )
    _check_table("paged_append_", table, x.shape[0], count)
    if position.dtype not in (torch.int32, torch.int64):
        raise DtypeError(
            "kvq::paged_append_ position",
            got=str(position.dtype),
            allowed="int32, int64",
            do="cast it: position.int()",
        )
    if tuple(position.shape) != (x.shape[0], x.shape[2]):
        raise ShapeError(
            "kvq::paged_append_ position",
            got=f"{tuple(position.shape)}",
            allowed=f"{(x.shape[0], x.shape[2])}: one for each token",
            do="repeat positions that all sequences share: position.expand(B, T)",
        )
    check_device("paged_append_", position, table, x, *pages)
    check_kept("paged_append_", pages, x, fmt)


def _check_reads(
    query: Tensor,
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    table: Tensor,
    length: Tensor,
    key_fmt: Format,
    value_fmt: Format,
    options: Options,
) -> tuple[int, int]:
    """Raise on anything wrong; ``(D, Dv)``."""
    check_values("paged_attention", query, "query")
    count, heads, size, head_dim = key_fmt.check_store(key_pages)
    value_shape = value_fmt.check_store(value_pages)
    if value_shape[:3] != (count, heads, size):
        raise ShapeError(
            "kvq::paged_attention key and value pages",
            got=f"{(count, heads, size)} and {value_shape[:3]}",
            allowed="equal numbers of pages, kv heads and tokens of a page",
            do="allocate key and value pages alike: one table serves both",
        )
    _check_table("paged_attention", table, query.shape[0], count)
    if tuple(length.shape) != (query.shape[0],) or length.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            "kvq::paged_attention length",
            got=f"{length.dtype} {tuple(length.shape)}",
            allowed=f"int32 or int64 [{query.shape[0]}]",
            do="give the number of tokens of every sequence",
        )
    room = table.shape[1] * size
    if _values_known(length) and length.numel() and not 0 <= int(length.min()) <= int(length.max()) <= room:
        raise CapacityError(
            "kvq::paged_attention length",
            got=str(length.tolist()),
            allowed=f"0..{room}: {table.shape[1]} pages of {size} tokens",
            do="give each sequence as many pages as its tokens need",
        )
    check_device("paged_attention", table, length)
    if _values_known(table) and _values_known(length) and table.numel():
        used = torch.arange(table.shape[1]) * size < length.unsqueeze(1)
        if bool(((table < 0) & used).any()):
            raise CapacityError(
                "kvq::paged_attention block_table",
                got="no page for tokens below the length of their sequence",
                allowed="a page for every token that counts",
                do="append to pages that the table names, or shorten the length",
            )
    # The rest is as for a contiguous cache of as many tokens as the table has room for.
    check_over("paged_attention", query, (query.shape[0], heads, room, head_dim), options)
    added = options.mask, options.sinks
    check_device("paged_attention", query, *added, table, length, *key_pages, *value_pages)
    check_gradient("paged_attention", query, *added)
    return head_dim, value_shape[3]


# ------------------------------------------------------------------------------------------------------------ kernels


def _append(pages: Sequence[Tensor], block_table: Tensor, position: Tensor, x: Tensor, format: str) -> None:
    fmt = _paged_format(format)
    _check_append(pages, block_table, position, x, fmt)
    check_gradient("paged_append_", x, *pages)
    check_finite("paged_append_", x)
    size = pages[0].shape[2]
    if _values_known(position) and position.numel():
        block = position.long().div(size, rounding_mode="floor")
        beyond = (block >= block_table.shape[1]) & (position >= 0)
        if bool(beyond.any()):
            raise CapacityError(
                "kvq::paged_append_ position",
                got=f"{int(position.max())}",
                allowed=f"0..{block_table.shape[1] * size - 1}: {block_table.shape[1]} pages of {size} tokens",
                do="give the sequence more pages; nothing was written",
            )
        page = torch.full_like(block, -1)
        if block_table.shape[1]:
            page = block_table.long().gather(1, block.clamp(0, block_table.shape[1] - 1))
        if bool(((page < 0) & (position >= 0)).any()):
            raise CapacityError(
                "kvq::paged_append_ block_table",
                got="a token whose place has no page",
                allowed="a page for every position that is written",
                do="give the sequence more pages; nothing was written",
            )
    request = Request("paged_append_", x.device.type, (fmt,), (x.shape[3],), x.dtype)
    select(request).run(pages, block_table, position, x, fmt)


def _attention(
    query: Tensor,
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    block_table: Tensor,
    length: Tensor,
    key_format: str,
    value_format: str,
    **given: Any,
) -> Tensor:
    fmts = _paged_format(key_format), _paged_format(value_format)
    dims = _check_reads(query, key_pages, value_pages, block_table, length, *fmts, Options(**given))
    request = Request("paged_attention", query.device.type, fmts, dims, query.dtype)
    run = select(request).run
    out: Tensor = run(query, key_pages, value_pages, block_table, length, *fmts, **given)
    return out.contiguous()


for _name, _kernel in (("paged_append_", _append), ("paged_attention", _attention)):
    _lib.impl(_name, _kernel, "CompositeExplicitAutograd")
    inline(_lib, _name, _kernel)


@torch.library.register_fake("kvq::paged_append_", lib=_lib)
def _(pages: Sequence[Tensor], block_table: Tensor, position: Tensor, x: Tensor, format: str) -> None:
    _check_append(pages, block_table, position, x, _paged_format(format))
    check_gradient("paged_append_", x, *pages)


@torch.library.register_fake("kvq::paged_attention", lib=_lib)
def _(
    query: Tensor,
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    block_table: Tensor,
    length: Tensor,
    key_format: str,
    value_format: str,
    **given: Any,
) -> Tensor:
    fmts = _paged_format(key_format), _paged_format(value_format)
    value_dim = _check_reads(query, key_pages, value_pages, block_table, length, *fmts, Options(**given))[1]
    return query.new_empty(query.shape[0], query.shape[1], query.shape[2], value_dim)


# -------------------------------------------------------------------------------------- the torch implementation


def append_torch(
    pages: Sequence[Tensor], block_table: Tensor, position: Tensor, x: Tensor, fmt: Format
) -> None:
    """As ``kvq::paged_append_``, in plain torch."""
    if x.numel() == 0 or block_table.numel() == 0:
        return
    size = pages[0].shape[2]
    position, written = position.long().clamp_min(0), position >= 0
    page = block_table.long().gather(1, position // size)
    # Padding must not enter a scale that spans tokens.
    x = torch.where(written[:, None, :, None], x, torch.nan)
    token, static = encode(x, fmt, pages, position)
    rows, columns = written.nonzero(as_tuple=True)
    at = (page[rows, columns], position[rows, columns] % size)
    for plane, new, kept in zip(pages, token, static, strict=True):
        if kept is not None:
            plane.copy_(kept)
        elif new is not None:
            plane.transpose(1, 2)[at] = new.to(plane.dtype).transpose(1, 2)[rows, columns]
    pages[-1].scatter_reduce_(0, at[0], at[1] + 1, "amax")


def gather(pages: Sequence[Tensor], block_table: Tensor, fmt: Format) -> list[Tensor]:
    """The sequences of a table as a contiguous store ``[B, H, N * S, D]``; what has no page repeats page 0."""
    table = block_table.long().clamp_min(0)
    batch, blocks = table.shape
    store = []
    for plane, tensor in zip(fmt.planes[:-1], pages, strict=False):
        if not plane.per_token:
            store.append(tensor)
            continue
        picked = tensor[table.reshape(-1)].unflatten(0, (batch, blocks)).transpose(1, 2)
        store.append(picked.flatten(2, 3))
    store.append(torch.zeros(batch, dtype=torch.int64, device=table.device))
    return store


def attention_torch(
    query: Tensor,
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    block_table: Tensor,
    length: Tensor,
    key_format: Format,
    value_format: Format,
    *,
    compute: torch.dtype = torch.float32,
    **given: Any,
) -> Tensor:
    """As ``kvq::paged_attention``: over a contiguous copy of the pages, in plain torch."""
    stores = []
    for pages, fmt in ((key_pages, key_format), (value_pages, value_format)):
        store = gather(pages, block_table, fmt)
        store[-1] = length.long()
        stores.append(store)
    return reference.attention(
        query, stores[0], stores[1], key_format, value_format, compute=compute, **given
    )


for _op, _run in (("paged_append_", append_torch), ("paged_attention", attention_torch)):
    register(Implementation("torch", _op, _run, lambda request: None))

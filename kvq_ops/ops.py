"""The operators: schemas, checks, fake kernels, dispatch to an implementation.

    kvq::quantize(Tensor x, str format) -> Tensor[]
    kvq::dequantize(Tensor[] store, str format, ScalarType dtype) -> Tensor
    kvq::append_(Tensor(a!)[] store, Tensor position, Tensor x, str format) -> ()
    kvq::attention(Tensor query, Tensor[] key_store, Tensor[] value_store, str key_format, str value_format, *, ...) -> Tensor

A format is a string and a store a list of tensors, so schemas stay when formats arrive. They are registered with
``define``/``impl`` rather than ``custom_op``, whose call costs about ten times as much. None of them has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference
from .checks import (
    check_device,
    check_dtype,
    check_finite,
    check_gradient,
    check_kept,
    check_over,
    check_values,
)
from .errors import CapacityError, DtypeError, ShapeError
from .formats import Format, get_format
from .options import NO_OPTIONS, SCHEMA, Options
from .registry import Implementation, Request, register, select
from .triton_kernels.inline import inline

__all__ = ["append_", "attention", "dequantize", "quantize"]

_lib = torch.library.Library("kvq", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)

_lib.define("quantize(Tensor x, str format) -> Tensor[]", tags=_TAGS)
_lib.define("dequantize(Tensor[] store, str format, ScalarType dtype) -> Tensor", tags=_TAGS)
_lib.define("append_(Tensor(a!)[] store, Tensor position, Tensor x, str format) -> ()", tags=_TAGS)
_lib.define(
    "attention(Tensor query, Tensor[] key_store, Tensor[] value_store, str key_format, str value_format, *, "
    f"{SCHEMA}, bool use_length=True) -> Tensor",
    tags=_TAGS,
)


# ------------------------------------------------------------------------------------------------------------- public


def quantize(x: Tensor, format: str) -> list[Tensor]:
    """Encode ``x`` into a new store.

    Args:
        x: ``[B, H, T, D]``, float32, float16 or bfloat16.
        format: a name from ``kvq_ops.formats.names()``.

    Returns:
        The planes in the order of ``get_format(format).planes``; the last one is ``length``, int64 ``[B]``, all ``T``.
    """
    result: list[Tensor] = torch.ops.kvq.quantize(x, format)
    return result


def dequantize(store: Sequence[Tensor], format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode a store to ``[B, H, T, D]`` in ``dtype``.

    Tokens that were never written are zero. What a quantized store holds saturates at the largest number of ``dtype``: the
    last step of a code may lie beyond the value it stands for, and finite values must not come back as infinity.
    """
    result: Tensor = torch.ops.kvq.dequantize(store, format, dtype)
    return result


def append_(store: Sequence[Tensor], position: Tensor, x: Tensor, format: str) -> None:
    """Encode ``x`` and write its tokens into ``store`` in place.

    Args:
        store: planes of a cache ``[B, H, T, D]``.
        position: int64, ``[N]`` for all rows or ``[B, N]`` for rows that stand at different lengths; each in ``[0, T)``.
        x: ``[B, H, N, D]``.
        format: the format of ``store``.

    A write to a position that is already filled replaces it. ``length`` becomes the largest position written, plus one.
    Static scales that are unset are fitted to ``x``. Nothing is written when an argument is rejected.
    """
    torch.ops.kvq.append_(store, position, x, format)


def attention(
    query: Tensor,
    key_store: Sequence[Tensor],
    value_store: Sequence[Tensor],
    key_format: str,
    value_format: str,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    use_length: bool = True,
) -> Tensor:
    """Scaled dot-product attention over quantized keys and values.

    ``softmax(softcap * tanh(scale * q k' / softcap) + mask) v'`` with ``k'``, ``v'`` the decoded stores; arithmetic in fp32.
    Query head ``h`` reads kv head ``h // (Hq / Hkv)``. A row that may attend to nothing gives zeros.

    Args:
        query: ``[B, Hq, Tq, D]``.
        key_store, value_store: stores ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``.
        mask: broadcastable to ``[B, Hq, Tq, T]``; bool (True may attend) or floating (added to the scores).
        causal: query ``i`` of ``Tq`` stands at position ``end - Tq + i`` and sees no later key; ``end`` is the row's length.
        scale: default ``D ** -0.5``.
        window: when positive, a query sees no key ``window`` or more positions before its own.
        softcap: when positive, scores are squashed to within it.
        sinks: ``[Hq]``, logits of one column without value in the softmax.
        use_length: ignore tokens beyond each row's length. With False every allocated token counts (an unwritten one is a
            zero vector), exactly as attention over a dense buffer would; ``end`` is then ``T``.

    Returns:
        ``[B, Hq, Tq, Dv]``, contiguous, in the dtype of ``query``.
    """
    result: Tensor = torch.ops.kvq.attention(
        query,
        key_store,
        value_store,
        key_format,
        value_format,
        mask=mask,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        use_length=use_length,
    )
    return result


# ------------------------------------------------------------------------------------------------------------- checks


def _check_append(
    store: Sequence[Tensor], position: Tensor, x: Tensor, fmt: Format
) -> tuple[int, int, int, int]:
    check_values("append_", x)
    batch, heads, tokens, head_dim = shape = fmt.check_store(store)
    if x.shape[0] != batch or x.shape[1] != heads or x.shape[3] != head_dim:
        raise ShapeError(
            f"kvq::append_ into a cache of shape {shape}",
            got=f"x {tuple(x.shape)}",
            allowed=f"[{batch}, {heads}, N, {head_dim}]",
            do="check batch size, kv heads and head_dim of the cache against the model",
        )
    if position.dtype not in (torch.int64, torch.int32):
        raise DtypeError(
            "kvq::append_ position",
            got=str(position.dtype),
            allowed="int64, int32",
            do="cast position to int64",
        )
    if tuple(position.shape) not in ((x.shape[2],), (batch, x.shape[2])):
        raise ShapeError(
            "kvq::append_ position",
            got=f"{tuple(position.shape)}",
            allowed=f"[{x.shape[2]}] or [{batch}, {x.shape[2]}]: one position for each token of x",
            do="give the slots that the tokens go to, such as torch.arange(start, start + N)",
        )
    check_device("append_", position, x, *store)
    check_kept("append_", store, x, fmt)
    return shape


def _check_attention(
    query: Tensor,
    key_store: Sequence[Tensor],
    value_store: Sequence[Tensor],
    key_fmt: Format,
    value_fmt: Format,
    options: Options,
) -> tuple[int, int]:
    """Raise on anything wrong; ``(D, Dv)``."""
    check_values("attention", query, "query")
    batch, heads, tokens, head_dim = key_fmt.check_store(key_store)
    value_shape = value_fmt.check_store(value_store)
    if value_shape[:3] != (batch, heads, tokens):
        raise ShapeError(
            "kvq::attention key and value stores",
            got=f"{(batch, heads, tokens)} and {value_shape[:3]}",
            allowed="equal batch, kv heads and tokens",
            do="pass the keys and the values of one layer",
        )
    check_over("attention", query, (batch, heads, tokens, head_dim), options)
    check_device("attention", query, options.mask, options.sinks, *key_store, *value_store)
    check_gradient("attention", query, options.mask, options.sinks, *key_store, *value_store)
    return head_dim, value_shape[3]


# ------------------------------------------------------------------------------------------------------ real kernels


def _quantize(x: Tensor, format: str) -> list[Tensor]:
    fmt = get_format(format)
    check_values("quantize", x)
    fmt.check_head_dim(x.shape[3])
    check_gradient("quantize", x)
    check_finite("quantize", x)
    request = Request("quantize", x.device.type, (fmt,), (x.shape[3],), x.dtype)
    store: list[Tensor] = select(request).run(x, fmt)
    return store


def _dequantize(store: Sequence[Tensor], format: str, dtype: torch.dtype) -> Tensor:
    fmt = get_format(format)
    head_dim = fmt.check_store(store)[3]
    check_dtype("dequantize", dtype)
    check_gradient("dequantize", *store)
    request = Request("dequantize", store[0].device.type, (fmt,), (head_dim,), dtype)
    out: Tensor = select(request).run(store, fmt, dtype)
    return out


def _append_(store: Sequence[Tensor], position: Tensor, x: Tensor, format: str) -> None:
    fmt = get_format(format)
    tokens = _check_append(store, position, x, fmt)[2]
    check_gradient("append_", x, *store)
    check_finite("append_", x)
    if position.device.type == "cpu" and position.numel():
        low, high = (int(v) for v in position.aminmax()) if position.numel() > 1 else (int(position),) * 2
        if low < 0 or high >= tokens:
            raise CapacityError(
                f"kvq::append_ of {x.shape[2]} token(s)",
                got=f"positions {low}..{high}",
                allowed=f"0..{tokens - 1}: the cache holds {tokens} tokens",
                do="make the cache larger (max_cache_len), or stop generating; nothing was written",
            )
    if fmt.windowed and position.numel():
        _check_grows(store[-1], position, tokens, fmt)
    request = Request("append_", x.device.type, (fmt,), (x.shape[3],), x.dtype)
    select(request).run(store, position, x, fmt)


def _check_grows(length: Tensor, position: Tensor, tokens: int, fmt: Format) -> None:
    """A format whose newest tokens wait to be coded takes tokens in order, without gaps."""
    rows = position if position.dim() == 2 else position.unsqueeze(0)
    wrong = (rows[:, 0] > length).any() | (rows.diff(dim=1) != 1).any()
    if position.device.type != "cpu":
        # Nothing else would notice: positions in the window are taken modulo its size.
        outside = (rows[:, 0] < 0).any() | (rows[:, -1] >= tokens).any()
        torch._assert_async(~(wrong | outside), f"kvq::append_ in format {fmt.name!r}: positions jump")
    elif bool(wrong):
        raise CapacityError(
            f"kvq::append_ in format {fmt.name!r}, which codes tokens once they are old",
            got=f"positions {rows.tolist()} after {length.tolist()} tokens"
            if rows.numel() < 64
            else "positions that jump",
            allowed="consecutive positions that start at the row's length, or before it to roll back",
            do="use a format without +recent or per-channel groups for caches that are written out of order",
        )


def _attention(
    query: Tensor,
    key_store: Sequence[Tensor],
    value_store: Sequence[Tensor],
    key_format: str,
    value_format: str,
    *,
    use_length: bool = True,
    **given: Any,
) -> Tensor:
    fmts = get_format(key_format), get_format(value_format)
    options = Options(**given) if given else NO_OPTIONS
    dims = _check_attention(query, key_store, value_store, *fmts, options)
    request = Request("attention", query.device.type, fmts, dims, query.dtype)
    run = select(request).run
    out: Tensor = run(query, key_store, value_store, *fmts, use_length=use_length, **given)
    return out.contiguous()


for _name, _kernel in (
    ("quantize", _quantize),
    ("dequantize", _dequantize),
    ("append_", _append_),
    ("attention", _attention),
):
    _lib.impl(_name, _kernel, "CompositeExplicitAutograd")
    inline(_lib, _name, _kernel)


# ------------------------------------------------------------------------------------------------------ fake kernels


@torch.library.register_fake("kvq::quantize", lib=_lib)
def _(x: Tensor, format: str) -> list[Tensor]:
    fmt = get_format(format)
    check_values("quantize", x)
    fmt.check_head_dim(x.shape[3])
    check_gradient("quantize", x)
    shapes = fmt.plane_shapes(*x.shape)
    return [
        x.new_empty(shape, dtype=dtype)
        for shape, dtype in zip(shapes, fmt.plane_dtypes(x.dtype), strict=True)
    ]


@torch.library.register_fake("kvq::dequantize", lib=_lib)
def _(store: Sequence[Tensor], format: str, dtype: torch.dtype) -> Tensor:
    shape = get_format(format).check_store(store)
    check_dtype("dequantize", dtype)
    check_gradient("dequantize", *store)
    return store[0].new_empty(shape, dtype=dtype)


@torch.library.register_fake("kvq::append_", lib=_lib)
def _(store: Sequence[Tensor], position: Tensor, x: Tensor, format: str) -> None:
    _check_append(store, position, x, get_format(format))
    check_gradient("append_", x, *store)


@torch.library.register_fake("kvq::attention", lib=_lib)
def _(
    query: Tensor,
    key_store: Sequence[Tensor],
    value_store: Sequence[Tensor],
    key_format: str,
    value_format: str,
    *,
    use_length: bool = True,
    **given: Any,
) -> Tensor:
    fmts = get_format(key_format), get_format(value_format)
    value_dim = _check_attention(query, key_store, value_store, *fmts, Options(**given))[1]
    return query.new_empty(query.shape[0], query.shape[1], query.shape[2], value_dim)


# -------------------------------------------------------------------------------------- the torch implementation


def _quantize_torch(x: Tensor, fmt: Format) -> list[Tensor]:
    store = reference.quantize(x, fmt)
    if fmt.lossless and store[0].data_ptr() == x.data_ptr():
        store[0] = store[0].clone()
    return store


def _dequantize_torch(store: Sequence[Tensor], fmt: Format, dtype: torch.dtype) -> Tensor:
    out = reference.decode_store(store, fmt)
    if not fmt.lossless:
        largest = min(torch.finfo(dtype).max, torch.finfo(out.dtype).max)
        out = out.clamp(-largest, largest)
    out = out.to(dtype)
    if out.data_ptr() == store[0].data_ptr() and out.numel():
        out = out.clone()
    return out.contiguous()


for _op, _run in (
    ("quantize", _quantize_torch),
    ("dequantize", _dequantize_torch),
    ("append_", reference.append_),
    ("attention", reference.attention),
):
    register(Implementation("torch", _op, _run, lambda request: None))

"""Caches of Hugging Face transformers in the backends quanto (optimum-quanto) and HQQ.

Both keep codes ``q`` with a scale and an offset for each group, and the newest tokens dense. What a group is depends on the
axis:

* quanto, ``axis=0``, and HQQ, ``axis=1``: ``G`` values that lie side by side. Where ``G`` divides head_dim these are ``G``
  channels of one token: rows ``int<4|2>_groupG`` (for HQQ also ``int3_groupG``).
* quanto, ``axis=-1``: one channel of ``G`` tokens in a row. Where ``G`` divides the number of tokens: rows
  ``int<4|2>_channelG``, of which ``kivi4_keys`` and ``kivi2_keys`` are two.
* HQQ, ``axis=0``: every ``n/G``-th value of the whole tensor. No row holds groups that run across heads and tokens.

Quanto means ``s q - shift`` (with an integer shift ``s (q - shift)``), HQQ ``s (q - zero)``; a row here ``s q + m``. The import
is exact, codes, scales and values, when the groups fit *and* scale and minimum are numbers of the row's type. A quanto cache
goes into a row of its own dtype, whose minimum is the shift. HQQ's minimum is a product, for which 16 bits are too few: unless
said otherwise its row ends in ``_fp32``, which holds the product of numbers of 16 bits. What these libraries read back may
still differ in the last bits, since they round each step to the dtype of the model, and here values are computed in fp32
and rounded once.

Otherwise an error names the difference. With ``requantize=True`` the import goes ahead: where the groups fit the codes
stay, and scale and minimum are rounded to the row's type; where they do not, values are decoded and coded again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..codecs.packing import pack
from ..errors import DtypeError, FormatError, ShapeError, UnknownFormatError
from ..formats import Format, get_format
from ..handle import QuantizedKV, check_cache_dtype
from .pages import make_handle

__all__ = ["read_hqq", "read_layer", "read_quanto", "read_quanto_parts"]

Size4 = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Groups:
    """A cache as it was stored: codes and parameters of groups, not yet in any row.

    Attributes:
        source: for messages.
        codes: uint8 ``[B, H, T, D]``.
        scale, minimum: fp64, one for each group; in the shape of a row's planes when ``channels`` or ``tokens`` is set.
        channels: of one token that make a group; 0 when groups are not that.
        tokens: of one channel that make a group; 0 when groups are not that.
        parameter: dtype that scale and minimum ask for.
        values: decodes to fp32 ``[B, H, T, D]``.
    """

    source: str
    bits: int
    codes: Tensor
    scale: Tensor
    minimum: Tensor
    channels: int
    tokens: int
    parameter: torch.dtype
    values: Callable[[], Tensor]


def read_quanto(
    tensor: Any,
    *,
    residual: Tensor | None = None,
    format: str | Format | None = None,
    dtype: torch.dtype | None = None,
    requantize: bool = False,
) -> QuantizedKV:
    """One tensor of a quanto cache.

    Args:
        tensor: a ``QBitsTensor`` of optimum-quanto (tried with 0.2.7), of shape ``[B, H, T, D]``.
        residual: dense ``[B, H, R, D]``, the newest tokens, which a cache of transformers holds beside it. They stay exact.
        format: a row; the one that fits unless said otherwise. With a residual it has a window of exact tokens.
        dtype: of the dense cache that the handle stands for; that of the scales unless said otherwise.
        requantize: go ahead where the import is not exact.

    Returns:
        a handle ``[B, H, T + R, D]``.

    Raises:
        FormatError: the import is not exact and ``requantize`` is off, or no row has such codes.
        ShapeError, DtypeError: something else than a quantized cache.
    """
    data = getattr(tensor, "_data", None)
    packed = getattr(data, "_data", data)
    parts: tuple[Any, Any, Any] = (packed, getattr(tensor, "_scale", None), getattr(tensor, "_shift", None))
    if data is None or not all(isinstance(part, Tensor) for part in parts) or not hasattr(data, "_bits"):
        raise DtypeError(
            "a tensor of a quanto cache",
            got=type(tensor).__name__,
            allowed="a QBitsTensor of optimum-quanto, 2 or 4 bits",
            do="read_quanto_parts takes the plain tensors",
        )
    return read_quanto_parts(
        *parts,
        bits=data._bits,
        axis=tensor.axis,
        group_size=tensor._group_size,
        shape=tuple(tensor.shape),
        residual=residual,
        format=format,
        dtype=dtype,
        requantize=requantize,
    )


def read_quanto_parts(
    packed: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    bits: int,
    axis: int,
    group_size: int | None,
    shape: Sequence[int],
    residual: Tensor | None = None,
    format: str | Format | None = None,
    dtype: torch.dtype | None = None,
    requantize: bool = False,
) -> QuantizedKV:
    """As :func:`read_quanto`, from the plain tensors.

    Args:
        packed: uint8, the grouped codes ``[groups, G]`` (``axis=0``) or ``[G, groups]`` (``axis=-1``), several rows in one:
            row ``i`` of ``n`` packed rows holds rows ``i``, ``i + n``, ... from the lowest bits on.
        scale, shift: one for each group, ``[groups, 1]`` or ``[1, groups]``; a shift may be of an integer dtype.
        shape: ``[B, H, T, D]`` of the dense tensor.
    """
    what = "a quanto cache"
    if bits not in (2, 4):
        raise FormatError(what, got=f"{bits} bits", allowed="2 or 4")
    if axis not in (0, -1):
        raise FormatError(what, got=f"axis {axis}", allowed="0 or -1")
    size = _shape4(shape, what)
    count = math.prod(size)
    if not group_size or count % group_size:
        raise FormatError(
            what,
            got=f"group size {group_size} for {count} values",
            allowed="groups that share the values out",
        )
    groups = count // group_size
    grouped = (groups, group_size) if axis == 0 else (group_size, groups)
    rows = -(-grouped[0] * bits // 8)
    _check_part(packed, (rows, grouped[1]), (torch.uint8,), f"codes of {what}")
    parameters = (groups, 1) if axis == 0 else (1, groups)
    floats = (torch.float16, torch.bfloat16, torch.float32)
    _check_part(scale, parameters, floats, f"scale of {what}")
    _check_part(shift, parameters, (*floats, torch.uint8, torch.int8), f"shift of {what}")
    mask = (1 << bits) - 1
    codes = torch.cat([(packed >> at) & mask for at in range(0, 8, bits)])[: grouped[0]]
    factor = scale.double()
    minimum = -shift.double() if shift.is_floating_point() else -shift.double() * factor

    def dense(x: Tensor) -> Tensor:
        if axis == 0:
            return x.expand(grouped).reshape(size)
        return x.expand(grouped).reshape(group_size, size[3], -1).permute(2, 0, 1).reshape(size)

    channels = group_size if axis == 0 and size[3] % group_size == 0 else 0
    tokens = group_size if axis == -1 and size[2] % group_size == 0 else 0
    if tokens:
        # Group (channel d, block a) is column d * blocks + a; blocks run through batch, heads and tokens.
        blocks = (*size[:2], size[2] // group_size, size[3])
        factor, minimum = (p.reshape(size[3], -1).t().reshape(blocks) for p in (factor, minimum))
    elif channels:
        blocks = (*size[:3], size[3] // group_size)
        factor, minimum = factor.reshape(blocks), minimum.reshape(blocks)
    found = _Groups(
        source=f"quanto, axis {axis}, groups of {group_size}",
        bits=bits,
        codes=dense(codes),
        scale=factor,
        minimum=minimum,
        channels=channels,
        tokens=tokens,
        parameter=scale.dtype if shift.is_floating_point() else torch.float32,
        values=lambda: dense(
            scale.float() * codes - shift.float()
            if shift.is_floating_point()
            else scale.float() * (codes.float() - shift.float())
        ),
    )
    return _import(found, residual, format, scale.dtype if dtype is None else dtype, requantize)


def read_hqq(
    packed: Tensor,
    meta: Mapping[str, Any],
    *,
    residual: Tensor | None = None,
    format: str | Format | None = None,
    dtype: torch.dtype | None = None,
    requantize: bool = False,
) -> QuantizedKV:
    """One tensor of an HQQ cache.

    Args:
        packed: the codes, as HQQ packs them for 4, 3 or 2 bits (tried with 0.2.8): the first rows in the highest bits.
        meta: HQQ's description of them: ``nbits``, ``group_size``, ``axis``, ``shape``, ``scale``, ``zero``, ``packing``.
        residual, format, dtype, requantize: as for :func:`read_quanto`. ``dtype`` defaults to HQQ's ``compute_dtype``.

    Raises:
        As :func:`read_quanto`.
    """
    what = "an HQQ cache"
    missing = [
        key for key in ("nbits", "group_size", "axis", "shape", "scale", "zero", "packing") if key not in meta
    ]
    if missing:
        raise FormatError(f"the description of {what}", got=f"no {', '.join(missing)}", allowed="HQQ's meta")
    bits, axis, group_size = meta["nbits"], meta["axis"], meta["group_size"]
    if bits not in (4, 3, 2) or axis not in (0, 1):
        raise FormatError(what, got=f"{bits} bits, axis {axis}", allowed="4, 3 or 2 bits, axis 0 or 1")
    size = _shape4(meta["shape"], what)
    count = math.prod(size)
    if not group_size or count % group_size:
        raise FormatError(
            what,
            got=f"group size {group_size} for {count} values",
            allowed="groups that share the values out",
        )
    groups = count // group_size
    grouped = (groups, group_size) if axis == 1 else (group_size, groups)
    parameters = (groups, 1) if axis == 1 else (1, groups)
    scale, zero = meta["scale"], meta["zero"]
    floats = (torch.float16, torch.bfloat16, torch.float32)
    _check_part(scale, parameters, floats, f"scale of {what}")
    _check_part(zero, parameters, floats, f"zero of {what}")
    codes = _unpack_hqq(packed, meta, bits, grouped, what)
    factor = scale.double()
    minimum = -zero.double() * factor
    fits = axis == 1 and size[3] % group_size == 0
    if fits:
        blocks = (*size[:3], size[3] // group_size)
        factor, minimum = factor.reshape(blocks), minimum.reshape(blocks)
    found = _Groups(
        source=f"HQQ, axis {axis}, groups of {group_size}",
        bits=bits,
        codes=codes.reshape(size),
        scale=factor,
        minimum=minimum,
        channels=group_size if fits else 0,
        tokens=0,
        parameter=torch.float32,
        values=lambda: ((codes.float() - zero.float()) * scale.float()).reshape(size),
    )
    reads = meta.get("compute_dtype", scale.dtype)
    return _import(found, residual, format, reads if dtype is None else dtype, requantize)


def _unpack_hqq(
    packed: Tensor, meta: Mapping[str, Any], bits: int, grouped: tuple[int, int], what: str
) -> Tensor:
    packing = meta["packing"]
    word, per = (torch.int32, 10) if bits == 3 else (torch.uint8, 8 // bits)
    if packing is None:
        _check_part(packed, grouped, None, f"codes of {what}")
        return packed.to(torch.uint8)
    if packing != {4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8"}[bits]:
        raise FormatError(f"the packing of {what}", got=repr(packing), allowed="4bit_u8, 3bit_32, 2bit_u8")
    if meta.get("view_as_float"):
        packed = packed.view(word)
    rows = -(-grouped[0] // per)
    if bits != 3 and grouped[0] % per:
        raise ShapeError(f"codes of {what}", got=f"{grouped[0]} rows", allowed=f"a multiple of {per}")
    _check_part(packed, (rows, grouped[1]), (word,), f"codes of {what}")
    shifts = [bits * (per - 1 - i) for i in range(per)]
    return torch.cat([(packed >> shift) & ((1 << bits) - 1) for shift in shifts])[: grouped[0]].to(
        torch.uint8
    )


def read_layer(
    layer: Any,
    *,
    format: str | Format | None = None,
    value_format: str | Format | None = None,
    requantize: bool = False,
) -> tuple[QuantizedKV, QuantizedKV]:
    """Keys and values of one layer of a transformers ``QuantizedCache``, quantized tokens and exact newest ones.

    Args:
        layer: a layer in the backend quanto or HQQ (tried with transformers 5.24), after its first update.
        format, value_format: rows for keys, and for values if those differ, as for :func:`read_quanto`.
        requantize: as for :func:`read_quanto`.

    Raises:
        As :func:`read_quanto`. FormatError also while a beam reordering waits to be carried out.
    """
    if getattr(layer, "_pending_beam_idx", None) is not None:
        raise FormatError(
            "reading a quantized layer of transformers",
            got="a beam reordering that waits for the next update",
            do="read it after the next token",
        )
    handles = []
    for name, row in (("keys", format), ("values", format if value_format is None else value_format)):
        stored = getattr(layer, f"_quantized_{name}", None)
        newest = getattr(layer, name, None)
        if stored is None or newest is None:
            raise DtypeError(
                "reading a quantized layer of transformers",
                got=f"{type(layer).__name__} without quantized {name}",
                allowed="a layer of the backend quanto or HQQ that holds tokens",
            )
        residual = newest if newest.dim() == 4 and newest.shape[2] else None
        common = {"residual": residual, "format": row, "dtype": newest.dtype, "requantize": requantize}
        handles.append(
            read_hqq(*stored, **common) if isinstance(stored, tuple) else read_quanto(stored, **common)
        )
    return handles[0], handles[1]


# ------------------------------------------------------------------------------------------------------- into our rows


def _import(
    found: _Groups,
    residual: Tensor | None,
    format: str | Format | None,
    dtype: torch.dtype,
    requantize: bool,
) -> QuantizedKV:
    check_cache_dtype(dtype)
    held = found.codes.shape[2]
    exact = 0 if residual is None else _residual_tokens(residual, found, dtype)
    row, why = _target(found, format, exact)
    base = row.base or row
    if why and not requantize:
        raise FormatError(
            f"an exact import from {found.source}",
            got=why,
            allowed=f"what {row.name!r} holds: {row.summary}",
            do="requantize=True imports it with the rounding that this needs",
        )
    shape = (*found.codes.shape[:2], held + exact, found.codes.shape[3])
    if not _fits(found, base) or row.sinks:
        values = found.values().to(dtype)
        return QuantizedKV.from_dense(values if residual is None else torch.cat([values, residual], 2), row)
    parameter = base.planes[base.index("scale")].dtype
    assert parameter is not None
    largest = torch.finfo(parameter).max
    planes = {
        "codes": pack(found.codes, found.bits),
        "scale": found.scale.clamp(-largest, largest).to(parameter),
        "minimum": found.minimum.clamp(-largest, largest).to(parameter),
    }
    lengths = torch.full((shape[0],), held, device=found.codes.device)
    if row.windowed:
        planes |= _window_planes(row, found, residual, dtype)
        return make_handle(row, planes, lengths + exact, shape, dtype)
    handle = make_handle(row, planes, lengths, shape, dtype)
    if residual is not None:
        position = torch.arange(held, held + exact, device=residual.device)
        torch.ops.kvq.append_(handle.store, position, residual, row.name)
    return handle


def _window_planes(
    row: Format, found: _Groups, residual: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    batch, heads, held, channels = found.codes.shape
    ring = torch.zeros(batch, heads, row.window, channels, dtype=dtype, device=found.codes.device)
    if residual is not None:
        ring[:, :, torch.arange(held, held + residual.shape[2]) % row.window] = residual
    return {"recent": ring, "coded": torch.full((batch,), held, device=ring.device)}


def _residual_tokens(residual: Tensor, found: _Groups, dtype: torch.dtype) -> int:
    want = found.codes.shape
    if residual.dim() != 4 or residual.shape[:2] != want[:2] or residual.shape[3] != want[3]:
        raise ShapeError(
            f"the residual of {found.source}",
            got=str(tuple(residual.shape)),
            allowed=f"[{want[0]}, {want[1]}, tokens, {want[3]}]",
        )
    if residual.dtype is not dtype:
        raise DtypeError(
            f"the residual of {found.source}", got=str(residual.dtype), allowed=f"{dtype}, that of the cache"
        )
    return residual.shape[2]


def _target(found: _Groups, format: str | Format | None, exact: int) -> tuple[Format, str]:
    """The row to import into, and what keeps the import from being exact."""
    if format is None:
        format = _natural_row(found, exact)
    row = format if isinstance(format, Format) else get_format(format)
    base = row.base or row
    if exact and not row.windowed:
        return row, f"{exact} dense newest tokens, which would be coded"
    if row.sinks:
        return row, "no exact first tokens"
    if not _fits(found, base):
        if not (found.channels or found.tokens):
            return row, "groups that run across tokens or heads"
        size = (
            f"{found.channels} channels of a token"
            if found.channels
            else f"{found.tokens} tokens of a channel"
        )
        return row, f"{found.bits}-bit codes in groups of {size}"
    if exact and exact >= row.window:
        # A whole group of tokens beyond the newest would have to be coded already.
        raise ShapeError(
            f"the residual of {found.source}",
            got=f"{exact} tokens",
            allowed=f"fewer than {row.window} in {row.name!r}",
            do="name a format with a longer window: +recentR",
        )
    parameter = base.planes[base.index("scale")].dtype
    assert parameter is not None
    for name, plane in (("scale", found.scale), ("minimum", found.minimum)):
        if not torch.equal(plane.to(parameter).double(), plane):
            return row, f"a {name} that is no {str(parameter)[6:]} number"
    return row, ""


def _natural_row(found: _Groups, exact: int) -> Format:
    tail = {torch.float16: "", torch.bfloat16: "_bf16", torch.float32: "_fp32"}[found.parameter]
    window = f"+recent{max(exact, 128)}" if exact or found.tokens else ""
    where = f"channel{found.tokens}" if found.tokens else f"group{found.channels or 32}"
    try:
        return get_format(f"int{found.bits}_{where}{tail}{window}")
    except UnknownFormatError:
        # A group size that no row has; the import is not exact.
        return get_format(f"int{found.bits}_group32{tail}{window}")


def _fits(found: _Groups, base: Format) -> bool:
    """Whether the codes of ``found`` are codes of ``base`` as they stand."""
    names = [plane.name for plane in base.planes]
    if names != ["codes", "scale", "minimum", "length"] or base.rotation or base.bits != found.bits:
        return False
    if found.tokens:
        return base.token_group == found.tokens and base.group == 1
    channels = base.group or found.codes.shape[3]
    return base.token_group == 1 and bool(found.channels) and found.channels == channels


def _shape4(shape: Sequence[int], what: str) -> Size4:
    if len(shape) != 4:
        raise ShapeError(what, got=f"shape {tuple(shape)}", allowed="[B, H, T, D]")
    b, h, t, d = (int(n) for n in shape)
    return b, h, t, d


def _check_part(
    tensor: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] | None, what: str
) -> None:
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ShapeError(what, got=str(got), allowed=str(shape))
    if dtypes is not None and tensor.dtype not in dtypes:
        raise DtypeError(what, got=str(tensor.dtype), allowed=", ".join(map(str, dtypes)))

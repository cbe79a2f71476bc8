"""Exact tokens beside coded ones: the newest, which wait to be coded, and the first.

Such a store holds the planes of its base format, a ring ``recent [B, H, R + G, D]`` in which token ``t`` lies at
``t mod (R + G)``, the count ``coded [B]`` of tokens that codes hold, and ``sinks [B, H, S, D]`` where asked for. After an append
up to length ``L``, tokens older than the newest ``R`` are coded in whole groups of ``G``: what is coded depends on the tokens
alone, never on how they arrived, on other rows or on padding, and no token is coded twice. Everything has a static shape and
needs no look at the values, except on CPUs, where asking is free.

Always ``coded >= (L - R) // G * G``, so that an append of ``N`` tokens makes at most ``ceil(N / G)`` groups old, and whatever is
not coded lies in the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .codecs import decode, encode
from .codecs.rotation import rotate
from .formats import Format

__all__ = ["append_window_", "decode_window", "roll_back_"]


def _base(store: Sequence[Tensor], fmt: Format) -> list[Tensor]:
    assert fmt.base is not None
    return [*store[: len(fmt.base.planes) - 1], store[-1]]


def append_window_(
    store: Sequence[Tensor], start: Tensor, x: Tensor, fmt: Format, end: Tensor | None = None
) -> None:
    """Append ``x [B, H, N, D]`` at ``start [B]``, at most what each row holds.

    A row that holds more is rolled back to there before.

    Args:
        end: for rows of unequal length, where each ends, ``[B]`` within ``start..start + N``; the rest of ``x`` is ignored.
    """
    count = x.shape[2]
    end = start + count if end is None else end
    roll_back_(store, torch.minimum(start, store[-1]), fmt)
    _code_aged(store, start, end, x, fmt)
    _keep(store[fmt.index("recent")], end - min(count, fmt.window), start, end, x)
    if fmt.sinks:
        sinks = store[fmt.index("sinks")]
        _keep(sinks, start, start, end.clamp_max(fmt.sinks), x)
    store[-1].copy_(end)


def _code_aged(store: Sequence[Tensor], start: Tensor, end: Tensor, x: Tensor, fmt: Format) -> None:
    """Code the groups that are old once rows reach ``end``, from the ring and from ``x``, which begins at ``start``."""
    assert fmt.base is not None
    base, base_store = fmt.base, _base(store, fmt)
    ring, coded = store[fmt.index("recent")], store[fmt.index("coded")]
    group, count, capacity = fmt.token_group, x.shape[2], store[0].shape[2]
    target = torch.maximum(coded, (end - fmt.recent).clamp_min(0) // group * group)
    # All tokens that can possibly become old now; those that do not are NaN and leave everything as it is.
    most = min(-(-count // group), capacity // group) * group
    if most == 0:
        return
    token = coded.unsqueeze(1) + torch.arange(most, device=x.device)
    aged = token < target.unsqueeze(1)
    waits = (token < start.unsqueeze(1))[:, None, :, None]
    arriving = _take(x, (token - start.unsqueeze(1)).clamp(0, count - 1))
    values = torch.where(waits, _take(ring, token % fmt.window), arriving)
    values = torch.where(aged[:, None, :, None], values, torch.nan)
    if base.static_planes and not base.calibrated:
        _fit_scales(base_store, start, torch.where(aged.any(), end, start), ring, coded, x, fmt)
    encoded, static = encode(values, base, base_store, token)
    for plane, tensor, new, kept in zip(base.planes, base_store, encoded, static, strict=True):
        if kept is not None:
            tensor.copy_(kept)
        elif new is not None:
            # Group starts stand for their groups. Positions are distinct modulo the size: others get back what they hold.
            at = token[:, :: plane.tokens] // plane.tokens % tensor.shape[2]
            _replace(tensor, at, new.to(tensor.dtype), aged[:, :: plane.tokens])
    coded.copy_(target)


def _fit_scales(
    store: list[Tensor], start: Tensor, end: Tensor, ring: Tensor, coded: Tensor, x: Tensor, fmt: Format
) -> None:
    """Fit scales that span tokens and are unset to all tokens up to ``end`` that are known by the time the first is coded.

    The first alone says little of the others: it is often one of a kind.
    """
    assert fmt.base is not None
    marker = store[fmt.base.static_planes[0]]
    if marker.device.type == "cpu" and bool((marker != 0).all() | (end == start).all()):
        return
    count = x.shape[2]
    token = coded.unsqueeze(1) + torch.arange(fmt.window + count, device=x.device)
    arriving = _take(x, (token - start.unsqueeze(1)).clamp(0, count - 1))
    waits = (token < start.unsqueeze(1))[:, None, :, None]
    values = torch.where(waits, _take(ring, token % fmt.window), arriving)
    known = (token < end.unsqueeze(1)) & (end != start).any()
    static = encode(torch.where(known[:, None, :, None], values, torch.nan), fmt.base, store, token)[1]
    for i in fmt.base.static_planes:
        plane = static[i]
        assert plane is not None
        store[i].copy_(plane)


def _keep(ring: Tensor, first: Tensor, start: Tensor, end: Tensor, x: Tensor) -> None:
    """Write into ``ring`` the tokens from ``first`` that lie in ``start..end``; ``x`` begins at ``start``. All ``[B]``."""
    token = first.unsqueeze(1) + torch.arange(min(x.shape[2], ring.shape[2]), device=x.device)
    inside = (token >= start.unsqueeze(1)) & (token < end.unsqueeze(1))
    values = _take(x, (token - start.unsqueeze(1)).clamp(0, x.shape[2] - 1))
    _replace(ring, token % ring.shape[2], values.to(ring.dtype), inside)


def decode_window(store: Sequence[Tensor], fmt: Format, *, rotated: bool = False) -> Tensor:
    """Decode to fp32 ``[B, H, T, D]``, exact tokens in their places; ``rotated`` as for ``kvq_ops.codecs.decode``.

    Exact tokens keep what is not finite until they are coded, so that codes do not depend on when that is; here NaN reads as
    zero and an infinity as the largest number of its dtype.
    """
    assert fmt.base is not None
    dense = decode(_base(store, fmt), fmt.base, rotated=rotated)
    tokens = dense.shape[2]
    if tokens == 0:
        return dense
    ring, coded, length = store[fmt.index("recent")], store[fmt.index("coded")], store[-1]

    def exact(values: Tensor) -> Tensor:
        values = torch.nan_to_num(values).to(dense.dtype)
        return rotate(values, fmt.rotation) if rotated and fmt.rotation else values

    # Codes beyond the count are leftovers of a roll-back, or empty.
    beyond = torch.arange(tokens, device=dense.device) >= coded.unsqueeze(1)
    dense = dense.masked_fill(beyond[:, None, :, None], 0.0)
    token = coded.unsqueeze(1) + torch.arange(min(fmt.window, tokens), device=dense.device)
    values = exact(_take(ring, token % fmt.window))
    _replace(dense, token % tokens, values, (token < length.unsqueeze(1)) & (token < tokens))
    if fmt.sinks:
        sinks = store[fmt.index("sinks")][:, :, :tokens]
        held = (torch.arange(sinks.shape[2], device=dense.device) < length.unsqueeze(1))[:, None, :, None]
        first = dense[:, :, : sinks.shape[2]]
        first.copy_(torch.where(held, exact(sinks), first))
    return dense


def roll_back_(store: Sequence[Tensor], length: Tensor, fmt: Format) -> None:
    """Cut rows to ``length [B]``, at most what they hold.

    Tokens that were coded in a group which is cut through go back to the ring as what they read as.
    """
    assert fmt.base is not None
    ring, coded, held = store[fmt.index("recent")], store[fmt.index("coded")], store[-1]
    if held.device.type == "cpu" and bool((length == held).all()):
        return
    group = fmt.token_group
    target = torch.minimum(coded, length // group * group)
    tokens = store[0].shape[2]
    if group > 1 and tokens:
        token = target.unsqueeze(1) + torch.arange(min(group, tokens), device=ring.device)
        values = _decode_tokens(store, fmt, token.clamp_max(tokens - 1))
        largest = torch.finfo(ring.dtype).max
        values = values.clamp(-largest, largest).to(ring.dtype)
        if fmt.sinks:
            first = _take(store[fmt.index("sinks")], token.clamp_max(fmt.sinks - 1)).to(ring.dtype)
            values = torch.where((token < fmt.sinks)[:, None, :, None], first, values)
        reopened = token < torch.minimum(coded, length).unsqueeze(1)
        _replace(ring, token % fmt.window, values, reopened)
    coded.copy_(target)
    held.copy_(length)


def _decode_tokens(store: Sequence[Tensor], fmt: Format, token: Tensor) -> Tensor:
    """Codes of one group of tokens for each row, ``token [B, N]`` starting at a group, decoded."""
    assert fmt.base is not None
    part: list[Tensor] = []
    for plane, tensor in zip(fmt.base.planes, _base(store, fmt), strict=True):
        part.append(_take(tensor, token[:, :: plane.tokens] // plane.tokens) if plane.per_token else tensor)
    return decode(part, fmt.base)


def _take(plane: Tensor, at: Tensor) -> Tensor:
    """``plane[b, :, at[b]]`` for each row: ``[B, H, N, ...]``."""
    rows = torch.arange(at.shape[0], device=at.device).unsqueeze(1)
    return plane.transpose(1, 2)[rows, at].transpose(1, 2)


def _replace(plane: Tensor, at: Tensor, values: Tensor, where: Tensor) -> None:
    """``plane[b, :, at[b]] = values[b]`` for each row where ``where [B, N]`` says so; ``at`` is distinct in each row."""
    where = where[:, None, :, None] if values.dim() == 4 else where[:, None]
    values = torch.where(where, values, _take(plane, at))
    rows = torch.arange(at.shape[0], device=at.device).unsqueeze(1)
    plane.transpose(1, 2)[rows, at] = values.transpose(1, 2)

"""Keys that are joined along their channels from a cached part and a part that stays exact.

Latent attention stores a latent that is shared by keys and values, and beside it the rotary part of the keys. Then
``q k = q_1 k_1 + q_2 k_2``: the cached part is attended to as usual, and what the exact part adds to the scores is passed along
as a mask, which the operator adds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from .attention_site import AttentionSite, Operand
from .attention_space import Sizes, Var, aten, emit, rearrange
from .layout import trace_layout
from .layout_nodes import op_name, shape_of, tensor_of
from .layout_sizes import LayoutError, Size, known_equal

__all__ = ["SplitKeys", "split_keys"]


@dataclass(frozen=True)
class SplitKeys:
    """Keys in parts along the channels.

    Attributes:
        cached: the operand that stands for the cached part alone.
        start, width: channels of the query that go with it.
        exact: the other parts, with where their channels start and how many they are.
    """

    cached: Operand
    start: Size
    width: Size
    exact: tuple[tuple[Operand, Size, Size], ...]


def split_keys(operand: Operand) -> SplitKeys | None:
    """Take ``operand`` apart if its source joins a decoded cache with other tensors along the channels."""
    source = operand.source
    axis = operand.axis("channel")
    if op_name(source) != "cat" or axis is None:
        return None
    parts = source.args[0]
    dim = source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", 0)
    rank = len(shape_of(source))
    if not isinstance(dim, int) or dim % rank != axis or not isinstance(parts, (list, tuple)):
        return None
    if operand.layout.starts[axis] != 0 or len(operand.dims[axis]) != 1:
        return None
    start: Size = 0
    joined: list[tuple[Operand, Operand | None, Size, Size]] = []
    for part in parts:
        assert isinstance(part, Node)
        width = shape_of(part)[axis]
        piece = _part(operand, part, axis, width)
        joined.append((piece, _through_views(piece), start, width))
        start = start + width
    # Of several cached parts the widest is read as codes (the rotary part is the narrow one), the others decoded.
    widths = [width for _, traced, _, width in joined if traced is not None]
    if len(joined) < 2 or not widths or not all(isinstance(width, int) for width in widths):
        return None
    chosen = next(
        i for i, (_, traced, _, width) in enumerate(joined) if traced is not None and width == max(widths)
    )
    _, cached, at, wide = joined.pop(chosen)
    assert cached is not None
    return SplitKeys(cached, at, wide, tuple((piece, start, width) for piece, _, start, width in joined))


def _part(operand: Operand, part: Node, axis: int, width: Size) -> Operand:
    """The operand as it would be if its source held only ``part``."""
    (channel,) = operand.dims[axis]
    dims = tuple(
        (Var(channel.label, width, channel.stride),) if i == axis else dim
        for i, dim in enumerate(operand.dims)
    )
    shape = tuple(width if i == axis else size for i, size in enumerate(operand.layout.source_shape))
    return replace(operand, source=part, layout=replace(operand.layout, source_shape=shape), dims=dims)


def _through_views(piece: Operand) -> Operand | None:
    """``piece`` as a view of the decoded cache it comes from, or ``None``."""
    trace = trace_layout(piece.source)
    if trace.source.target is not torch.ops.kvq.dequantize.default or trace.stopped or trace.scale != 1.0:
        return None
    layout = trace.layout
    roles = ["fixed"] * len(layout.source_shape)
    dims: list[tuple[Var, ...]] = [()] * len(layout.source_shape)
    for dim, atoms in enumerate(layout.dims):
        moving = [atom for atom in atoms if not known_equal(atom.size, 1)]
        if len(moving) > 1:
            return None
        if not moving or moving[0].axis is None:
            # One element, or a repetition of the same keys over rows or heads: nothing of the cache moves along it.
            continue
        target = moving[0].axis
        if roles[target] != "fixed" or not layout.is_full(target):
            return None
        roles[target], dims[target] = piece.roles[dim], piece.dims[dim]
    return replace(
        piece, source=trace.source, layout=layout, path=trace.path, roles=tuple(roles), dims=tuple(dims)
    )


def emit_exact_scores(graph: Graph, site: AttentionSite, split: SplitKeys, query: Node) -> Node:
    """What the exact parts add to the scores, float32 ``[B, Hq, Tq, Tk]``, scale included."""
    sizes = site._sizes(graph)
    total: Node | None = None
    for operand, start, width in split.exact:
        part = emit(graph, aten.slice.Tensor, (query, 3, sizes.value(start), sizes.value(start + width)))
        keys = _emit_part(graph, sizes, site, operand)
        scores = _scores(graph, sizes, site, part, keys)
        total = scores if total is None else emit(graph, aten.add.Tensor, (total, scores))
    assert total is not None
    return emit(graph, aten.mul.Scalar, (total, site.scale))


def _emit_part(graph: Graph, sizes: Sizes, site: AttentionSite, operand: Operand) -> Node:
    """A part of the keys as ``[B, Hkv, Tk, width]`` (batch and heads may be 1)."""
    (channel,) = operand.dims[operand.roles.index("channel")]
    form = (*site._form(("batch",), ("head",), ("token",)), (channel,))
    node = rearrange(graph, sizes, operand.source, operand.dims, form)
    have = tensor_of(node)
    assert have is not None
    if have.dim() != 4:
        raise LayoutError(f"{operand.source.name} does not become [B, H, T, D]")
    return node


def _scores(graph: Graph, sizes: Sizes, site: AttentionSite, query: Node, keys: Node) -> Node:
    grouped = [sizes.value(s) for s in (site.batch, site.kv_heads)]
    width = sizes.value(shape_of(keys)[3])
    # Heads of a group by query tokens: no tensor shows this product where the number of tokens varies.
    flat = emit(graph, aten.reshape.default, (query, [*grouped, -1, width]))
    flat = emit(graph, aten.to.dtype, (flat, torch.float32))
    keys = emit(graph, aten.to.dtype, (keys, torch.float32))
    keys = emit(graph, aten.transpose.int, (keys, 2, 3))
    scores = emit(graph, aten.matmul.default, (flat, keys))
    shape = [sizes.value(s) for s in (site.batch, site.query_heads, site.query_length, site.key_length)]
    return emit(graph, aten.reshape.default, (scores, shape))


def add_to_mask(graph: Graph, scores: Node, mask: Node | None) -> Node:
    """One additive mask out of scores and a mask."""
    if mask is None:
        return scores
    value = tensor_of(mask)
    assert value is not None
    if value.dtype is torch.bool:
        low = emit(
            graph, aten.full.default, ([], -torch.inf), {"dtype": torch.float32, "device": value.device}
        )
        return emit(graph, aten.where.self, (mask, scores, low))
    return emit(graph, aten.add.Tensor, (scores, mask))

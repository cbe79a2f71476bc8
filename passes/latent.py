"""Latent attention that expands its latents, brought into the form in which keys and values are the latents themselves.

Models with latent attention cache one latent for each token and expand it, whenever it is read, by a matrix to the keys and
values of all heads. The expansion can move to the other side of both products,

    q (W c) = (W^T q) c        sum p (W c) = W (sum p c),

after which the attention reads the cache itself, as one key-value head, and nothing is expanded. What is rewritten here is
still attention over dense tensors; ``passes.fuse`` then treats it as any other.

Parts of the keys that are not expanded (the rotary part) are joined to the latents as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from .attention import AttentionSite, scan
from .attention_effects import Effects
from .attention_space import aten, emit
from .candidates import reads_cache
from .capture import remove_dead_code
from .layout import trace_layout
from .layout_nodes import op_name, shape_of, tensor_of
from .layout_sizes import LayoutError, Size, known_equal, same_shape

__all__ = ["absorb"]


def absorb(graph_module: GraphModule) -> GraphModule:
    """``graph_module`` itself, or a rewritten copy if some attention of it expands cached latents."""
    if not any(_expands(node) for node in graph_module.graph.nodes):
        return graph_module
    graph = Graph()
    copies: dict[Node, Node] = {}
    outputs = graph.graph_copy(graph_module.graph, copies)
    (old,) = (node for node in graph_module.graph.nodes if node.op == "output")
    graph.output(outputs).meta.update(old.meta)
    result = GraphModule(graph_module, graph)
    result.meta.update(graph_module.meta)
    changed = _join_parts(graph)
    for site in scan(result)[0]:
        found = _latents(site)
        if found is None:
            continue
        try:
            with graph.inserting_before(site.output):
                site.replace(graph, _emit(graph, site, found))
            changed = True
        except LayoutError:
            continue
    if not changed:
        return graph_module
    remove_dead_code(graph)
    graph.lint()
    result.recompile()
    return result


def _expands(node: Node) -> bool:
    """Whether ``node`` applies a matrix to what is read from a cache."""
    return _is_expansion(node) and isinstance(node.args[0], Node) and reads_cache(node.args[0])


def _is_expansion(node: Node) -> bool:
    return op_name(node) == "linear" and len(node.args) == 2 and not node.kwargs


# ------------------------------------------------------------------------------------------------ tensors filled in parts


def _join_parts(graph: Graph) -> bool:
    """Turn an empty tensor that is filled part by part along one dim into a ``cat`` of the parts."""
    effects = Effects(graph)
    changed = False
    for node in list(graph.nodes):
        if op_name(node) not in ("new_empty", "empty", "empty_like"):
            continue
        found = _parts(node, effects)
        if found is None:
            continue
        dim, parts, writes = found
        last = max(writes, key=effects.order.__getitem__)
        with graph.inserting_after(last):
            joined = emit(graph, aten.cat.default, (parts, dim))
        slices = [write.args[0] for write in writes]
        node.replace_all_uses_with(joined, delete_user_cb=lambda user, kept=slices: user not in kept)
        for write in writes:
            graph.erase_node(write)
        for part in slices:
            assert isinstance(part, Node)
            graph.erase_node(part)
        graph.erase_node(node)
        changed = True
    return changed


def _parts(node: Node, effects: Effects) -> tuple[int, list[Node], list[Node]] | None:
    """The dim, the parts in order, and the copies that fill ``node`` with them before anything reads it."""
    writes = effects.writes.get(node, [])
    value = tensor_of(node)
    if not writes or value is None:
        return None
    filled: list[tuple[int, int, int, Node, Node]] = []
    for write in writes:
        if op_name(write) != "copy_" or write.users:
            return None
        target, source = write.args[0], write.args[1]
        if not isinstance(target, Node) or not isinstance(source, Node) or op_name(target) != "slice":
            return None
        if target.args[0] is not node or list(target.users) != [write]:
            return None
        dim, start = target.args[1], target.args[2]
        into, out = tensor_of(target), tensor_of(source)
        if into is None or out is None or into.dtype != out.dtype or not same_shape(into.shape, out.shape):
            return None
        if not isinstance(dim, int) or not isinstance(start, int) or len(target.args) > 4:
            return None
        width = into.shape[dim]
        if not isinstance(width, int):
            return None
        filled.append((dim % value.dim(), start, width, source, write))
    filled.sort(key=lambda part: part[1])
    dims = {part[0] for part in filled}
    at = 0
    for _, start, width, _, _ in filled:
        if start != at:
            return None
        at += width
    if len(dims) != 1 or not known_equal(value.shape[dims.copy().pop()], at):
        return None
    last = max(effects.order[write] for write in writes)
    slices = {write.args[0] for write in writes}
    if any(effects.order[user] < last for user in node.users if user not in slices):
        return None
    return dims.pop(), [part[3] for part in filled], list(writes)


# -------------------------------------------------------------------------------------------------------- the latents


@dataclass(frozen=True)
class _Expansion:
    """A tensor ``[B, H, T, width]`` that is a latent times rows of a matrix.

    Attributes:
        latent: ``[B, 1, T, r]`` or ``[B, T, r]``.
        weight: ``[H * pitch, r]``.
        start, width: rows of each head's ``pitch`` that are used.
    """

    latent: Node
    weight: Node
    heads: int
    pitch: int
    start: int
    width: int


@dataclass(frozen=True)
class _Latents:
    value: _Expansion
    keys: list[tuple[Node, _Expansion | None]]


def _latents(site: AttentionSite) -> _Latents | None:
    """How a site's keys and values come from one cached latent, or ``None``."""
    if site.softcap or site.sinks is not None or not known_equal(site.group, 1):
        return None
    value = _expansion(site.value.node)
    source = site.key.source
    if value is None or op_name(source) != "cat" or site.key.roles != ("batch", "head", "token", "channel"):
        return None
    parts = source.args[0]
    dim = source.args[1] if len(source.args) > 1 else 0
    if not isinstance(parts, (list, tuple)) or dim not in (3, -1):
        return None
    if not all(site.key.layout.is_full(axis) for axis in range(4)):
        return None
    keys = [(part, _expansion(part)) for part in parts if isinstance(part, Node)]
    expanded = [part for _, part in keys if part is not None]
    if len(expanded) != 1 or expanded[0].latent is not value.latent or expanded[0].heads != value.heads:
        return None
    return _Latents(value, keys)


def _expansion(node: Node) -> _Expansion | None:
    """``node``, ``[B, H, T, width]``, as rows of a matrix applied to a cached latent."""
    if len(shape_of(node)) != 4:
        return None
    trace = trace_layout(node)
    linear = trace.source
    if trace.stopped or trace.scale != 1.0 or not _expands(linear):
        return None
    latent, weight = linear.args[0], linear.args[1]
    assert isinstance(latent, Node) and isinstance(weight, Node)
    rows, _ = shape_of(weight)
    layout = trace.layout
    last = len(layout.source_shape) - 1
    token = last - 1
    shape = shape_of(latent)
    if len(shape) not in (3, 4) or (len(shape) == 4 and not known_equal(shape[1], 1)):
        return None
    moving = [[atom for atom in dim if not known_equal(atom.size, 1)] for dim in layout.dims]
    batch, heads, tokens, channels = moving
    if any(len(atoms) > 1 for atoms in (batch, heads, tokens, channels)) or not heads or not channels:
        return None
    head, channel = heads[0], channels[0]
    fits = (
        all(atom.axis == 0 and known_equal(atom.size, shape[0]) for atom in batch)
        and all(atom.axis == token and known_equal(atom.size, shape[token]) for atom in tokens)
        and head.axis == last
        and channel.axis == last
        and known_equal(channel.stride, 1)
        and all(known_equal(start, 0) for start in layout.starts[:last])
    )
    numbers = (rows, head.size, head.stride, layout.starts[last], channel.size)
    if not fits or not all(isinstance(number, int) for number in numbers):
        return None
    count, pitch, start, width = (int(number) for number in numbers[1:])
    if count * pitch != int(rows) or start + width > pitch:
        return None
    return _Expansion(latent, weight, count, pitch, start, width)


# --------------------------------------------------------------------------------------------------------- the rewrite


def _emit(graph: Graph, site: AttentionSite, found: _Latents) -> Node:
    sizes = site._sizes(graph)
    sizes.nodes.append(found.value.latent)
    heads = found.value.heads
    query = site.emit_query(graph)
    queries: list[Node] = []
    keys: list[Node] = []
    start: Size = 0
    for part, expansion in found.keys:
        width = shape_of(part)[3]
        piece = emit(graph, aten.slice.Tensor, (query, 3, sizes.value(start), sizes.value(start + width)))
        start = start + width
        if expansion is None:
            queries.append(piece)
            keys.append(_one_head(part))
        else:
            queries.append(emit(graph, aten.matmul.default, (piece, _rows(graph, expansion))))
            keys.append(_latent(graph, expansion))
    value = _latent(graph, found.value)
    key = emit(graph, aten.cat.default, (keys, 3))
    key = emit(graph, aten.expand.default, (key, [-1, heads, -1, -1]))
    value = emit(graph, aten.expand.default, (value, [-1, heads, -1, -1]))
    query = emit(graph, aten.cat.default, (queries, 3))
    causal = site.causal and site.is_square and not site.terms
    mask = None if causal else site.emit_mask(graph, explicit_causal=True)
    if mask is not None:
        have, want = tensor_of(mask), tensor_of(query)
        assert have is not None and want is not None
        if have.dtype not in (torch.bool, want.dtype):
            mask = emit(graph, aten.to.dtype, (mask, want.dtype))
    out = emit(
        graph,
        aten.scaled_dot_product_attention.default,
        (query, key, value, mask, 0.0, causal),
        {"scale": site.scale},
    )
    rows = emit(graph, aten.transpose.int, (_rows(graph, found.value), 1, 2))
    return site.emit_output(graph, emit(graph, aten.matmul.default, (out, rows)))


def _rows(graph: Graph, expansion: _Expansion) -> Node:
    """The matrix of each head, ``[H, width, r]``."""
    shape = [expansion.heads, expansion.pitch, shape_of(expansion.weight)[1]]
    rows = emit(graph, aten.reshape.default, (expansion.weight, shape))
    return emit(graph, aten.slice.Tensor, (rows, 1, expansion.start, expansion.start + expansion.width))


def _latent(graph: Graph, expansion: _Expansion) -> Node:
    """The latent as ``[B, 1, T, r]``."""
    if len(shape_of(expansion.latent)) == 4:
        return expansion.latent
    return emit(graph, aten.unsqueeze.default, (expansion.latent, 1))


def _one_head(part: Node) -> Node:
    """A part that is the same for all heads, as one head; raises ``LayoutError`` for others."""
    while op_name(part) == "expand" and isinstance(part.args[0], Node):
        part = part.args[0]
    if len(shape_of(part)) != 4 or not known_equal(shape_of(part)[1], 1):
        raise LayoutError(f"{part.name} differs between heads")
    return part

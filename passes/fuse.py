"""Turn attention over decoded caches into ``kvq::attention`` on the stores."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from kvq_ops.formats import get_format

from .attention import AttentionSite, scan
from .attention_effects import written
from .attention_site import Operand
from .attention_space import Sizes, Var, aten, emit
from .layout_sizes import LayoutError, Size, known_equal
from .split_keys import add_to_mask, emit_exact_scores, split_keys

__all__ = ["SiteResult", "decoded_elsewhere", "fuse"]

kvq = torch.ops.kvq


class Left(Exception):
    """A site that stays as it is; carries the node that stood in the way and the reason."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


@dataclass
class SiteResult:
    """What became of one attention.

    Attributes:
        anchor: name of its softmax or SDPA node.
        module: path of the module it came from, where known.
        rewritten: whether it reads codes now.
        node, reason: for one that was left, the first node in the way and why.
        formats: of keys and values, for one that was rewritten.
    """

    anchor: str
    module: str
    rewritten: bool
    node: str = ""
    reason: str = ""
    formats: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class _Read:
    """A store as an attention reads it: its decoding node, planes (cut to what is read), format, and what was cut."""

    decode: Node
    planes: list[Node]
    format: str


def fuse(graph_module: GraphModule, constants: Mapping[str, Tensor] | None = None) -> list[SiteResult]:
    """Rewrite every site of ``graph_module`` that reads decoded caches, in place; one result for each site found."""
    graph = graph_module.graph
    sites, misses = scan(graph_module, constants)
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = _plane_writes(graph)
    results = {
        miss.anchor: SiteResult(
            miss.anchor.name, module_path(miss.anchor), False, miss.node.name, miss.reason
        )
        for miss in misses
        if miss.likely
    }
    for site in sites:
        try:
            results[site.anchor] = _fuse_site(graph, site, order, writes)
        except Left as left:
            results[site.anchor] = SiteResult(
                site.anchor.name, module_path(site.anchor), False, left.node.name, left.reason
            )
        except LayoutError as error:
            results[site.anchor] = SiteResult(
                site.anchor.name, module_path(site.anchor), False, site.output.name, str(error)
            )
    _size_from_planes(graph)
    graph.eliminate_dead_code()
    graph.lint()
    graph_module.recompile()
    return [results[anchor] for anchor in sorted(results, key=order.__getitem__)]


def decoded_elsewhere(graph_module: GraphModule, sites: Sequence[SiteResult]) -> list[str]:
    """What reads a whole decoded cache and belongs to none of ``sites``, after :func:`fuse`: right, but not what one asked for.

    A spelling of attention that no anchor is found in (weights by ``sigmoid``, a softmax made of ``exp`` and ``sum``) shows here.
    """
    nodes = {node.name: node for node in graph_module.graph.nodes}
    left = [nodes[site.anchor] for site in sites if not site.rewritten and site.anchor in nodes]
    before = {node for anchor in left for node in _reached(anchor, lambda node: node.all_input_nodes)}
    after = {node for anchor in left for node in _reached(anchor, lambda node: node.users)}
    notes = []
    for decode in graph_module.graph.find_nodes(op="call_function", target=kvq.dequantize.default):
        readers = [user for user in decode.users if user not in after]
        if decode not in before and readers:
            name = decode.args[0][0].name.removesuffix("_" + get_format(decode.args[1]).planes[0].name)
            where = module_path(readers[0])
            notes.append(
                f"cache {name} is decoded whole for {readers[0].name}{' in ' + where if where else ''}, "
                "which is part of no attention that was found"
            )
    return notes


def _reached(start: Node, step: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found, waiting = {start}, [start]
    while waiting:
        for node in step(waiting.pop()):
            if node not in found:
                found.add(node)
                waiting.append(node)
    return found


def _size_from_planes(graph: Graph) -> None:
    """Take sizes of decoded caches from their codes, so that nothing is decoded to be measured."""
    for node in list(graph.nodes):
        if node.target is not aten.sym_size.int or len(node.args) != 2:
            continue
        source, dim = node.args
        if isinstance(source, Node) and source.target is kvq.dequantize.default and dim in (0, 1, 2):
            node.args = (source.args[0][0], dim)  # type: ignore[index]


def module_path(node: Node) -> str:
    """Path of the innermost module that ``node`` came from, or an empty string."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return str(path).removeprefix("L['self'].").removeprefix("L['self']")


def _plane_writes(graph: Graph) -> dict[Node, list[Node]]:
    """For each plane, the nodes that write into it."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for plane in written(node):
            found.setdefault(plane, []).append(node)
    return found


def _fuse_site(
    graph: Graph, site: AttentionSite, order: dict[Node, int], writes: dict[Node, list[Node]]
) -> SiteResult:
    def settled(*decodes: Node) -> None:
        """What is read must still be what the cache holds where the attention runs."""
        for decode in decodes:
            for plane in decode.args[0]:  # type: ignore[union-attr]
                for write in writes.get(plane, ()):  # type: ignore[arg-type]
                    if order[decode] < order[write] < order[site.output]:
                        raise Left(write, "writes into the cache between its read and the attention")

    # Where the insertion point lies decides which nodes are in reach: everything before the output is.
    with graph.inserting_before(site.output):
        out, formats = _stored_attention(graph, site, settled)
        new = site.emit_output(graph, out)
    result = SiteResult(site.anchor.name, module_path(site.anchor), True, formats=formats)
    site.replace(graph, new)
    return result


def _stored_attention(
    graph: Graph, site: AttentionSite, settled: Callable[..., None]
) -> tuple[Node, tuple[str, str]]:
    """Attention over stores of keys and values, ``[B, Hq, Tq, Dv]``."""
    split = split_keys(site.key)
    if split is not None and site.softcap:
        raise Left(site.key.source, "joins the keys along their channels, under a softcap on the whole score")
    keys = site.key if split is None else split.cached
    key_decode, value_decode = _decoding(keys, "keys"), _decoding(site.value, "values")
    settled(key_decode, value_decode)
    sizes = site._sizes(graph)
    key, key_channels = _read(graph, sizes, site, keys, key_decode)
    value, value_channels = _read(graph, sizes, site, site.value, value_decode, is_value=True)
    if not _whole(keys, key_channels):
        raise Left(keys.node, "reads a part of the channels of the keys, which share codes or scales")
    query, mask = site.emit_query(graph), site.emit_mask(graph)
    if split is not None:
        mask = add_to_mask(graph, emit_exact_scores(graph, site, split, query), mask)
        stop = sizes.value(split.start + split.width)
        query = emit(graph, aten.slice.Tensor, (query, 3, sizes.value(split.start), stop))
    out = _attention(graph, site, query, key, value, mask)
    if not _whole(site.value, value_channels):
        # Each output channel depends on its own channel of the values alone (a latent, say, read in part).
        start, length = value_channels
        out = emit(graph, aten.slice.Tensor, (out, 3, sizes.value(start), sizes.value(start + length)))
    return out, (key.format, value.format)


def _attention(
    graph: Graph, site: AttentionSite, query: Node, key: _Read, value: _Read, mask: Node | None
) -> Node:
    return emit(
        graph,
        kvq.attention.default,
        (query, key.planes, value.planes, key.format, value.format),
        {
            "mask": mask,
            "causal": site.causal and site.is_square,
            "scale": site.scale,
            "softcap": site.softcap,
            "sinks": site.emit_sinks(graph),
            # A dense cache counts every allocated token unless the mask says otherwise; so does this.
            "use_length": False,
        },
    )


def _decoding(operand: Operand, what: str) -> Node:
    source = operand.source
    if source.target is not kvq.dequantize.default:
        why = operand.stopped or f"{what} come from here, which is no quantized cache"
        raise Left(source, why)
    return source


def _whole(operand: Operand, channels: tuple[Size, Size]) -> bool:
    return known_equal(channels[0], 0) and known_equal(channels[1], operand.layout.source_shape[3])


def _read(
    graph: Graph,
    sizes: Sizes,
    site: AttentionSite,
    operand: Operand,
    decode: Node,
    *,
    is_value: bool = False,
) -> tuple[_Read, tuple[Size, Size]]:
    """The planes behind ``operand``, cut to the rows, heads and tokens that are read, and which channels are read."""
    planes: Sequence[Node] = decode.args[0]  # type: ignore[assignment]
    format_name: str = decode.args[1]  # type: ignore[assignment]
    cuts: list[tuple[int, Size, Size]] = []
    for axis, role in enumerate(("batch", "head", "token", "channel")):
        if operand.roles[axis] == "fixed":
            cuts.append((axis, operand.layout.starts[axis], 1))
            continue
        if operand.roles[axis] != role:
            raise Left(operand.node, f"reads axis {axis} ({role}) of the cache as {operand.roles[axis]}")
        span = operand.layout.span(axis)
        digits = site.roles["value" if is_value and role == "channel" else role]
        if span is None or not _in_order(operand.dims[axis], digits):
            raise Left(operand.node, f"reads the {role}s of the cache in another order")
        cuts.append((axis, *span))
    _, *channels = cuts.pop()
    cut_planes = list(planes)
    windowed = get_format(format_name).windowed
    for axis, start, length in cuts:
        if known_equal(start, 0) and known_equal(length, operand.layout.source_shape[axis]):
            continue
        if windowed and axis == 2 and not known_equal(start, 0):
            raise Left(
                operand.node,
                f"reads tokens from {start} on; format {format_name!r} keeps a window whose place counts from token 0",
            )
        cut_planes = [
            _cut_plane(graph, sizes, p, format_name, i, axis, start, length) for i, p in enumerate(cut_planes)
        ]
    return _Read(decode, cut_planes, format_name), (channels[0], channels[1])


def _in_order(dim: Sequence[Var], digits: Sequence[Var]) -> bool:
    """Whether an axis runs through its digits as the query and the result do."""
    mine = [var for var in dim if not known_equal(var.size, 1)]
    return not set(mine) <= set(digits) or mine == [var for var in digits if not known_equal(var.size, 1)]


def _cut_plane(
    graph: Graph,
    sizes: Sizes,
    plane: Node,
    format_name: str,
    index: int,
    axis: int,
    start: Size,
    length: Size,
) -> Node:
    row = get_format(format_name).planes[index]
    at = row.axes.find("BHTD"[axis])
    if at < 0:
        return plane
    stop: Any = sizes.value(start + length)
    if axis == 2 and row.tokens > 1:
        # Only cut from token 0; a group that is cut through keeps its scale.
        last = row.tokens - 1
        if isinstance(stop, int):
            stop = (stop + last) // row.tokens
        else:
            stop = emit(graph, operator.floordiv, (emit(graph, operator.add, (stop, last)), row.tokens))
    return emit(graph, aten.slice.Tensor, (plane, at, sizes.value(start), stop))

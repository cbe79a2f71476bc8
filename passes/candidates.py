"""Find which inputs of a captured graph attention reads keys and values from, from the dataflow alone.

From the keys and values of every attention site the walk goes back, through views and through whatever keeps codes apart
(in-place and functional writes of tokens, cat, roll, index_select, ...), to the input that holds them. The contractions of the
site say which axis counts what, so equal sizes are never confused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from .attention import scan
from .attention_effects import Effects, written
from .attention_site import Operand
from .fuse import module_path
from .layout import Layout, trace_layout
from .layout_nodes import op_name, shape_of, tensor_of, words
from .layout_sizes import Size, known_equal

__all__ = ["Candidate", "Found", "Layer", "find_candidates", "reads_cache"]

_KEEPS_TOKENS = words(
    "index_copy_ index_copy index_put_ _index_put_impl_ index_put copy_ slice_scatter select_scatter zero_ fill_ "
    "roll index_select index flip"
)
"""Operations on whole tokens: a cache in their first argument is still that cache in their result."""

_LETTERS = {"batch": "b", "head": "h", "token": "t", "channel": "d"}

Slot = tuple[int, ...]


@dataclass
class Candidate:
    """An input that attention reads keys or values from.

    Attributes:
        node: the placeholder.
        axes: what its axes count, as ``kvq_ops.axes`` spells it; ``l`` for axes of which a site reads one index (layers, or keys
            and values, in one tensor).
        sites: names of the softmax or SDPA nodes that read it.
        keys, values: the layer that reads each index along the ``l`` axes as keys and as values; the index is ``()`` where there
            are no such axes. A latent is in both.
        changes: whether the graph writes into it or returns it, in whatever way.
    """

    node: Node
    axes: str
    sites: list[str] = field(default_factory=list)
    keys: dict[Slot, int] = field(default_factory=dict)
    values: dict[Slot, int] = field(default_factory=dict)
    changes: bool = False


@dataclass(frozen=True)
class Layer:
    """One attention that reads a cache which no attention before it reads.

    Attributes:
        anchor: name of its softmax or SDPA node.
        module: path of the module it came from, where known.
    """

    anchor: str
    module: str


@dataclass(frozen=True)
class Found:
    """Candidates in graph order, the layers they belong to, and for each site that reads none the node and reason."""

    candidates: list[Candidate]
    layers: list[Layer]
    reasons: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class _Walk:
    node: Node
    roles: tuple[str, ...] = ()
    reason: str = ""
    starts: tuple[Size, ...] = ()
    name: str = ""

    def slot(self, axes: str) -> Slot | None:
        """Which cache of a stack is read, ``()`` where there is one."""
        index = [at for at, letter in zip(self.starts, axes, strict=True) if letter == "l"]
        return tuple(int(at) for at in index) if all(isinstance(at, int) for at in index) else None


def find_candidates(captured: GraphModule, constants: Mapping[str, Tensor] | None = None) -> Found:
    """Inputs that attention reads, layers in the order of their attention."""
    sites, misses = scan(captured, constants)
    found: dict[Node, Candidate] = {}
    reasons = {miss.anchor.name: (miss.node.name, miss.reason) for miss in misses if miss.likely}
    layers: list[Layer] = []
    for site in sites:
        slots: list[tuple[Candidate, Slot, bool]] = []
        for operand, is_key in ((site.key, True), (site.value, False)):
            walk = _origin(operand)
            axes = _axes_of(walk) if not walk.reason else ""
            slot = walk.slot(axes) if axes else None
            reason = walk.reason or ("" if axes else f"has axes {'/'.join(walk.roles)}, which no store has")
            if axes and slot is None:
                reason = "is read at an index that is not known"
            if walk.node in found and found[walk.node].axes != axes and not reason:
                reason = f"is read as {found[walk.node].axes} elsewhere and as {axes} here"
            if reason:
                reasons.setdefault(site.anchor.name, (walk.name or walk.node.name, reason))
                continue
            assert slot is not None
            candidate = found.setdefault(walk.node, Candidate(walk.node, axes))
            if site.anchor.name not in candidate.sites:
                candidate.sites.append(site.anchor.name)
            slots.append((candidate, slot, is_key))
        new = [(c, slot, is_key) for c, slot, is_key in slots if slot not in (c.keys if is_key else c.values)]
        for candidate, slot, is_key in new:
            (candidate.keys if is_key else candidate.values)[slot] = len(layers)
        if new:
            layers.append(Layer(site.anchor.name, module_path(site.anchor)))
    effects = Effects(captured.graph)
    returned = _returned(captured)
    for candidate in found.values():
        candidate.changes = bool(effects.writes.get(candidate.node)) or candidate.node in returned
    ordered = sorted(found.values(), key=lambda c: effects.order[c.node])
    return Found(ordered, layers, reasons)


def _returned(captured: GraphModule) -> set[Node]:
    """Inputs that come back as outputs, as they are or with tokens written."""
    (output,) = (node for node in captured.graph.nodes if node.op == "output")
    origins = (_input_of(one) for one in pytree.tree_leaves(output.args) if isinstance(one, Node))
    return {node for node in origins if node is not None}


def _origin(operand: Operand) -> _Walk:
    """Walk from an operand's source to a placeholder, keeping track of what its axes count."""
    node, roles, starts = operand.source, operand.roles, operand.layout.starts
    if operand.stopped:
        return _stopped(node, roles, operand.stopped)
    for _ in range(10_000):
        if node.op == "placeholder":
            return _Walk(node, roles, starts=starts)
        base = _base(node, roles)
        if base is None and written(node):
            return _Walk(node, roles, "writes into the cache in a way that codes cannot follow")
        if base is None:
            return _Walk(node, roles, "is computed here and not read from a cache")
        trace = trace_layout(base)
        if trace.stopped:
            return _stopped(trace.source, roles, trace.stopped)
        carried = _carry(roles, starts, trace.layout)
        if carried is None:
            return _Walk(base, roles, "is a view of the cache that mixes its axes")
        node, (roles, starts) = trace.source, carried
    return _Walk(node, roles, "is too far from its cache")


def _stopped(node: Node, roles: tuple[str, ...], why: str) -> _Walk:
    """For a walk that a view ended; ``why`` starts with the name of that view."""
    name, _, reason = why.partition(" ")
    return _Walk(node, roles, reason, name=name)


def _base(node: Node, roles: Sequence[str] = ()) -> Node | None:
    """The argument of ``node`` in which a cache would be carried through.

    Of parts joined along the channels it is the widest: a latent, beside which the rotary part of the keys is narrow.
    """
    name = op_name(node)
    if name in _KEEPS_TOKENS and isinstance(node.args[0], Node):
        return node.args[0]
    if name not in ("cat", "concat", "concatenate"):
        return None
    parts = node.args[0]
    caches = [one for one in parts if isinstance(one, Node) and _input_of(one) is not None]  # type: ignore[union-attr]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not caches or not isinstance(dim, int):
        return None
    if roles and roles[dim] == "channel":
        widths = [shape_of(one)[dim] for one in caches]
        if all(isinstance(width, int) for width in widths):
            return max(caches, key=lambda one: int(shape_of(one)[dim]))
    return caches[0]


def reads_cache(node: Node) -> bool:
    """Whether ``node`` is a view of an input into which the graph writes tokens."""
    base = _base(trace_layout(node).source)
    return base is not None and _input_of(base) is not None


def _input_of(node: Node) -> Node | None:
    """The input whose tokens ``node`` holds, if it looks like a cache."""
    for _ in range(10_000):
        value = tensor_of(node)
        if value is None:
            return None
        node = trace_layout(node).source
        if node.op == "placeholder":
            value = tensor_of(node)
            return node if value is not None and value.dim() >= 3 else None
        base = _base(node)
        if base is None:
            return None
        node = base
    return None


def _carry(
    roles: Sequence[str], starts: Sequence[Size], layout: Layout
) -> tuple[tuple[str, ...], tuple[Size, ...]] | None:
    """Roles of the source's axes and where reading starts on them, given those of a view's axes."""
    carried: list[str] = ["fixed"] * len(layout.source_shape)
    begin = list(layout.starts)
    for dim, (role, start) in enumerate(zip(roles, starts, strict=True)):
        moving = [atom for atom in layout.dims[dim] if not known_equal(atom.size, 1)]
        atoms = moving or [atom for atom in layout.dims[dim] if atom.axis is not None]
        if not atoms:
            continue
        axis = atoms[0].axis
        if axis is None or any(atom.axis != axis for atom in atoms):
            return None
        if carried[axis] != "fixed" or (role == "fixed" and len(atoms) > 1):
            return None
        carried[axis] = role
        if role == "fixed":
            begin[axis] = begin[axis] + start * atoms[0].stride
    return tuple(carried), tuple(begin)


def _axes_of(walk: _Walk) -> str:
    """The axes string of a placeholder with these roles, or an empty string if stores cannot have them."""
    shape = tensor_of(walk.node).shape  # type: ignore[union-attr]
    letters = [_LETTERS.get(role, "?") for role in walk.roles]
    for axis, role in enumerate(walk.roles):
        if role == "fixed":
            missing = [one for one in "bh" if one not in letters]
            letters[axis] = "l" if not known_equal(shape[axis], 1) else (missing[0] if missing else "1")
    if "?" in letters or "d" not in letters or "t" not in letters:
        return ""
    return "".join(letters)

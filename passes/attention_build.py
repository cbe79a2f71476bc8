"""From contractions and score steps to an ``AttentionSite``: which digit of which dim is batch, head, group, token, channel.

Nothing is read off equal sizes.  What the keys depend on is batch or kv head, what only the queries depend on is group
or query token, what the softmax runs over is the key token, what the first product sums is the channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch.fx import Node

from .attention_algebra import read_steps
from .attention_effects import late_write, written
from .attention_operands import Place, Reading, place_vars, reading, source_dims
from .attention_scores import Blocked, Contraction, ScoreWalker, Step
from .attention_site import AttentionSite, Operand, Term
from .attention_space import Dims, Space, Var, refine
from .layout import Atom, Layout, apply_movement, movement_input, trace_layout
from .layout_nodes import shape_of
from .layout_sizes import LayoutError, Size, known_equal, must_agree, product


class Builder:
    """Builds one site from two contractions and the steps between them."""

    def __init__(
        self,
        walker: ScoreWalker,
        first: Contraction,
        steps: Sequence[Step],
        last: Contraction,
        probabilities: Node,
        anchor: Node,
        interior: Iterable[Node],
    ) -> None:
        self.walker = walker
        self.first, self.last, self.anchor = first, last, anchor
        self.probabilities = probabilities
        self.interior = set(interior)
        self.scores = read_steps(first, steps)
        self.space = Space()
        self.repeats: dict[str, Size] = {}
        self.value_repeats: dict[str, Size] = {}
        self.causal = False
        self.extra_terms: list[Term] = []

    def build(self) -> AttentionSite:
        """The site.  Raises ``Blocked`` if the parts are no attention that can be stated exactly."""
        try:
            return self._build()
        except LayoutError as error:
            raise Blocked(self.anchor, str(error)) from None

    def _build(self) -> AttentionSite:
        constants = self.walker.constants
        first, last = self.first, self.last
        self._check_scores()
        token = self._token_label()
        sides = [(first.left, first.left_labels), (first.right, first.right_labels)]
        holds = [token in labels for _, labels in sides]
        if all(holds):
            raise Blocked(self.anchor, "runs over a dim that query and key share, not over the keys")
        key_side, query_side = sides[holds.index(True)], sides[holds.index(False)]
        value_node, value_labels, p_labels = last.other(self.probabilities)
        self._add_labels(first)
        self.p_dims = self._label_dims(p_labels)
        key = reading(*key_side, first.node, constants, repeats=self.repeats)
        value = reading(
            value_node, value_labels, last.node, constants, is_value=True, repeats=self.value_repeats
        )
        query = reading(*query_side, first.node, constants)
        self._check_value_labels(value, p_labels, token)
        layouts = [layout for _, layout in self.scores.pending] + [
            layout for _, layout, _, _ in self.scores.factors
        ]
        layouts += [self.scores.sinks[1]] if self.scores.sinks is not None else []
        for layout in layouts:
            self._layout_cuts(layout)
        for operand, part in ((key, self._key_cuts), (value, self._value_cuts), (query, self._query_cuts)):
            self._cut(operand, lambda part=part, operand=operand: part(operand, token))  # type: ignore[misc]
        return self._assemble(token, query, key, value)

    # ---- labels and cuts

    def _check_scores(self) -> None:
        layout = self.scores.layout
        for dim in layout.dims:
            for atom in dim:
                if atom.axis is None:
                    raise Blocked(self.probabilities, "repeats the scores")
        for axis in range(len(layout.source_shape)):
            if not layout.is_full(axis):
                raise Blocked(self.probabilities, "holds only a part of the scores")

    def _token_label(self) -> str:
        layout = self.scores.softmax_layout
        assert layout is not None
        atoms = layout.dims[self.scores.softmax_dim]
        real = [a for a in atoms if not known_equal(a.size, 1)] or list(atoms[:1])
        if (
            len(real) != 1
            or real[0].axis is None
            or not known_equal(real[0].size, layout.source_shape[real[0].axis])
        ):
            raise Blocked(self.anchor, "does not run over exactly one dim of the query-key product")
        return self.first.out[real[0].axis]

    def _add_labels(self, first: Contraction) -> None:
        for node, labels in ((first.left, first.left_labels), (first.right, first.right_labels)):
            for label, size in zip(labels, shape_of(node), strict=True):
                if label not in self.space.sizes or known_equal(self.space.total(label), 1):
                    self.space.sizes[label] = [size]
        for label, size in zip(first.out, first.shape, strict=True):
            self.space.sizes[label] = [size]

    def _label_dims(self, labels: Sequence[str]) -> dict[str, tuple[Atom, ...]]:
        """Atoms of the probabilities over the first product, for each label of the second."""
        return dict(zip(labels, self.scores.layout.dims, strict=True))

    def _check_value_labels(self, value: Reading, p_labels: Sequence[str], token: str) -> None:
        axis = self.first.out.index(token)
        own = [label for label, atoms in self.p_dims.items() if any(a.axis == axis for a in atoms)]
        self.value_token = own[0]
        summed = [label for label in p_labels if label not in self.last.out]
        if summed != own or own[0] not in value.labels:
            raise Blocked(self.last.node, "does not sum over the keys alone")
        if len([a for a in self.p_dims[own[0]] if not known_equal(a.size, 1)]) > 1:
            raise Blocked(self.probabilities, "merges the keys with another dim")
        self.channels = [label for label in value.labels if label not in p_labels]
        if any(label not in self.last.out for label in self.channels) or not self.channels:
            raise Blocked(self.last.node, "has values without a channel dim")
        for label, size in zip(value.labels, value.trace.layout.shape, strict=True):
            if label in self.channels:
                self.space.add("value." + label, size)
            elif not known_equal(size, 1) and not known_equal(
                size, product(a.size for a in self.p_dims[label])
            ):
                raise Blocked(
                    self.last.node, f"needs values of size {size} where the probabilities have another"
                )
        for label in p_labels:
            out = shape_of(self.last.node)[self.last.out.index(label)] if label in self.last.out else None
            if out is not None and not known_equal(out, product(a.size for a in self.p_dims[label])):
                raise Blocked(self.last.node, "repeats the probabilities over the values")

    def _cut(self, operand: Reading, cuts: Callable[[], None]) -> None:
        saved = {label: list(sizes) for label, sizes in self.space.sizes.items()}
        try:
            cuts()
        except LayoutError as error:
            self.space.sizes = saved
            operand.stay(str(error))
            try:
                cuts()
            except LayoutError as second:
                raise Blocked(operand.node, str(second)) from None

    def _key_cuts(self, key: Reading, token: str) -> None:
        for label in key.labels:
            atoms = key.atoms(label, self.space.total(label))
            if atoms is None:
                continue
            if label == token:
                self._one_token_atom(atoms)
            self.space.cut(label, [a.size for a in atoms])

    @staticmethod
    def _one_token_atom(atoms: Sequence[Atom]) -> None:
        real = [a for a in atoms if not known_equal(a.size, 1)]
        if len(real) > 1 or any(a.axis is None for a in real):
            raise LayoutError("spreads the tokens over several axes of its source")

    def _query_cuts(self, query: Reading, token: str) -> None:
        for label in query.labels:
            atoms = query.atoms(label, self.space.total(label))
            if atoms is not None:
                self.space.cut(label, [a.size for a in atoms])

    def _layout_cuts(self, layout: Layout) -> None:
        for atom in (a for dim in layout.dims for a in dim):
            assert atom.axis is not None
            self.space.cut(self.first.out[atom.axis], [atom.size], atom.stride)

    def _value_cuts(self, value: Reading, token: str) -> None:
        self._layout_cuts(self.scores.layout)
        for label in value.labels:
            if label in self.channels:
                self.space.cut(
                    "value." + label, [a.size for a in value.trace.layout.dims[value.labels.index(label)]]
                )
                continue
            over = self.p_dims[label]
            atoms = value.atoms(label, product(a.size for a in over))
            if atoms is None:
                continue
            if label == self.value_token:
                self._one_token_atom(atoms)
            pieces = refine([a.size for a in over], [a.size for a in atoms])
            for atom in reversed([a for a in over if not known_equal(a.size, 1)]):
                own: list[Size] = []
                while not known_equal(product(own), atom.size):
                    own.insert(0, pieces.pop())
                assert atom.axis is not None
                self.space.cut(self.first.out[atom.axis], own, atom.stride)

    # ---- vars and roles

    def _vars_of(self, atoms: Sequence[Atom]) -> tuple[Var, ...]:
        """Vars of a dim described over the first product."""
        found: list[Var] = []
        for atom in atoms:
            assert atom.axis is not None
            found += self.space.run(self.first.out[atom.axis], atom.size, atom.stride)
        return tuple(found)

    def _operand_place(self, operand: Reading) -> dict[Var, Place | None]:
        place: dict[Var, Place | None] = {}
        for label in operand.labels:
            if operand.is_value and label in self.channels:
                vars_ = self.space.vars("value." + label)
            elif operand.is_value:
                vars_ = self._vars_of(self.p_dims[label])
            else:
                vars_ = self.space.vars(label)
            atoms = operand.atoms(label, product(v.size for v in vars_))
            place |= dict.fromkeys(vars_) if atoms is None else place_vars(vars_, atoms)
        return place

    def _assemble(self, token: str, query: Reading, key: Reading, value: Reading) -> AttentionSite:
        places: list[dict[Var, Place | None]] = []
        dims: list[Dims] = []
        for operand in (query, key, value):
            place = self._operand_place(operand)
            found = source_dims(operand.trace.layout, place)
            if found is None:
                operand.stay("reads its source in steps that are not one range")
                place = self._operand_place(operand)
                found = source_dims(operand.trace.layout, place)
            assert found is not None
            places.append(place)
            dims.append(found)
        roles = self._roles(token, places, value, dims)
        operands = [
            self._operand(reading, found, roles)
            for reading, found in zip((query, key, value), dims, strict=True)
        ]
        terms = [
            replace(term, dims=self._term_dims(term.node, layout, term.used_by))
            for term, layout in self.scores.pending
        ]
        factors = []
        for node, layout, exponent, by in self.scores.factors:
            shape = self._term_dims(node, layout, by)
            if any(var in roles["token"] for dim in shape for var in dim):
                raise Blocked(by, "multiplies the scores by a tensor that varies along the keys")
            factors.append((node, shape, exponent))
        sinks, sink_dims = self._sinks(roles)
        scale = self.scores.scale * query.trace.scale * key.trace.scale
        cap = 0.0
        if self.scores.outer is not None:
            scale *= self.scores.outer
            cap = abs(self.scores.outer)
            if not (cap > 0 and math.isfinite(cap)):
                raise Blocked(self.anchor, f"caps the scores at {cap}")
        out_dims: list[tuple[Var, ...]] = [
            self.space.vars("value." + label) if label in self.channels else self._vars_of(self.p_dims[label])
            for label in self.last.out
        ]
        order = self.walker.effects.order
        site = AttentionSite(
            anchor=self.anchor,
            output=self.last.node,
            query=operands[0],
            key=operands[1],
            value=operands[2],
            scale=scale,
            causal=self.causal,
            terms=[*terms, *self.extra_terms],
            softcap=cap,
            sinks=sinks,
            sink_dims=sink_dims,
            factors=factors,
            softmax_dtype=self.scores.dtype,
            roles=roles,
            out_dims=tuple(out_dims),
            interior=tuple(sorted(self.interior, key=order.__getitem__, reverse=True)),
        )
        late = late_write(self.walker.effects, site)
        if late is not None:
            raise Blocked(
                late, f"writes into {', '.join(n.name for n in written(late))} before the attention ends"
            )
        return site

    def _operand(self, reading: Reading, dims: Dims, roles: dict[str, tuple[Var, ...]]) -> Operand:
        names = {var: role for role, vars_ in roles.items() for var in vars_}
        short = {"value": "channel", "query": "token"} if reading.is_value else {"query": "token"}
        axes: list[str] = []
        counted = {names[var] for dim in dims for var in dim}
        for dim, size in zip(dims, reading.trace.layout.source_shape, strict=True):
            found = list(dict.fromkeys(short.get(names[var], names[var]) for var in dim))
            if not found:
                # An axis of size 1 stands for the batch or the head that no digit counts.
                spare = [role for role in ("batch", "head") if role not in counted and known_equal(size, 1)]
                found = spare[:1] or ["fixed"]
                counted.update(found)
            axes.append("+".join(found))
        trace = reading.trace
        return Operand(
            reading.node,
            trace.source,
            trace.layout,
            trace.path,
            trace.casts,
            trace.stopped,
            tuple(axes),
            dims,
            reading.by,
        )

    def _roles(
        self, token: str, places: list[dict[Var, Place | None]], value: Reading, dims: list[Dims]
    ) -> dict[str, tuple[Var, ...]]:
        query, key, values = places
        key_tokens = self.space.vars(token)
        scored = [var for label in self.first.out if label != token for var in self.space.vars(label)]
        summed = [label for label in self.first.left_labels if label not in self.first.out]
        shared: list[Var] = []
        alone: list[Var] = []
        for var in scored:
            unit = known_equal(var.size, 1)
            in_key, in_value = key.get(var) is not None, values.get(var) is not None
            if in_key != in_value and not unit:
                raise Blocked(self.last.node, "repeats keys and values differently over the heads")
            (shared if in_key or in_value else alone).append(var)
        batch, heads = self._split_shared(shared, dims[1])
        group, rows = self._split_alone(alone, query, heads, summed)
        return {
            "batch": batch,
            "head": heads,
            "group": group,
            "query": rows,
            "token": key_tokens,
            "channel": tuple(var for label in summed for var in self.space.vars(label)),
            "value": tuple(var for label in self.channels for var in self.space.vars("value." + label)),
        }

    def _split_shared(self, shared: list[Var], key_dims: Dims) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
        """What keys depend on: the axis that comes first in the source is the batch, the last the heads."""
        position = {var: (axis, at) for axis, dim in enumerate(key_dims) for at, var in enumerate(dim)}
        ordered = sorted(shared, key=lambda var: position.get(var, (-1, 0)))
        axes = list(dict.fromkeys(position.get(var, (-1, 0))[0] for var in ordered))
        if len(axes) > 1:
            last = axes[-1]
        elif len(ordered) > 1 and axes:
            return tuple(ordered[:-1]), tuple(ordered[-1:])
        elif ordered and any(not dim for dim in key_dims[: axes[0]]):
            last = axes[0]  # an outer axis is read at one index, as a batch of one is
        else:
            return tuple(ordered), ()
        heads = tuple(var for var in ordered if position.get(var, (-1, 0))[0] == last)
        return tuple(var for var in ordered if var not in heads), heads

    def _split_alone(
        self, alone: list[Var], query: dict[Var, Place | None], heads: tuple[Var, ...], summed: list[str]
    ) -> tuple[tuple[Var, ...], tuple[Var, ...]]:
        """What only queries depend on: repetitions of a key dim are the group, the rest is told apart by its neighbours.

        A digit that the query's source or the output keeps on one axis with the channel or a kv head is a head.
        """
        key_labels = self.first.right_labels if self._key_is_right() else self.first.left_labels
        query_labels = self.first.left_labels if self._key_is_right() else self.first.right_labels
        batch_labels = set(key_labels) | set(self.first.out) - set(query_labels)
        # A leading dim of a broadcasting product is a repetition even where the keys lack it.
        lead = {label for label in self.first.out if label.startswith(("b", ".")) and len(label) > 1}
        group = [var for var in alone if var.label in batch_labels or var.label in lead]
        free = [var for var in alone if var not in group]
        if self.first.sizes is not None:
            return tuple(group), tuple(free)  # a fused operation says which dim counts query tokens
        channels = [var for label in summed for var in self.space.vars(label)]
        anchors = {place[0] for var in (*heads, *channels) if (place := query.get(var)) is not None}
        beside = [var for var in free if (place := query.get(var)) is not None and place[0] in anchors]
        grouped = beside if len(beside) < len(free) or len(free) == 1 else []
        if not grouped and len(free) > 1:
            merged = self._merged_with_channel()
            grouped = [var for var in free if var in merged]
            if len(grouped) in (0, len(free)):
                grouped = free[:-1]
        return (
            tuple(var for var in alone if var in group or var in grouped),
            tuple(var for var in free if var not in grouped),
        )

    def _key_is_right(self) -> bool:
        assert self.scores.softmax_layout is not None
        return self._token_label() in self.first.right_labels

    def _merged_with_channel(self) -> set[Var]:
        """Digits that the model merges with the value channel after the attention."""
        node = self.last.node
        layout = Layout.identity(shape_of(node))
        while len(users := self.walker.users(node)) == 1 and movement_input(users[0]) is node:
            try:
                layout = apply_movement(layout, users[0])
            except LayoutError:
                break
            node = users[0]
        channel_axes = {self.last.out.index(label) for label in self.channels}
        found: set[Var] = set()
        for dim in layout.dims:
            if not any(atom.axis in channel_axes for atom in dim):
                continue
            for atom in dim:
                if atom.axis is None or atom.axis in channel_axes:
                    continue
                for piece in self._pieces(self.p_dims[self.last.out[atom.axis]], atom):
                    found.add(piece)
        return found

    def _pieces(self, over: Sequence[Atom], atom: Atom) -> list[Var]:
        stride: Size = 1
        found: list[Var] = []
        for var in reversed(self._vars_of(over)):
            if known_equal(stride, atom.stride) or (
                found and not known_equal(product(v.size for v in found), atom.size)
            ):
                found.append(var)
            stride = stride * var.size
        return found

    # ---- masks and sinks

    def _term_dims(self, node: Node, layout: Layout, by: Node) -> Dims:
        """Vars of each dim of a tensor that broadcasts against the scores in the given layout."""
        shape = shape_of(node)
        if len(shape) > len(layout.dims):
            raise Blocked(by, "has more dims than the scores")
        dims: list[tuple[Var, ...]] = []
        for size, atoms in zip(shape, layout.dims[len(layout.dims) - len(shape) :], strict=True):
            vars_ = self._vars_of(atoms)
            if known_equal(size, 1):
                dims.append(())
            elif must_agree(size, product(v.size for v in vars_)):
                dims.append(vars_)
            else:
                raise Blocked(by, f"has a dim of size {size} that does not provably broadcast to the scores")
        return tuple(dims)

    def _sinks(self, roles: dict[str, tuple[Var, ...]]) -> tuple[Node | None, Dims]:
        if self.scores.sinks is None:
            return None, ()
        node, layout, step = self.scores.sinks
        trace = trace_layout(node, constants=self.walker.constants)
        dims: list[tuple[Var, ...]] = []
        for position, atoms in enumerate(layout.dims):
            dims.append(() if position == step.dim else self._vars_of(atoms))
        heads = set(roles["head"]) | set(roles["group"])
        place: dict[Var, Place | None] = {}
        try:
            for vars_, atoms in zip(dims, trace.layout.dims, strict=True):
                place |= place_vars(vars_, atoms) if vars_ else {}
        except LayoutError as error:
            raise Blocked(step.node, f"has sinks that are no value per head: {error}") from None
        source = source_dims(trace.layout, place)
        used = {var for var, where in place.items() if where is not None and not known_equal(var.size, 1)}
        if (
            source is None
            or not used <= heads
            or not all(trace.layout.is_full(a) for a in range(len(source)))
        ):
            raise Blocked(step.node, "has sinks that are no value per head")
        return trace.source, source

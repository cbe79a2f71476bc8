"""Reading FX nodes of pre-dispatch ATen: names, bound arguments, shapes, constants."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from .layout_sizes import LayoutError, Size


def words(text: str) -> frozenset[str]:
    """A set of operator names, written as one string."""
    return frozenset(text.split())


def op_name(node: Any) -> str:
    """``"transpose"`` for a call of ``aten.transpose.int``, in-place forms keep their underscore, else ``""``."""
    if not isinstance(node, Node) or node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return str(node.target._schema.name).removeprefix("aten::")
    return "getitem" if node.target is operator.getitem else ""


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of an ATen call by their schema name, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args) and not argument.kwarg_only:
            bound[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def tensor_of(node: Any) -> Tensor | None:
    """The fake tensor a node stands for, or None if it is no tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def shape_of(node: Node) -> tuple[Size, ...]:
    value = tensor_of(node)
    if value is None:
        raise LayoutError(f"{node.name} carries no tensor metadata")
    return tuple(value.shape)


def size_value(value: Any) -> Size | None:
    """An int or SymInt argument, read through the node that computes it."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    return value if isinstance(value, (int, SymInt)) and not isinstance(value, bool) else None


_FOLDED: dict[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "true_divide": operator.truediv,
    "pow": operator.pow, "sqrt": math.sqrt, "rsqrt": lambda x: 1.0 / math.sqrt(x), "neg": operator.neg,
    "reciprocal": lambda x: 1.0 / x,
}  # fmt: skip
_SAME_VALUE = words(
    "to _to_copy lift_fresh lift_fresh_copy detach detach_ alias clone contiguous view reshape expand unsqueeze squeeze"
)


def constant_value(value: Any, constants: Mapping[str, Tensor] | None = None) -> float | None:
    """The number a scalar argument or a one-element constant tensor stands for, else None.

    ``constants`` gives values of placeholders (an ExportedProgram lifts its tensor constants to inputs).
    """
    if isinstance(value, (bool, torch.SymBool)):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, (SymInt, torch.SymFloat)):
        known = value.node.maybe_as_int() if isinstance(value, SymInt) else value.node.maybe_as_float()
        return None if known is None else float(known)
    if not isinstance(value, Node):
        return None
    fake = tensor_of(value)
    if fake is None:
        return constant_value(value.meta.get("val"))
    if fake.numel() != 1 or fake.dtype == torch.bool:
        return None
    if value.op == "get_attr":
        owner: Any = value.graph.owning_module
        for part in str(value.target).split("."):
            owner = getattr(owner, part, None)
        return _item(owner)
    if value.op == "placeholder":
        return _item(None if constants is None else constants.get(value.name))
    if any(
        op_name(user).endswith("_") and op_name(user) != "detach_" and user.args[:1] == (value,)
        for user in value.users
    ):
        return None
    name = op_name(value)
    if name in ("full", "full_like", "scalar_tensor"):
        bound = arguments(value)
        return constant_value(bound["s"] if name == "scalar_tensor" else bound["fill_value"])
    if name in ("ones", "zeros"):
        return 1.0 if name == "ones" else 0.0
    if name in _SAME_VALUE:
        return constant_value(value.args[0], constants)
    if name in _FOLDED and not value.kwargs:
        parts = [constant_value(arg, constants) for arg in value.args]
        try:
            return None if None in parts else float(_FOLDED[name](*parts))
        except (ArithmeticError, ValueError, TypeError):
            return None
    return None


def _item(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        if isinstance(value, torch._subclasses.FakeTensor):
            value = value.constant
        return None if value is None else float(value.item())
    return None

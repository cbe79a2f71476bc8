"""What a launcher passes for one side of an attention (its keys or its values): planes with strides, and a number for the format.

A kernel puts what it is passed together again as a tuple of planes, in this order:

    codes, scale, outer, minimum, zero_point, codebook, turns, position, outlier_index, outlier_value, recent, sinks, coded,
    length

Those that have strides are tuples themselves: ``(pointer, batch, head, token)``, and ``(pointer, head)`` for ``zero_point``.
``turns`` are made of the plane ``inv_freq``, once, by ``rotary.turn_steps``.
What the format is, it takes from the fields of the number, ``SPEC``, by ``(SPEC >> BITS_AT.value) & 15`` and the like.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from . import spec as _spec
from .launching import known_multiple
from .spec import Spec

__all__ = ["packed_spec", "rotation_log", "side_args"]

_FIELDS = {
    "code": 4,
    "bits": 4,
    "scale_kind": 2,
    "static": 1,
    "minimum": 1,
    "rotary": 1,
    "windowed": 1,
    "sinks": 1,
    "rotation": 2,
    "outer": 1,
    "outliers": 10,
    "channels": 11,
    "tokens": 11,
    "log": 4,
    "shift": 2,
}
"""The number's fields with their bits, lowest first."""


def _at(name: str) -> int:
    names = list(_FIELDS)
    return sum(_FIELDS[before] for before in names[: names.index(name)])


BITS_AT = tl.constexpr(_at("bits"))
KIND_AT = tl.constexpr(_at("scale_kind"))
STATIC_AT = tl.constexpr(_at("static"))
MINIMUM_AT = tl.constexpr(_at("minimum"))
ROTARY_AT = tl.constexpr(_at("rotary"))
WINDOWED_AT = tl.constexpr(_at("windowed"))
SINKS_AT = tl.constexpr(_at("sinks"))
ROTATION_AT = tl.constexpr(_at("rotation"))
OUTER_AT = tl.constexpr(_at("outer"))
OUTLIERS_AT = tl.constexpr(_at("outliers"))
CHANNELS_AT = tl.constexpr(_at("channels"))
TOKENS_AT = tl.constexpr(_at("tokens"))
LOG_AT = tl.constexpr(_at("log"))
SHIFT_AT = tl.constexpr(_at("shift"))

# Planes in the order of ``SLOTS`` with the strides that kernels take.
_TAKEN = (
    ("codes", "bht"),
    ("scale", "bht"),
    ("outer", ""),
    ("minimum", "bht"),
    ("zero_point", "h"),
    ("codebook", ""),
    ("inv_freq", ""),
    ("position", "bt"),
    ("outlier_index", "bht"),
    ("outlier_value", "bht"),
    ("recent", "bht"),
    ("sinks", "bht"),
    ("coded", ""),
    ("length", ""),
)
_SCALE_SLOT, _MINIMUM_SLOT = (_spec.SLOTS.index(name) for name in ("scale", "minimum"))
_SCALE_ARGS, _MINIMUM_ARGS = (
    sum(1 + len(axes) for _, axes in _TAKEN[:slot]) for slot in (_SCALE_SLOT, _MINIMUM_SLOT)
)


@functools.cache
def _plan(spec: Spec) -> tuple[tuple[int, tuple[int | None, ...], bool], ...]:
    """For each plane that kernels take: its index in a store, which strides it needs, whether its last axis must be dense."""
    plan = []
    for slot, taken in _TAKEN:
        at = _spec.SLOTS.index(slot)
        index = spec.planes[at]
        names = spec.axes[at].replace("N", "T" if "BH" in spec.axes[at] else "N")
        axes = tuple(
            names.index(axis.upper()) if index != _spec.ABSENT and axis.upper() in names else None
            for axis in taken
        )
        plan.append((index, axes, names[-1] in "DNB" or names == "1"))
    return tuple(plan)


def side_args(store: Sequence[Tensor], spec: Spec, dim: int) -> tuple[list[Tensor | int], int]:
    """The planes of a store as a kernel takes them, and what it has to know of their format.

    Kernels want the last axis of a plane dense; others are copied here.
    """
    args: list[Tensor | int] = []
    # Strides of groups' parameters are small. What all are known to be multiples of is told apart, so that loads can be wide.
    shift = 3 if spec.scale_channels > 0 and not spec.static_scale else 0
    for at, (index, axes, dense) in enumerate(_plan(spec)):
        if index == _spec.ABSENT:
            args.append(store[0])
            args += [0] * len(axes)
            continue
        tensor = store[index]
        strides = tensor.stride()
        if dense and strides[-1] != 1 and tensor.shape[-1] > 1:
            tensor = tensor.contiguous()
            strides = tensor.stride()
        taken = [0 if axis is None else strides[axis] for axis in axes]
        if shift and at in (_SCALE_SLOT, _MINIMUM_SLOT):
            for stride in taken:
                while not known_multiple(stride, 1 << shift):
                    shift -= 1
        args.append(tensor)
        args += taken
    if shift:
        for at in (_SCALE_ARGS, _MINIMUM_ARGS):
            args[at + 1 : at + 4] = [stride >> shift for stride in args[at + 1 : at + 4]]
    return args, packed_spec(spec, dim, shift)


def packed_spec(spec: Spec, dim: int, shift: int) -> int:
    """What a kernel has to know of a format, in one number.

    Args:
        shift: strides of the parameters of groups are passed divided by two to this power.
    """
    fields = {
        "code": spec.code,
        "bits": spec.bits or 8,
        "scale_kind": spec.scale_kind,
        "static": spec.static_scale,
        "minimum": spec.has_minimum,
        "rotary": spec.rotary,
        "windowed": spec.windowed,
        "sinks": int(spec.sinks > 0),
        "rotation": spec.rotation,
        "outer": int(spec.planes[_spec.SLOTS.index("outer")] != _spec.ABSENT),
        "outliers": spec.outlier_count(dim),
        "channels": spec.scale_channels,
        "tokens": spec.scale_tokens,
        "log": rotation_log(dim),
        "shift": shift,
    }
    packed = 0
    for name, value in fields.items():
        assert 0 <= value < 1 << _FIELDS[name], name
        packed |= value << _at(name)
    return packed


def rotation_log(dim: int) -> int:
    """The binary logarithm of how many channels are rotated together."""
    return (dim & -dim).bit_length() - 1

"""What the Triton kernels need to know of a format: a few whole numbers, computed from its row.

A kernel never sees a format's name. It sees how codes become numbers, by which rule numbers become codes, which tokens and
channels share a parameter, and pointers with strides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import Format
from ..layout import Plane

__all__ = [
    "ABSENT",
    "MAX_DIM",
    "SLOTS",
    "Spec",
    "plane_args",
    "plane_of",
    "spec_of",
]

MAX_DIM = 1024
"""Channels of a vector, and members of a group, that the kernels have room for."""

# How a stored code becomes a number, before scale and minimum.
EXACT = 0  # a float of the dtype of the plane
SIGNED = 1  # two's complement of ``bits`` bits
UNSIGNED = 2  # 0..2^bits - 1
SHIFTED = 3  # unsigned; (code + zero) mod 2^bits counts from -zero
E4M3, E5M2, E2M1 = 4, 5, 6
TABLE = 7  # an entry of the plane ``codebook``
NORMAL = 8  # an entry of the table of the normal distribution

# By which rule numbers become codes.
COPY, SYMMETRIC, ASYMMETRIC, FLOAT8, NVFP4, MX, CODEBOOK, NORMED = range(8)

# What the plane of scales holds.
NO_SCALE, SCALE_FLOAT, SCALE_E4M3, SCALE_E8M0 = range(4)

# Planes in the order in which kernels take them, by the names that rows use. ``scale`` stands for whatever multiplies codes
# (block_scale, exponent, half_range, norm), ``minimum`` for whatever is added (centre), ``outer`` for nvfp4's decode_scale.
SLOTS = (
    "codes",
    "scale",
    "outer",
    "minimum",
    "zero_point",
    "codebook",
    "inv_freq",
    "position",
    "outlier_index",
    "outlier_value",
    "recent",
    "sinks",
    "coded",
    "length",
)
ABSENT = -1

_ROTATIONS = {"": 0, "hadamard": 1, "random_hadamard": 2}
_STRIDES: dict[str, Callable[[tuple[int, ...]], tuple[int, int, int, int]]] = {
    "BHTD": lambda s: (s[0], s[1], s[2], s[3]),
    "BHND": lambda s: (s[0], s[1], s[2], s[3]),
    "BHT": lambda s: (s[0], s[1], s[2], 0),
    "H": lambda s: (0, s[0], 0, 0),
    "1": lambda s: (0, 0, 0, 0),
    "B": lambda s: (s[0], 0, 0, 0),
    "HD": lambda s: (0, s[0], 0, s[1]),
    "D": lambda s: (0, 0, 0, s[0]),
    "N": lambda s: (0, 0, 0, s[0]),
    "B1T": lambda s: (s[0], 0, s[2], 0),
}


@dataclass(frozen=True)
class Spec:
    """A format in numbers.

    Attributes:
        code: how a code becomes a number (``EXACT``, ``SIGNED``, ...).
        rule: how numbers become codes (``COPY``, ``SYMMETRIC``, ...).
        bits: of one code; 8 for float8, 0 for exact values.
        per: channels in ``items`` stored bytes (1 in 1, 2 in 1, 8 in 3, 4 in 1).
        items: see ``per``.
        scale_kind: what the plane of scales holds (``SCALE_FLOAT``: a float of the dtype of the plane).
        scale_tokens: tokens that share a scale.
        scale_channels: channels that share a scale; 0: all of a token.
        static_scale: 1 where scales span all tokens (of the tensor, of a head, or of a channel of a head).
        has_minimum: 1 where something is added after scaling.
        has_zero: 1 with a plane of zero points.
        rotation: 0 none, 1 Hadamard, 2 the same after flipping signs.
        rotary: 1 where keys are turned back by their position before they are coded.
        percent: of each vector that is kept exactly.
        centred: outliers lie far from: 0 zero, 1 the median, 2 the centre of their channel.
        calibrated: 1 where static planes are set beforehand.
        windowed: 1 with a ring of exact tokens.
        window: tokens in the ring.
        recent: newest tokens that are exact, at least.
        sinks: first tokens that are exact.
        planes: for each of ``SLOTS`` its index in a store, or ``ABSENT``.
        axes: for each of ``SLOTS`` the axes of its plane.
        lossless: whether codes are the values themselves.
    """

    code: int
    rule: int
    bits: int
    per: int
    items: int
    scale_kind: int
    scale_tokens: int
    scale_channels: int
    static_scale: int
    has_minimum: int
    has_zero: int
    rotation: int
    rotary: int
    percent: float
    centred: int
    calibrated: int
    windowed: int
    window: int
    recent: int
    sinks: int
    planes: tuple[int, ...]
    axes: tuple[str, ...]
    lossless: bool

    def outlier_count(self, head_dim: int) -> int:
        """How many values of a vector are kept exactly."""
        return max(1, round(head_dim * self.percent / 100)) if self.percent else 0

    @property
    def folds_rotation(self) -> bool:
        """Whether attention may stay in the rotated space: not where each key is turned by its position after that."""
        return bool(self.rotation) and not self.rotary


def _numbers(row: Format) -> tuple[int, int] | str:
    """Code and rule of a row without exact tokens, or why there are none."""
    names = {plane.name for plane in row.planes}
    if row.codec == "exact":
        return EXACT, COPY
    if row.codec == "integer" and row.bits in (8, 4, 3, 2):
        if "minimum" in names:
            return UNSIGNED, ASYMMETRIC
        return (SHIFTED if "zero_point" in names else SIGNED), SYMMETRIC
    if row.codec == "codebook" and row.bits in (4, 3, 2):
        return (NORMAL, NORMED) if "norm" in names else (TABLE, CODEBOOK)
    if row.codec in ("float8", "block_scaled") and row.element is not None:
        code = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}.get(row.element)
        if code is not None:
            return code, FLOAT8 if row.codec == "float8" else MX
    if row.codec == "block_scaled" and row.bits == 4:
        return E2M1, MX if "exponent" in names else NVFP4
    return f"no kernel for codec {row.codec!r} with {row.bits} bits and planes {', '.join(sorted(names))}"


@functools.cache
def spec_of(fmt: Format) -> Spec | str:
    """``fmt`` in numbers, or the reason why the kernels cannot serve it."""
    row = fmt.base or fmt
    made = _numbers(row)
    if isinstance(made, str):
        return made
    code, rule = made
    scale_name = {NVFP4: "block_scale", MX: "exponent", CODEBOOK: "half_range", NORMED: "norm"}.get(
        rule, "scale"
    )
    aliases = {scale_name: "scale", "decode_scale": "outer", "centre": "minimum"}
    slots: dict[str, tuple[int, Plane]] = {}
    for i, plane in enumerate(fmt.planes):
        name = aliases.get(plane.name, plane.name)
        if name not in SLOTS or plane.axes not in _STRIDES or name in slots:
            return f"no kernel reads a plane {plane.name!r} over {plane.axes}"
        slots[name] = i, plane
    if row.rotation not in _ROTATIONS:
        return f"no kernel for rotation {row.rotation!r}"
    codes = slots["codes"][1]
    if code != EXACT and (codes.per, codes.items) != {8: (1, 1), 4: (2, 1), 3: (8, 3), 2: (4, 1)}[row.bits]:
        return f"no kernel for codes of {codes.per} channels in {codes.items} bytes"
    tokens = channels = 1
    static = False
    kind = NO_SCALE
    if "scale" in slots:
        plane = slots["scale"][1]
        kind = {NVFP4: SCALE_E4M3, MX: SCALE_E8M0}.get(rule, SCALE_FLOAT)
        tokens, static = plane.tokens, not plane.per_token
        channels = 0 if "D" not in plane.axes else plane.per
        if plane.items != 1 or max(tokens, channels) > MAX_DIM:
            return f"no kernel for a scale of {tokens} tokens and {channels} channels"
        low = slots["minimum"][1] if "minimum" in slots else plane
        if (low.axes, low.per, low.tokens, low.dtype) != (plane.axes, plane.per, plane.tokens, plane.dtype):
            return "no kernel for a minimum that is laid out unlike its scale"
        if static and rule not in (FLOAT8, SYMMETRIC, CODEBOOK):
            return f"no kernel for a static scale of codec {row.codec!r}"
        if tokens > 1 and (channels != 1 or not fmt.windowed):
            return "no kernel for groups of tokens other than one channel's, behind a window"
        if tokens > 1 and rule not in (SYMMETRIC, ASYMMETRIC):
            return f"no kernel codes groups of tokens by the rule of codec {row.codec!r}: integers are served there"
    elif code != EXACT:
        return "no kernel for codes without a scale"
    if row.token_group != tokens:
        return "no kernel for a token group that is not that of its scale"
    return Spec(
        code=code,
        rule=rule,
        bits=row.bits,
        per=codes.per,
        items=codes.items,
        scale_kind=kind,
        scale_tokens=tokens,
        scale_channels=channels,
        static_scale=int(static),
        has_minimum=int("minimum" in slots),
        has_zero=int("zero_point" in slots),
        rotation=_ROTATIONS[row.rotation],
        rotary=int("position" in slots),
        percent=row.outliers,
        centred=2 if rule == CODEBOOK and static else int("minimum" in slots),
        calibrated=int(row.calibrated),
        windowed=int(fmt.windowed),
        window=fmt.window if fmt.windowed else 0,
        recent=fmt.recent,
        sinks=fmt.sinks,
        planes=tuple(slots[name][0] if name in slots else ABSENT for name in SLOTS),
        axes=tuple(slots[name][1].axes if name in slots else "1" for name in SLOTS),
        lossless=fmt.lossless,
    )


def plane_of(store: Sequence[Tensor], spec: Spec, slot: str) -> tuple[Tensor, tuple[int, int, int, int]]:
    """The plane in a slot and its strides along batch, head, token and channel, 0 along an axis that it does not have.

    For a plane that the format lacks: the codes, which a kernel must not read, and zeros.
    """
    at = SLOTS.index(slot)
    if spec.planes[at] == ABSENT:
        return store[0], (0, 0, 0, 0)
    tensor = store[spec.planes[at]]
    return tensor, _STRIDES[spec.axes[at]](tensor.stride())


def plane_args(store: Sequence[Tensor], spec: Spec, slots: Sequence[str]) -> list[Tensor | int]:
    """For each of ``slots`` in turn a tensor and its four strides, flat, as kernels take them."""
    args: list[Tensor | int] = []
    for slot in slots:
        tensor, strides = plane_of(store, spec, slot)
        args += [tensor, *strides]
    return args

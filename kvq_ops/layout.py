"""How a store is laid out: a row says which planes it has, their shapes and dtypes, and nothing here computes with them.

A *store* is a list of plain tensors, the *planes* of one cache, in the order of ``Format.planes``. Four kinds of plane:

* per token: its third axis is the token, or a group of tokens, so that appending writes a slice of it (codes, scales, ...);
* static: values for the whole cache, for each head or for each channel, fixed at the first write or calibrated beforehand
  (``scale``, ``decode_scale``, ``codebook``, ...); they are set where the first of them is not zero;
* of a window: exact tokens (``recent``, ``sinks``) and how many tokens are coded (``coded``), see ``kvq_ops.window``;
* ``length``: int64 ``[B]``, the number of tokens each row holds; always the last plane.

All shapes below are in terms of the canonical cache ``[B, H, T, D]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .errors import CorruptStoreError, HeadDimError

__all__ = ["CODED", "LENGTH", "OUTLIER_PLANES", "Format", "Plane"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Plane:
    """One tensor of a store.

    Attributes:
        name: how codecs call it.
        axes: a string over ``B H T D``, ``1`` for an axis of one element, or ``N`` for one of ``size``. ``D`` is divided by
            ``per`` and ``T`` by ``tokens``, rounding up.
        dtype: ``None`` means the dtype of the cache itself.
        per: how many channels share ``items`` items of the last axis (2 for packed 4-bit codes, 8 with 3 items for packed
            3-bit codes, 32 for scales of groups of 32; 0 means that all channels share them).
        tokens: how many tokens share one item of the token axis.
        size: of the axis ``N``.
    """

    name: str
    axes: str
    dtype: torch.dtype | None
    per: int = 1
    items: int = 1
    tokens: int = 1
    size: int = 0

    @property
    def per_token(self) -> bool:
        return "T" in self.axes

    @property
    def static(self) -> bool:
        return not self.per_token and "B" not in self.axes

    def shape(self, batch: int, heads: int, tokens: int, head_dim: int) -> tuple[int, ...]:
        groups = self.items if self.per == 0 else -(-head_dim // self.per) * self.items
        sizes = {"B": batch, "H": heads, "T": -(-tokens // self.tokens), "D": groups, "1": 1, "N": self.size}
        return tuple(sizes[axis] for axis in self.axes)


OUTLIER_PLANES = ("outlier_index", "outlier_value")
LENGTH = Plane("length", "B", torch.int64)
CODED = Plane("coded", "B", torch.int64)


@dataclass(frozen=True)
class Format:
    """How one tensor of keys or values is stored.

    Attributes:
        name: the name people type.
        codec: which file of ``kvq_ops.codecs`` encodes it.
        bits: bits of one code, without scales.
        planes: the store layout; ``length`` is appended to it.
        group: channels that share a scale; 0 for all channels of a token, ``None`` where a scale spans tokens.
        element: dtype of one code where the codec has a choice (float8). Planes hold its bytes as uint8, since few
            operations are defined on float8 tensors.
        pack: head_dim must be a multiple of this.
        summary: one line for tables.
        token_group: tokens that share a scale; such a group is coded once it is whole.
        rotation: ``"hadamard"`` or ``"random_hadamard"`` when vectors are rotated before they are coded.
        calibrated: static planes are set beforehand, never fitted at a write, and stay when the cache is emptied.
        outliers: percent of each vector that is kept exactly, as index and value.
        base: for a format with exact tokens, how the other tokens are coded.
        recent: the newest tokens that are exact, at least.
        sinks: the first tokens that are exact.
    """

    name: str
    codec: str
    bits: int
    planes: tuple[Plane, ...]
    group: int | None = None
    element: torch.dtype | None = None
    pack: int = 1
    summary: str = ""
    lossless: bool = False
    token_group: int = 1
    rotation: str = ""
    calibrated: bool = False
    outliers: float = 0.0
    base: Format | None = None
    recent: int = 0
    sinks: int = 0
    _index: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)
    # Stores that were found right, by the shapes and dtypes of their planes.
    _right: dict[tuple[object, ...], tuple[int, int, int, int]] = field(
        init=False, repr=False, compare=False, hash=False
    )

    def __post_init__(self) -> None:
        if LENGTH not in self.planes:
            object.__setattr__(self, "planes", (*self.planes, LENGTH))
        object.__setattr__(self, "_index", {p.name: i for i, p in enumerate(self.planes)})
        object.__setattr__(self, "_right", {})

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        # Every call of an operator looks something up by its formats, and equal ones have equal names.
        return hash(self.name)

    def index(self, plane: str) -> int:
        """Position of a plane in the store."""
        return self._index[plane]

    @property
    def keeps_exact(self) -> bool:
        """Whether some values are stored as they are, in the dtype of the cache."""
        return any(plane.dtype is None for plane in self.planes)

    @property
    def windowed(self) -> bool:
        """Whether the newest tokens wait, exact, to be coded; such a cache only grows at its end."""
        return self.base is not None

    @property
    def window(self) -> int:
        """Tokens that the ring of exact tokens holds."""
        return self.recent + self.token_group

    def outlier_count(self, head_dim: int) -> int:
        """How many values of a vector are kept exactly."""
        return max(1, round(head_dim * self.outliers / 100)) if self.outliers else 0

    @property
    def token_planes(self) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.planes) if p.per_token)

    @property
    def static_planes(self) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.planes) if p.static)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ``HeadDimError`` unless this format can hold vectors of ``head_dim`` channels."""
        if head_dim < 1 or head_dim % self.pack:
            raise HeadDimError(
                f"head_dim of a cache in format {self.name!r}, which packs {self.pack} channel(s) at a time",
                got=f"head_dim {head_dim}",
                allowed=f"a positive multiple of {self.pack}",
                do="choose an 8-bit format for this cache, or pad head_dim in the model",
            )

    def plane_shapes(self, batch: int, heads: int, tokens: int, head_dim: int) -> list[tuple[int, ...]]:
        outliers = self.outlier_count(head_dim)
        return [
            (batch, heads, tokens, outliers)
            if plane.name in OUTLIER_PLANES
            else plane.shape(batch, heads, tokens, head_dim)
            for plane in self.planes
        ]

    def plane_dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        return [dtype if plane.dtype is None else plane.dtype for plane in self.planes]

    def empty_store(
        self,
        batch: int,
        heads: int,
        tokens: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> list[torch.Tensor]:
        """An empty store: every code decodes to zero and ``length`` is 0.

        Args:
            dtype: dtype of the dense cache this one stands for; only ``none`` stores it.
        """
        self.check_head_dim(head_dim)
        return [
            torch.zeros(shape, dtype=kind, device=device)
            for shape, kind in zip(
                self.plane_shapes(batch, heads, tokens, head_dim),
                self.plane_dtypes(dtype),
                strict=True,
            )
        ]

    def nbytes(
        self,
        batch: int,
        heads: int,
        tokens: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        """Planned bytes of a store, every plane counted."""
        self.check_head_dim(head_dim)
        shapes = self.plane_shapes(batch, heads, tokens, head_dim)
        return sum(math.prod(s) * d.itemsize for s, d in zip(shapes, self.plane_dtypes(dtype), strict=True))

    def bits_per_value(self, head_dim: int, dtype: torch.dtype = torch.float32, heads: int = 8) -> float:
        """Stored bits of one cached number, scales included, in the limit of many tokens.

        Args:
            heads: kv heads, which share what is stored once for a token.
        """
        self.check_head_dim(head_dim)
        bits = 0.0
        shapes = self.plane_shapes(1, heads, 1, head_dim)
        for plane, shape, kind in zip(self.planes, shapes, self.plane_dtypes(dtype), strict=True):
            if plane.per_token:
                bits += 8 * kind.itemsize * math.prod(shape) / plane.tokens
        return bits / (head_dim * heads)

    def logical_shape(self, store: Sequence[torch.Tensor]) -> tuple[int, int, int, int]:
        """``(B, H, T, D)`` of a store, from the shape of its codes."""
        if len(store) != len(self.planes):
            raise CorruptStoreError(
                f"a store of format {self.name!r}",
                got=f"{len(store)} planes",
                allowed=f"{len(self.planes)}: {', '.join(p.name for p in self.planes)}",
                do="pass the planes as kvq::quantize or QuantizedKV.store gives them, with the same format string",
            )
        codes = store[0]
        if codes.dim() != 4:
            raise CorruptStoreError(
                f"the codes of a store of format {self.name!r}",
                got=f"{codes.dim()} dimensions, shape {tuple(codes.shape)}",
                allowed="4: [B, H, T, packed D]",
                do="unsqueeze missing axes before the call",
            )
        b, h, t, packed = codes.shape
        codes_plane = self.planes[0]
        return b, h, t, packed // codes_plane.items * codes_plane.per

    def check_store(self, store: Sequence[torch.Tensor]) -> tuple[int, int, int, int]:
        """Raise ``CorruptStoreError`` unless ``store`` has this format's planes; returns ``(B, H, T, D)``."""
        known: tuple[object, ...] = tuple([x for t in store for x in (t.shape, t.dtype)])
        try:
            if (right := self._right.get(known)) is not None:
                return right
        except TypeError:  # sizes that are symbols have no hash
            return self._check_store(store)
        shape = self._check_store(store)
        if all(type(size) is int for size in shape):
            if len(self._right) >= 1024:
                self._right.clear()
            self._right[known] = shape
        return shape

    def _check_store(self, store: Sequence[torch.Tensor]) -> tuple[int, int, int, int]:
        shape = self.logical_shape(store)
        for plane, tensor, expected in zip(self.planes, store, self.plane_shapes(*shape), strict=True):
            wrong_type = (
                tensor.dtype not in (*_FLOATS, torch.float64)
                if plane.dtype is None
                else tensor.dtype != plane.dtype
            )
            if wrong_type or tuple(tensor.shape) != expected:
                raise CorruptStoreError(
                    f"plane {plane.name!r} of a store of format {self.name!r}",
                    got=f"{tensor.dtype} {tuple(tensor.shape)}",
                    allowed=f"{plane.dtype or 'a floating dtype'} {expected}",
                    do="check that the format string is the one the store was made with",
                )
        return shape

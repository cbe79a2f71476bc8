"""Encoding and decoding in plain torch: the definition of every code.

A codec turns fp32 values ``[B, H, T, D]`` into the planes of a format and back. It sees nothing of caches, positions or
attention. All arithmetic is fp32 with IEEE division and ties to even, so that every backend can give the same bytes.

Values that are not finite never enter a scale: NaN is coded as zero and an infinity as the largest code of its sign, so
one bad value spoils no other. Where vectors are rotated first, which would spread it, it counts as zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..errors import FormatError
from ..formats import Format
from . import block_scaled, exact, float8, integer
from .numeric import finite_or_zero
from .outliers import restore_outliers, split_outliers
from .rotation import hadamard

__all__ = ["Codec", "codec_for", "decode", "encode", "register_codec"]

Planes = Mapping[str, Tensor]


class Codec(Protocol):
    """What a number system has to provide; a module with these three functions is enough."""

    def calibrate(self, x: Tensor, fmt: Format) -> dict[str, Tensor]:
        """Static planes fitted to ``x``; zero where ``x`` holds nothing to fit."""

    def encode(self, x: Tensor, fmt: Format, static: Planes) -> dict[str, Tensor]:
        """Per-token planes of fp32 ``x [B, H, T, D]``, given the static planes."""

    def decode(self, planes: Planes, fmt: Format) -> Tensor:
        """fp32 ``[B, H, T, D]`` from all planes."""


_CODECS: dict[str, Codec] = {
    "exact": exact,
    "integer": integer,
    "float8": float8,
    "block_scaled": block_scaled,
}


def register_codec(name: str, codec: Codec) -> None:
    """Make ``codec`` known to rows whose ``codec`` is ``name``."""
    if _CODECS.setdefault(name, codec) is not codec:
        raise FormatError(
            f"registering codec {name!r}",
            got="a name that is taken by another codec",
            allowed="a new name, or the same codec again",
            do="choose another name",
        )


def codec_for(fmt: Format) -> Codec:
    return _CODECS[fmt.codec]


def encode(
    x: Tensor, fmt: Format, store: Sequence[Tensor] | None = None
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Encode ``x [B, H, T, D]`` in a format without exact tokens.

    Args:
        store: an existing store, whose static planes are kept where they are set (nonzero) and fitted to ``x`` where
            they are not; ``None`` fits them to ``x``.

    Returns:
        Two lists in plane order: the per-token planes of ``x``, and the static planes to keep; ``None`` elsewhere.
    """
    codec = codec_for(fmt)
    given = x
    x = x if fmt.lossless else x.float()
    encoded: dict[str, Tensor] = {}
    if fmt.rotation:
        x = hadamard(finite_or_zero(x))
    if fmt.outliers:
        count = fmt.outlier_count(x.shape[-1])
        index, value, x = split_outliers(x, count, symmetric="minimum" not in fmt._index, dtype=given.dtype)
        encoded = {"outlier_index": index, "outlier_value": value}
    token: list[Tensor | None] = [None] * len(fmt.planes)
    static: list[Tensor | None] = [None] * len(fmt.planes)
    known: dict[str, Tensor] = {}
    if fmt.static_planes:
        fitted = codec.calibrate(x, fmt)
        for i in fmt.static_planes:
            plane = fitted[fmt.planes[i].name]
            if store is not None:
                plane = torch.where(store[i] != 0, store[i], plane)
            known[fmt.planes[i].name] = static[i] = plane
    encoded |= codec.encode(x, fmt, known)
    for i in fmt.token_planes:
        token[i] = encoded[fmt.planes[i].name]
    return token, static


def decode(store: Sequence[Tensor], fmt: Format) -> Tensor:
    """Decode a store to ``[B, H, T, D]``: fp32, or the stored dtype for a lossless format. Exact tokens are not put in."""
    planes = {plane.name: tensor for plane, tensor in zip(fmt.planes, store, strict=True)}
    decoded = codec_for(fmt).decode(planes, fmt)
    if fmt.outliers:
        decoded = restore_outliers(decoded, planes["outlier_index"], planes["outlier_value"])
    return hadamard(decoded) if fmt.rotation else decoded

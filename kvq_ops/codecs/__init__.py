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

from ..errors import CalibrationError, FormatError
from ..formats import Format
from . import block_scaled, codebook, exact, float8, integer
from .numeric import finite_or_zero
from .outliers import centred_distance, restore_outliers, split_outliers
from .rotary import turn
from .rotation import rotate, unrotate

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
    "codebook": codebook,
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
    x: Tensor, fmt: Format, store: Sequence[Tensor] | None = None, position: Tensor | None = None
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Encode ``x [B, H, T, D]`` in a format without exact tokens.

    Args:
        store: an existing store, whose static planes are kept where they are set and fitted to ``x`` where they are not;
            ``None`` fits them to ``x``.
        position: the slots of the tokens, integers ``[T]`` or ``[B, T]``; ``0..T-1`` unless given.

    Returns:
        Two lists in plane order: the per-token planes of ``x``, and the static planes to keep; ``None`` elsewhere.

    Raises:
        CalibrationError: the format is calibrated beforehand and ``store`` holds nothing that was.
    """
    codec = codec_for(fmt)
    token: list[Tensor | None] = [None] * len(fmt.planes)
    static: list[Tensor | None] = [None] * len(fmt.planes)
    known: dict[str, Tensor] = {}
    if fmt.calibrated:
        check_calibrated(fmt, store)
        assert store is not None
        known = {fmt.planes[i].name: store[i] for i in fmt.static_planes}
    given, encoded = x, {}
    if "position" in fmt._index:
        slots = torch.arange(x.shape[2], device=x.device) if position is None else position
        # Zero stands for a slot that holds nothing.
        encoded["position"] = (slots.view(-1, 1, x.shape[2]) + 1).expand(x.shape[0], -1, -1).int()
    x = prepare(x, fmt, known, encoded.get("position"))
    if fmt.outliers:
        distance = outlier_distance(x, fmt, known)
        count = fmt.outlier_count(x.shape[-1])
        index, value, x = split_outliers(x, count, distance, dtype=given.dtype)
        encoded |= {"outlier_index": index, "outlier_value": value}
    if fmt.static_planes and not fmt.calibrated:
        fitted = codec.calibrate(x, fmt)
        marker = None if store is None else store[fmt.static_planes[0]]
        for i in fmt.static_planes:
            plane = fitted[fmt.planes[i].name]
            if marker is not None and store is not None:
                plane = torch.where(marker != 0, store[i], plane)
            known[fmt.planes[i].name] = static[i] = plane
    encoded |= codec.encode(x, fmt, known)
    for i in fmt.token_planes:
        token[i] = encoded[fmt.planes[i].name]
    return token, static


def prepare(x: Tensor, fmt: Format, static: Planes, position: Tensor | None) -> Tensor:
    """``x`` in the space in which ``fmt`` codes: fp32 (unless it is lossless), turned back and rotated as the format says."""
    x = x if fmt.lossless else x.float()
    if position is not None:
        x = turn(finite_or_zero(x), position - 1, static["inv_freq"], back=True)
    return rotate(finite_or_zero(x), fmt.rotation) if fmt.rotation else x


def outlier_distance(x: Tensor, fmt: Format, static: Planes) -> Tensor:
    """What ranks the values of a vector for being kept exactly; see ``kvq_ops.codecs.outliers``."""
    if "centre" in static:
        centre, half_range = (static[name].float()[None, :, None] for name in ("centre", "half_range"))
        distance = (x - centre).abs()
        return torch.where(distance == 0, 0.0, distance / half_range)
    return centred_distance(x, symmetric=not ({"minimum", "centre"} & fmt._index.keys()))


def check_calibrated(fmt: Format, store: Sequence[Tensor] | None) -> None:
    """Raise ``CalibrationError`` unless the planes that are fitted beforehand are there."""
    marker = None if store is None else store[fmt.static_planes[0]]
    if marker is not None and marker.device.type != "cpu":
        torch._assert_async((marker != 0).any(), f"a cache in format {fmt.name!r} was not calibrated")
    elif marker is None or (type(marker) is Tensor and not bool((marker != 0).any())):
        names = ", ".join(fmt.planes[i].name for i in fmt.static_planes)
        raise CalibrationError(
            f"encoding in format {fmt.name!r}",
            got=f"no calibrated {names}",
            allowed="a store whose static planes were set beforehand; there is no default for them",
            do="fit them to sample text (kvq calibrate), and pass calibration= where the cache is made",
        )


def decode(store: Sequence[Tensor], fmt: Format, *, rotated: bool = False) -> Tensor:
    """Decode a store to ``[B, H, T, D]``: fp32, or the stored dtype for a lossless format. Exact tokens are not put in.

    Args:
        rotated: leave vectors in the space in which the format codes them.
    """
    planes = {plane.name: tensor for plane, tensor in zip(fmt.planes, store, strict=True)}
    decoded = codec_for(fmt).decode(planes, fmt)
    if fmt.outliers:
        decoded = restore_outliers(decoded, planes["outlier_index"], planes["outlier_value"])
    if fmt.rotation and not rotated:
        decoded = unrotate(decoded, fmt.rotation)
    if "position" in planes:
        position = planes["position"]
        decoded = turn(decoded, position - 1, planes["inv_freq"])
        decoded = decoded.masked_fill((position == 0).unsqueeze(-1), 0.0)
    return decoded

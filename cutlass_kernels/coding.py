"""Which formats the kernels serve, and the few numbers that tell them apart."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kvq_ops.formats import Format

__all__ = ["CODINGS", "LARGEST_HEAD_DIM", "Coding", "coding_of", "scale_octets", "why_not_format"]

LARGEST_HEAD_DIM = 512


@dataclass(frozen=True)
class Coding:
    """A way to code.

    Attributes:
        name: among ``CODINGS``.
        bits: of one code.
        unit: channels that one thread codes; a block of a format with blocks.
        scale: where a scale comes from: a ``"block"``, a ``"token"``, or ``"head"`` or ``"tensor"``, of which it is fitted to the
            first tokens. ``nvfp4`` has one for each block and one of the tensor.
        largest: the largest magnitude that has a code.
        divisor: a fitted scale is the largest magnitude of the first tokens over this.
    """

    name: str
    bits: int
    unit: int
    scale: str
    largest: float
    divisor: float = 0.0

    @property
    def fitted(self) -> bool:
        """Whether a scale spans tokens."""
        return self.divisor > 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of the codes of a unit."""
        return self.unit * self.bits // 8

    @property
    def access(self) -> int:
        """Bytes of the widest access to codes: no more than are next to each other, and 16 at most."""
        return min(16, self.unit_bytes)

    def lane_octets(self, head_dim: int) -> int:
        """Bytes of a key's codes that attention loads at once, a quarter of a row at most: rows start at multiples of them."""
        return min(16, head_dim * self.bits // 32)

    @property
    def scale_bytes(self) -> bool:
        """Whether a unit has a scale of one byte."""
        return self.scale == "block" or self.name == "nvfp4"


def scale_octets(head_dim: int) -> int:
    """Bytes of block scales that attention loads at once: rows of them start at multiples of as many."""
    return 2 if head_dim >= 128 else 1


CODINGS = {
    coding.name: coding
    for coding in (
        Coding("nvfp4", 4, 16, "tensor", 6.0, 448.0 * 6.0),
        Coding("mxfp4", 4, 32, "block", 6.0),
        Coding("mxfp8", 8, 32, "block", 448.0),
        Coding("fp8_token", 8, 16, "token", 448.0),
        Coding("fp8_head", 8, 16, "head", 448.0, 448.0),
        Coding("fp8_tensor", 8, 16, "tensor", 448.0, 448.0),
    )
}


@functools.cache
def coding_of(fmt: Format) -> Coding | str:
    """How a format is coded, or why it is not served."""
    if fmt.windowed or fmt.outliers or fmt.rotation or fmt.token_group > 1:
        return f"format {fmt.name}: exact tokens, outliers, rotations and groups of tokens are not served"
    e4m3 = fmt.element is torch.float8_e4m3fn
    if fmt.codec == "block_scaled" and (e4m3 or fmt.element is None):
        group = {"decode_scale": 16, "exponent": 32}[
            fmt.planes[2 if fmt.bits == 4 and fmt.group == 16 else 1].name
        ]
        if fmt.group == group:
            return CODINGS["nvfp4" if group == 16 else "mxfp8" if e4m3 else "mxfp4"]
    if fmt.codec == "float8" and e4m3:
        return CODINGS[{"BHT": "fp8_token", "H": "fp8_head", "1": "fp8_tensor"}[fmt.planes[1].axes]]
    return f"format {fmt.name}: nvfp4, mxfp4, mxfp8 and the fp8 formats of e4m3 codes are served"


def why_not_format(fmt: Format, head_dim: int) -> str | None:
    """Why a format, or vectors of this size in it, are not served; ``None`` where they are."""
    coding = coding_of(fmt)
    if isinstance(coding, str):
        return coding
    if head_dim % coding.unit or not 0 < head_dim <= LARGEST_HEAD_DIM:
        return f"head_dim {head_dim}: multiples of {coding.unit} up to {LARGEST_HEAD_DIM} are served"
    return None

"""``mma.sync.aligned.m16n8k16``: the fragments of the PTX ISA and the product, exact and rounded once to fp32.

Lane ``l`` has ``g = l // 4`` and ``t = l % 4``. Of A (16 x 16, rows) it holds in register ``j`` the row ``g + 8 (j % 2)`` at
columns ``2 t + 8 (j // 2) + {0, 1}``; of B (16 x 8) in register ``j`` the column ``g`` at rows ``2 t + 8 j + {0, 1}``; of C and
D in element ``i`` the row ``g + 8 (i // 2)`` at column ``2 t + i % 2``. (PTX ISA, "Matrix Fragments for mma.m16n8k16 with
floating point type".)
"""

from __future__ import annotations

import numpy as np

from .convert import bf16_values, f16_values

__all__ = ["multiply"]

_LANE = np.arange(32)
_G, _T = _LANE >> 2, _LANE & 3


def _halves(word: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    values = f16_values if kind == "f16" else bf16_values
    return values((word & np.uint32(0xFFFF)).astype(np.uint16)), values(
        (word >> np.uint32(16)).astype(np.uint16)
    )


def multiply(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray], kind: str) -> list[np.ndarray]:
    """The four D registers of each lane. Sums are exact up to float64, which no hardware promises to be.

    Args:
        a, b: uint32 registers, 4 and 2 of them, each ``[warps * 32]``.
        c: 4 fp32 registers.
        kind: ``f16`` or ``bf16``.
    """
    warps = a[0].size // 32
    left = np.zeros((warps, 16, 16))
    right = np.zeros((warps, 16, 8))
    add = np.zeros((warps, 16, 8))
    for j, word in enumerate(a):
        for e, value in enumerate(_halves(word, kind)):
            left[:, _G + 8 * (j % 2), 2 * _T + 8 * (j // 2) + e] = value.reshape(warps, 32)
    for j, word in enumerate(b):
        for e, value in enumerate(_halves(word, kind)):
            right[:, 2 * _T + 8 * j + e, _G] = value.reshape(warps, 32)
    for i, value in enumerate(c):
        add[:, _G + 8 * (i // 2), 2 * _T + i % 2] = value.reshape(warps, 32)
    product = (left @ right + add).astype(np.float32)
    return [np.ascontiguousarray(product[:, _G + 8 * (i // 2), 2 * _T + i % 2]).reshape(-1) for i in range(4)]

"""Launch parameters of the kernels, and what they are chosen by.

What was measured on some GPU is data, ``configs.json``, written by ``python -m kvq_lab.gpu_check --tune``; what was not comes
from rules. Nothing is measured when a kernel is first used. An entry of the table serves a launch when all of these agree: the
kind (decode, prefill, dequantize), how keys and values are coded, whether the query is fp32, the padded head_dim, and the family
of the GPU (the major number of the compute capability; for AMD the architecture). Among several the one of the same capability is
taken before others, then the one whose number of query rows is nearest, as a quotient.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import torch

from .spec import EXACT, NORMAL, TABLE, Spec

__all__ = ["code_of", "config_for", "measured", "nearest", "padded", "processors", "rule_for", "target"]

TABLE_FILE = Path(__file__).with_name("configs.json")


def target() -> tuple[str, Any]:
    """What kernels are compiled for: ``("cuda", 90)``, ``("hip", "gfx942")``, or ``("interpreter", 0)``."""
    import triton
    from triton.runtime.driver import driver

    if triton.knobs.runtime.interpret:
        return "interpreter", 0
    try:
        known = driver.active.get_current_target()
    except RuntimeError:  # no GPU: a graph is traced for one
        return ("hip", "gfx942") if torch.version.hip else ("cuda", 90)
    return known.backend, known.arch


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H100 where there is none to ask."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 132


def config_for(
    kind: str,
    spec_key: Spec,
    spec_value: Spec,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    capability: tuple[str, Any],
) -> dict[str, int]:
    """Launch parameters.

    Args:
        kind: ``"decode"``, ``"prefill"`` or ``"dequantize"``.
        head_dim: the larger one of keys and values.
        group: query rows of a kv head (query heads of it times queries).
        capability: from :func:`target`.

    Returns:
        ``block_m`` query rows and ``block_n`` tokens of a tile, ``num_warps``, ``num_stages``; where it was measured also
        ``slots``, the programs for each multiprocessor that splits are to make.
    """
    # Only decoding looks at the rows. Of a graph that serves many numbers of them only the size of the tile is asked, which
    # bounds them, and not the number, to which the graph would be bound.
    rows = 0
    if kind == "decode":
        rows = group if type(group) is int else next(n for n in (16, 32, 64) if n == 64 or group <= n)
    wide = dtype is torch.float32
    return dict(_chosen(kind, spec_key, spec_value, int(head_dim), rows, wide, capability))


@functools.lru_cache(maxsize=1024)
def _chosen(
    kind: str,
    spec_key: Spec,
    spec_value: Spec,
    head_dim: int,
    group: int,
    wide: bool,
    capability: tuple[str, Any],
) -> dict[str, int]:
    config = rule_for(kind, spec_key, spec_value, head_dim, group, wide, capability)
    if capability[0] != "interpreter":
        codes = code_of(spec_key), code_of(spec_value)
        config |= nearest(measured(), kind, codes, padded(head_dim), group, wide, capability)
    return config


def code_of(spec: Spec) -> list[int]:
    """What of a format decides how much a kernel has to do for a stored number."""
    return [spec.code, spec.bits, _effort(spec)]


@functools.cache
def measured() -> list[dict[str, Any]]:
    """The entries of ``configs.json``."""
    entries: list[dict[str, Any]] = json.loads(TABLE_FILE.read_text())["entries"]
    return entries


def nearest(
    entries: list[dict[str, Any]],
    kind: str,
    codes: tuple[list[int], list[int]],
    head_dim: int,
    group: int,
    wide: bool,
    capability: tuple[str, Any],
) -> dict[str, int]:
    """The parameters of the entry that serves best, or ``{}``; see the module for the order."""
    backend, arch = capability
    same = {"kind": kind, "codes": list(codes), "head_dim": head_dim, "fp32": wide, "backend": backend}
    fitting = [
        entry
        for entry in entries
        if all(entry[name] == value for name, value in same.items())
        and _family(entry["arch"]) == _family(arch)
    ]
    if not fitting:
        return {}

    def distance(entry: dict[str, Any]) -> tuple[bool, float]:
        return entry["arch"] != arch, abs(math.log2(max(entry["group"], 1) / max(group, 1)))

    config: dict[str, int] = min(fitting, key=distance)["config"]
    return config


def _family(arch: Any) -> Any:
    return arch // 10 if isinstance(arch, int) else arch


def rule_for(
    kind: str,
    spec_key: Spec,
    spec_value: Spec,
    head_dim: int,
    group: int,
    wide: bool,
    capability: tuple[str, Any],
) -> dict[str, int]:
    """Launch parameters where nothing was measured; arguments as for :func:`config_for`."""
    if capability[0] == "interpreter":
        return {"block_m": 16, "block_n": 32, "num_warps": 1, "num_stages": 1}
    amd = capability[0] == "hip"
    if kind == "dequantize":
        return {"block_m": 0, "block_n": 16 if spec_key.rotary else 32, "num_warps": 4, "num_stages": 1}
    effort = max(_effort(spec_key), _effort(spec_value))
    stages = 1 if amd or wide else 2
    if kind == "decode":
        block_m = max(16, min(64, 1 << (group - 1).bit_length()))
        block_n = (128, 64, 64, 32, 32)[effort]
        if wide:
            block_n = 16
        # What a thread holds grows with all three.
        block_n = max(16, block_n * 128 // max(128, padded(head_dim)) * 16 // min(block_m, 32))
        warps = 8 if effort == 4 and (wide or spec_key.rotation) else 4
        return {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages}
    if wide:
        return {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 1}
    if effort == 1 and spec_key.code == spec_value.code == EXACT:
        block_m = 128 if head_dim <= 128 else 64
        return {
            "block_m": block_m,
            "block_n": 64 if head_dim <= 128 else 32,
            "num_warps": block_m // 16,
            "num_stages": stages,
        }
    return {"block_m": 64, "block_n": 32 if head_dim <= 128 else 16, "num_warps": 8, "num_stages": stages}


def padded(dim: int) -> int:
    """Channels of a tile: a power of two that tensor cores take."""
    return max(16, 1 << (dim - 1).bit_length())


def _effort(spec: Spec) -> int:
    """How much a program has to hold for each stored number, from 0 to 4."""
    if spec.rotary:
        return 4
    if spec.windowed or spec.percent or spec.scale_tokens > 1 or spec.code in (TABLE, NORMAL):
        return 3
    if spec.bits == 3 or (spec.scale_channels > 0 and not spec.static_scale):
        return 2
    return 1 if spec.bits == 8 or spec.code == EXACT else 0

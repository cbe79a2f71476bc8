"""Making rows of the format table: which planes a kind of format has, and what modifiers change.

Nothing here knows names beyond the ones it is given; the table and the grammar of names are in ``kvq_ops.formats``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .layout import CODED, Format, Plane

__all__ = [
    "E4M3",
    "E5M2",
    "float8",
    "integer",
    "kivi",
    "nuq",
    "turbo",
    "with_exact",
    "with_outliers",
    "with_rotation",
    "with_static",
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def float8(name: str, element: torch.dtype, scale_axes: str, summary: str) -> Format:
    return Format(
        name,
        "float8",
        8,
        (Plane("codes", "BHTD", torch.uint8), Plane("scale", scale_axes, torch.float32)),
        group=0 if "T" in scale_axes else None,
        element=element,
        summary=summary,
    )


def codes(bits: int, dtype: torch.dtype = torch.uint8) -> Plane:
    """Packed codes along the channels."""
    per, items = {8: (1, 1), 4: (2, 1), 3: (8, 3), 2: (4, 1)}[bits]
    return Plane("codes", "BHTD", dtype, per=per, items=items)


def integer(
    name: str,
    bits: int,
    *,
    symmetric: bool,
    group: int | None = 0,
    tokens: int = 1,
    per_head: bool = False,
    parameter: torch.dtype = torch.float16,
) -> Format:
    """Integer codes.

    Args:
        symmetric: with a scale alone, else with a minimum too (a zero point where a scale spans all tokens).
        group: channels that share a scale; 0 for all of a token, ``None`` where a scale spans all tokens.
        tokens: tokens that share a scale, of one channel each.
        per_head: with ``group=None``, a scale for each head.
        parameter: dtype of scale and minimum.
    """
    plane = codes(bits, torch.int8 if symmetric and bits == 8 else torch.uint8)
    second = "minimum"
    if group is None:
        axes, per, parameter, second = "H" if per_head else "1", 1, torch.float32, "zero_point"
        where = "each head" if per_head else "the whole tensor"
    elif tokens > 1:
        axes, per, where = "BHTD", 1, f"each channel over {tokens} tokens"
    elif group == 0:
        axes, per, where = ("BHT" if symmetric else "BHTD"), 0, "each token and head"
    else:
        axes, per, where = "BHTD", group, f"{group} channels of a token"
    scales = [Plane("scale", axes, parameter, per=per, tokens=tokens)]
    if not symmetric:
        scales.append(Plane(second, axes, parameter, per=per, tokens=tokens))
    kind = "scale" if symmetric else f"scale and {second.replace('_', ' ')}"
    dtype = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[parameter]
    return Format(
        name,
        "integer",
        bits,
        (plane, *scales),
        group=group,
        pack=plane.per,
        token_group=tokens,
        summary=f"{bits}-bit integers, {dtype} {kind} for {where}",
    )


def with_outliers(base: Format, percent: float) -> Format:
    """``base`` with the ``percent`` % of each vector that lie farthest out kept exactly."""
    planes = (
        *base.planes[:-1],
        Plane("outlier_index", "BHTD", torch.int16, per=0),
        Plane("outlier_value", "BHTD", None, per=0),
    )
    return replace(
        base,
        name=f"{base.name}+outlier{percent:g}%",
        planes=planes,
        outliers=percent,
        summary=f"{base.summary}; {percent:g}% outliers exact",
    )


def with_rotation(base: Format) -> Format:
    return replace(
        base,
        name=f"{base.name}+hadamard",
        rotation="hadamard",
        summary=f"{base.summary}; rotated before coding",
    )


def with_static(base: Format) -> Format:
    """``base`` with scales that are calibrated beforehand."""
    return replace(base, name=f"{base.name}+static", calibrated=True, summary=f"{base.summary}, calibrated")


def with_exact(base: Format, name: str, recent: int, sinks: int) -> Format:
    """``base`` for tokens between the first ``sinks`` and the newest ``recent``, which are exact."""
    planes = [*base.planes[:-1], Plane("recent", "BHND", None, size=recent + base.token_group), CODED]
    if sinks:
        planes.append(Plane("sinks", "BHND", None, size=sinks))
    exact = [f"the newest {recent}" if recent else "", f"the first {sinks}" if sinks else ""]
    kept = " and ".join(part for part in exact if part) or "those of the unfinished group"
    return replace(
        base,
        name=name,
        planes=tuple(planes),
        base=base,
        recent=recent,
        sinks=sinks,
        summary=f"{base.summary}; tokens kept exact: {kept}",
    )


def kivi(bits: int, recent: int = 128, group: int = 32) -> tuple[Format, Format]:
    """KIVI: keys per channel over groups of tokens, values per token over groups of channels, the newest exact."""
    keys = integer(f"int{bits}_channel{group}", bits, symmetric=False, tokens=group, group=1)
    values = integer(f"int{bits}_group{group}", bits, symmetric=False, group=group)
    return (
        with_exact(keys, f"kivi{bits}_keys", recent, 0),
        with_exact(values, f"kivi{bits}_values", recent, 0),
    )


def nuq(bits: int) -> tuple[Format, Format]:
    """Codebooks fitted to calibration text: keys per channel, as they were before rotary embedding, and values per token."""
    table = Plane("codebook", "N", torch.float32, size=2**bits)
    half = torch.float16
    keys = Format(
        f"nuq{bits}_keys",
        "codebook",
        bits,
        (
            codes(bits),
            table,
            Plane("centre", "HD", half),
            Plane("half_range", "HD", half),
            Plane("inv_freq", "D", torch.float32, per=2),
            Plane("position", "B1T", torch.int32),
        ),
        pack=codes(bits).per,
        calibrated=True,
        summary=f"{bits}-bit codebook of the layer, fp16 centre and half-range for each channel, calibrated",
    )
    values = Format(
        f"nuq{bits}_values",
        "codebook",
        bits,
        (codes(bits), table, Plane("centre", "BHT", half), Plane("half_range", "BHT", half)),
        group=0,
        pack=codes(bits).per,
        calibrated=True,
        summary=f"{bits}-bit codebook of the layer, calibrated, fp16 centre and half-range for each token and head",
    )
    return keys, values


def turbo(bits: int) -> Format:
    return Format(
        f"turbo{bits}",
        "codebook",
        bits,
        (codes(bits), Plane("norm", "BHT", torch.float16)),
        group=0,
        pack=codes(bits).per,
        rotation="random_hadamard",
        summary=f"{bits}-bit codebook of the normal distribution after a random-sign rotation, fp16 norm for each token and head",
    )

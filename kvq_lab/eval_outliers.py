"""Outlier channels of keys: which they are, and which formats hold in spite of them.

A channel stands out where its root mean square over the tokens is many times the median channel's of its head. Formats whose
scale spans the channels of a token give their range to such channels, and the others, which carry the attention, are left with a
few codes; formats with a scale for each channel, with floating-point codes or with exact outliers are not hurt.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

STANDS_OUT = 8.0
"""Times the median channel of its head."""

HOLDS, HOLDS_KL = 0.015, 0.02
"""A format holds where perplexity changes by no more than the one beyond noise, and KL is at most the other, which small
samples tell better ..."""
FAILS = 0.1
"""... and fails where either is beyond this."""


@dataclasses.dataclass(frozen=True)
class KeyStatistics:
    """Keys of one layer: ``rms [H, D]`` of each channel, and ``ratio [H, D]`` to the median channel of its head."""

    rms: Tensor
    ratio: Tensor
    tokens: int

    @property
    def outlying(self) -> Tensor:
        return self.ratio >= STANDS_OUT

    def errors(self, error: Tensor) -> dict[str, float]:
        """Relative error of the channels that do not stand out, which a few large ones would hide in the total."""
        rest = ~self.outlying
        wrong = error.square().mean((0, 2))[rest].sum().item()
        right = self.rms.double().square()[rest].sum().item()
        return {"ordinary_channels": (wrong / right) ** 0.5 if right else 0.0}


def channel_statistics(keys: Tensor) -> KeyStatistics:
    """Statistics of ``keys [B, H, T, D]``."""
    rms = keys.double().square().mean((0, 2)).sqrt()
    middle = rms.median(-1, keepdim=True).values.clamp_min(torch.finfo(torch.float32).tiny)
    return KeyStatistics(rms, rms / middle, keys.shape[2])


def describe(layers: Sequence[KeyStatistics]) -> dict[str, Any]:
    """As plain values: every outlying channel, largest first, and for plots the ratio of every channel."""
    found = [
        {
            "layer": i,
            "head": h,
            "channel": c,
            "ratio": layer.ratio[h, c].item(),
            "rms": layer.rms[h, c].item(),
        }
        for i, layer in enumerate(layers)
        for h, c in layer.outlying.nonzero().tolist()
    ]
    return {
        "threshold": STANDS_OUT,
        "channels": sorted(found, key=lambda entry: -entry["ratio"]),
        "largest_ratio": max((layer.ratio.max().item() for layer in layers), default=0.0),
        "ratios": [[[round(x, 3) for x in head] for head in layer.ratio.tolist()] for layer in layers],
    }


def named(outliers: Mapping[str, Any], most: int = 12) -> list[str]:
    """The outlying channels in words: those that stand out in many heads together, the others one by one."""
    channels = outliers.get("channels", [])
    if not channels:
        return []
    heads = sum(len(layer) for layer in outliers["ratios"])
    count = Counter(entry["channel"] for entry in channels)
    ratios = defaultdict(list)
    for entry in channels:
        ratios[entry["channel"]].append(entry["ratio"])
    common = sorted(channel for channel, number in count.items() if number >= heads / 2)
    lines = [
        f"channel {channel} in {count[channel]} of {heads} kv heads, "
        f"{statistics.median(ratios[channel]):.0f} times the median channel"
        for channel in common
    ]
    rest = [entry for entry in channels if entry["channel"] not in common]
    lines += [
        f"layer {entry['layer']} head {entry['head']} channel {entry['channel']}, {entry['ratio']:.0f} times"
        for entry in rest[:most]
    ]
    if len(rest) > most:
        lines.append(f"and {len(rest) - most} more, each in few heads")
    return lines


def most_in_a_head(outliers: Mapping[str, Any]) -> int:
    """The most outlying channels that one head has."""
    count = Counter((entry["layer"], entry["head"]) for entry in outliers.get("channels", ()))
    return max(count.values(), default=0)


def _granularity(row: Mapping[str, Any], outliers: Mapping[str, Any]) -> str:
    """Why a format's keys behave as they do where channels stand out."""
    from kvq_lab.eval_specs import parse_spec

    fmt = parse_spec(row["spec"]).default.key
    base = fmt.base or fmt
    if fmt.lossless:
        return "exact"
    if base.outliers:
        ratios = outliers.get("ratios") or [[[]]]
        kept, needed = base.outlier_count(max(1, len(ratios[0][0]))), most_in_a_head(outliers)
        if ratios[0][0] and kept < needed:
            return f"keeps {kept} value(s) of a vector exactly, while up to {needed} channels of a head stand out"
        return "keeps the values that stand out exactly"
    if base.rotation:
        return "rotation spreads what stands out over all channels, and only softens it"
    if base.token_group > 1:
        return "a scale for each channel"
    if base.element is not None:
        return "floating-point codes keep small values beside large ones"
    if base.codec == "block_scaled":
        return f"one scale for {base.group} channels, shared with what stands out"
    if base.group == 0:
        return "one scale for all channels of a token, which what stands out takes"
    if base.group:
        return f"one scale for {base.group} channels, shared with what stands out"
    return ""


def verdict(row: Mapping[str, Any]) -> str:
    """``holds``, ``costs`` or ``fails``, by the change of perplexity against its standard error."""
    change, error = row["perplexity_change"], row["perplexity_change_stderr"]
    error = error if error == error else 0.0
    if change > FAILS + 2 * error or row["kl"] > FAILS:
        return "fails"
    return "holds" if abs(change) <= HOLDS + 2 * error and row["kl"] <= HOLDS_KL else "costs"


def advice(result: Mapping[str, Any]) -> list[str]:
    """Lines that name the outlying channels and say which of the measured formats fit."""
    rows = [row for row in result["rows"] if row.get("spec")]
    if not rows:
        return []
    outliers = result.get("outliers") or {}
    lines = []
    if "channels" in outliers:
        heading = (
            f"Channels of keys whose rms is {outliers['threshold']:g} times their head's median or more:"
        )
        found = named(outliers)
        if found:
            lines += [heading, *(f"  {line}" for line in found)]
        else:
            lines.append(f"{heading} none (largest {outliers['largest_ratio']:.1f} times).")
    groups: dict[str, list[str]] = {"holds": [], "costs": [], "fails": []}
    for row in rows:
        ordinary = [layer["key"]["ordinary_channels"] for layer in row.get("layers", ())]
        why = _granularity(row, outliers)
        lost = (
            f"; ordinary channels of keys off by {100 * statistics.fmean(ordinary):.1f}%" if ordinary else ""
        )
        groups[verdict(row)].append(
            f"  {row['format']}: {100 * row['perplexity_change']:+.1f}% ppl, KL {row['kl']:.4f}"
            + (f" ({why}{lost})" if why else "")
        )
    titles = {
        "holds": f"Holds here (perplexity within {100 * HOLDS:g}% beyond noise, KL at most {HOLDS_KL:g}):",
        "costs": "Costs something:",
        "fails": f"Fails (perplexity or KL beyond {FAILS:g}):",
    }
    for kind, title in titles.items():
        if groups[kind]:
            lines += [title, *groups[kind]]
    return lines

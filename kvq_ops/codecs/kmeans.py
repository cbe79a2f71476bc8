"""Weighted k-means on a line, the fit of a codebook.

On a line clusters are intervals, so that a step is a search for midpoints and differences of running sums. It starts from
weighted quantiles and draws no random numbers: the same data give the same entries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fit_entries(z: Tensor, weight: Tensor, count: int, steps: int = 100) -> Tensor:
    """Entries that make ``sum(weight * (z - nearest entry)^2)`` small (Lloyd's algorithm).

    Args:
        z: finite values, any shape.
        weight: of the same shape, not negative; where all are zero, each counts as one.

    Returns:
        fp32 ``[count]``, strictly ascending.
    """
    z, order = z.reshape(-1).double().sort()
    weight = weight.reshape(-1).double()[order]
    total = weight.sum()
    weight = torch.where(total > 0, weight, torch.ones_like(weight))
    mass = torch.nn.functional.pad(weight.cumsum(0), (1, 0))
    moment = torch.nn.functional.pad((weight * z).cumsum(0), (1, 0))
    share = (torch.arange(count, device=z.device, dtype=torch.float64) + 0.5) / count * mass[-1]
    entries = z[torch.searchsorted(mass, share).sub(1).clamp(0, z.shape[0] - 1)]
    for _ in range(steps):
        ends = torch.searchsorted(z, (entries[1:] + entries[:-1]) / 2, right=True)
        ends = torch.cat((ends.new_zeros(1), ends, ends.new_full((1,), z.shape[0])))
        inside = mass[ends[1:]] - mass[ends[:-1]]
        means = (moment[ends[1:]] - moment[ends[:-1]]) / inside
        moved = torch.where(inside > 0, means, entries)
        done = bool((moved - entries).abs().max() <= 1e-7 * (z[-1] - z[0]))
        entries = moved
        if done:
            break
    return _apart(entries.float())


def _apart(entries: Tensor) -> Tensor:
    """Ascending, with equal entries (too few distinct values) moved up by the smallest steps there are."""
    entries = entries.sort().values
    for i in range(1, entries.shape[0]):
        entries[i] = torch.maximum(entries[i], torch.nextafter(entries[i - 1], entries.new_tensor(torch.inf)))
    return entries

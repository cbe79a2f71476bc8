"""Values that lie far out, kept exactly beside the codes.

Of each vector the ``k`` values farthest from its centre are kept as index and value. The centre is zero, or for formats that
code between a lowest and a highest value the (lower) median: from the middle of the range both extremes would be equally far, and
the one that spoils the scale could stay. Where each channel has a centre and a half-range of its own, it is that centre, and
distance counts in half-ranges. Ties go to the lowest index. The codes are computed from the rest, with zero in the place of an
outlier.

An infinity is an outlier like any other and comes back as the largest number of the stored dtype; NaN is taken only when nothing
else is left, and is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def centred_distance(x: Tensor, *, symmetric: bool) -> Tensor:
    """How far each value lies from zero, or from the median of its vector."""
    return (x if symmetric else x - torch.nan_to_num(x.nanmedian(-1, keepdim=True).values)).abs()


def split_outliers(
    x: Tensor, count: int, distance: Tensor, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Take ``count`` outliers out of each vector.

    Args:
        distance: of every value from its centre, in the shape of ``x``.
        dtype: of the values that are kept.

    Returns:
        int16 indices in ascending order and values, ``[..., count]``, and ``x`` with NaN in their places.
    """
    distance = torch.nan_to_num(distance, nan=-1.0, posinf=torch.inf)
    # A stable sort keeps the lower index first among equals, which top-k does not promise.
    index = distance.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(-1).values
    largest = min(torch.finfo(dtype).max, torch.finfo(x.dtype).max)
    value = torch.nan_to_num(x.gather(-1, index)).clamp(-largest, largest).to(dtype)
    return index.to(torch.int16), value, x.scatter(-1, index, torch.nan)


def restore_outliers(decoded: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """``decoded`` with the outliers in their places."""
    return decoded.scatter(-1, index.long(), value.to(decoded.dtype))

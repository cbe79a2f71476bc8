"""Stores for the kernels' tests, and the comparison with what plain torch writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_ops.formats import Format, get_format
from kvq_ops.triton_kernels.append import append_
from tests.cpu.stores import implementation


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor], fmt: Format, context: str = "") -> None:
    """Equal planes. The minimum of 0.0 and -0.0 is either, depending on the order of a reduction; both read the same."""
    for plane, a, b in zip(fmt.planes, got, want, strict=True):
        same = torch.equal(a, b) or (
            a.is_floating_point() and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
        )
        assert a.dtype == b.dtype and same, f"{fmt.name} plane {plane.name} {context}"


def both(
    mine: list[Tensor], other: list[Tensor], position: Tensor, x: Tensor, name: str, context: str = ""
) -> None:
    """``x`` appended to two equal stores, one by the kernels and the other by torch, which stay equal."""
    fmt = get_format(name)
    implementation("append_", "torch").run(other, position, x, fmt)
    append_(mine, position, x, fmt)
    assert_same(mine, other, fmt, context)


def spread(store: Sequence[Tensor]) -> list[Tensor]:
    """The same planes as views of larger buffers, tokens before heads and channels apart."""
    views = []
    for plane in store:
        if plane.dim() == 4:
            wide = plane.new_full(
                (plane.shape[0], plane.shape[2] + 2, plane.shape[1] + 1, 2 * plane.shape[3]), 1
            )
            view = wide[:, 1:-1, 1:, ::2].transpose(1, 2)
        else:
            view = plane.new_full((*plane.shape, 2), 1)[..., 0]
        view.copy_(plane)
        views.append(view)
    return views

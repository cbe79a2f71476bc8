"""Random sequences of writes, views, moves and reads, against a dense shadow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvq_ops import QuantizedKV
from tests.handle.shadow import AXES, Pair, at

FORMATS = ("none", "int8_per_token_head", "fp8_per_token_head", "int4_group32")


class Walk:
    """A cache with its shadow, and a view of both that the next operation works on."""

    def __init__(self, data: Any, name: str, axes: str) -> None:
        self.data, self.pair = data, Pair(name, axes)
        self.views = [(self.pair.handle, self.pair.dense)]
        self.log: list[str] = []

    def number(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def pick(self) -> tuple[QuantizedKV, torch.Tensor]:
        # The newest view, mostly: what was cut from a cut.
        return self.views[-1 if self.number(0, 2) else self.number(0, len(self.views) - 1)]

    def values(self, shape: Any, axes: str) -> Any:
        return self.pair.values(list(shape), axes)

    def view(self) -> None:
        handle, dense = self.pick()
        axes = handle.axes
        kind = self.data.draw(st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4, 5]))
        if kind == 0:
            # Slices of tokens are where writes get lost.
            axis = axes.index("t") if "t" in axes and self.number(0, 3) else self.number(0, len(axes) - 1)
            if axes[axis] in "d1":
                return
            start, stop = self.number(-9, 4), self.data.draw(st.sampled_from([None, None, -1, 3, 5, 7, 9]))
            step = self.number(1, 3)
            index = [slice(None)] * axis + [slice(start, stop, step)]
            new = (handle[tuple(index)], dense[tuple(index)])
        elif kind == 1:
            axis = self.number(0, len(axes) - 1)
            if axes[axis] == "d" or handle.shape[axis] == 0:
                return
            i = self.number(-handle.shape[axis], handle.shape[axis] - 1)
            new = (handle.select(axis, i), dense.select(axis, i))
        elif kind == 2:
            dims = self.data.draw(st.permutations(range(len(axes))))
            new = (handle.permute(dims), dense.permute(dims))
        elif kind == 3 and len(axes) < 6:
            axis = self.number(0, len(axes))
            new = (handle.unsqueeze(axis), dense.unsqueeze(axis))
        elif kind == 4:
            axis = self.number(0, len(axes) - 1)
            if axes[axis] == "d":
                return
            new = (handle.squeeze(axis), dense.squeeze(axis))
        else:
            new = (handle.detach(), dense.detach())
        assert isinstance(new[0], QuantizedKV)
        self.views.append(new)

    def write(self) -> None:
        handle, dense = self.pick()
        axes = handle.axes
        kind = self.number(0, 5)
        if kind <= 1:
            raw, stored = self.values(handle.shape, axes)
            handle.copy_(raw)
            dense.copy_(stored)
        elif kind == 2:
            handle.zero_()
            dense.zero_()
        elif "t" in axes and handle.shape[axes.index("t")]:
            t = axes.index("t")
            tokens = handle.shape[t]
            count = self.number(1, tokens)
            where = self.data.draw(st.permutations(range(tokens)))[:count]
            shape = [count if letter == "t" else n for letter, n in zip(axes, handle.shape, strict=True)]
            raw, stored = self.values(shape, axes)
            if kind == 3:
                handle.index_copy_(t, torch.tensor(where), raw)
                dense.index_copy_(t, torch.tensor(where), stored)
            elif kind == 4 or "b" not in axes or not handle.shape[axes.index("b")]:
                index = torch.tensor([p - tokens if self.number(0, 1) else p for p in where])
                handle[at(axes, t=index)] = raw
                dense[at(axes, t=index)] = stored
            else:
                self.write_rows(handle, dense)

    def write_rows(self, handle: QuantizedKV, dense: torch.Tensor) -> None:
        axes = handle.axes
        b, t = axes.index("b"), axes.index("t")
        rows = torch.tensor(self.data.draw(st.permutations(range(handle.shape[b]))))
        positions = torch.tensor([self.number(0, handle.shape[t] - 1) for _ in rows])
        probe = dense[at(axes, b=rows, t=positions)]
        rest = axes.replace("b", "").replace("t", "")
        lead = min(b, t) if abs(b - t) == 1 else 0
        raw, stored = self.values(probe.shape, rest[:lead] + "1" + rest[lead:])
        handle[at(axes, b=rows, t=positions)] = raw
        dense[at(axes, b=rows, t=positions)] = stored

    def move(self) -> None:
        """Continue with a rearranged copy; views of the old cache are let go."""
        handle, dense = self.pick()
        axes = handle.axes
        axis = self.number(0, len(axes) - 1)
        size = handle.shape[axis]
        if axes[axis] in "d1" or "t" not in axes or size == 0:
            return
        kind = self.number(0, 3)
        if kind == 0:
            index = torch.tensor([self.number(0, size - 1) for _ in range(min(size, 4))])
            new = (handle.index_select(axis, index), dense.index_select(axis, index))
        elif kind == 1:
            shift = self.number(-3, 3)
            new = (handle.roll(shift, axis), dense.roll(shift, axis))
        elif kind == 2 and size < 6:
            new = (torch.cat([handle, handle], axis), torch.cat([dense, dense], axis))
        else:
            new = (handle.clone(), dense.clone())
        assert isinstance(new[0], QuantizedKV)
        self.views = [new]

    def check(self) -> None:
        for handle, dense in self.views:
            assert handle.shape == dense.shape
            assert torch.equal(handle.dequantize(), dense)
            assert bool((handle.length >= 0).all())
            tokens = handle.planes()[0].shape[2]
            assert bool((handle.length <= tokens).all())
            # Nothing lies beyond the length of its row, so attention may stop there.
            beyond = torch.arange(tokens) >= handle.length.unsqueeze(1)
            assert not handle.dequantize_canonical().masked_fill(~beyond[:, None, :, None], 0).any()


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_random_sequences(name: str, data: Any) -> None:
    walk = Walk(data, name, data.draw(st.sampled_from(AXES)))
    for _ in range(data.draw(st.integers(4, 12))):
        getattr(walk, data.draw(st.sampled_from(["view", "view", "write", "write", "write", "move"])))()
        walk.check()

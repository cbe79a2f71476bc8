"""Attention over exact and coded tokens, and such stores in compiled and exported graphs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kvq_ops
from kvq_ops import reference
from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.windows import (
    T,
    data,
    filled,
    window_state,
)

# ------------------------------------------------------------------------------------------------------------ attention

PAIRS = (
    ("test_keys_g8r8", "int4_group32+recent8"),
    ("test_keys_g8r5s3", "test_keys_g8r20s11"),
    ("int8_per_channel", "none"),
    ("int8_per_token_head+recent8+sink4", "nvfp4+sink2"),
    ("int3_group32+hadamard+recent3+sink2", "int4_group32+outlier5%+recent4"),
)


def ragged(name: str, x: Tensor, lengths: list[int]) -> list[Tensor]:
    return kvq_ops.QuantizedKV.from_dense(x, name, length=torch.tensor(lengths)).store


@pytest.mark.parametrize(("key_name", "value_name"), PAIRS)
def test_attention_is_tight(key_name: str, value_name: str) -> None:
    """Against float64 over what the oracle says the store holds; ragged rows, masks, windows, and the buffer as a whole."""
    lengths = [T, 21, 9]
    key, value = torch.randn(3, 2, T, 32), torch.randn(3, 2, T, 64)
    stores = [ragged(key_name, key, lengths), ragged(value_name, value, lengths)]
    dense = []
    for name, store in ((key_name, stores[0]), (value_name, stores[1])):
        fmt = get_format(name)
        if fmt.base is None or fmt.static_planes:
            dense.append(kvq_ops.dequantize(store, name).numpy())
        else:
            x = checks.array(key if name == key_name else value)
            rows = [window_state(fmt, x[r : r + 1], length)[2] for r, length in enumerate(lengths)]
            dense.append(np.concatenate(rows))
    query = torch.randn(3, 4, 5, 32)
    trimming = torch.zeros(T, dtype=torch.bool)
    trimming[:13] = True
    for options in (
        {},
        {"causal": True},
        {"causal": True, "window": 6, "softcap": 3.0},
        {"mask": torch.randn(3, 1, 5, T).masked_fill(torch.rand(3, 1, 5, T) < 0.3, -torch.inf)},
        {"mask": trimming},  # no query reaches token 13: what is read ends inside a group
        {"mask": trimming.view(1, 1, 1, T).expand(3, 1, 5, T), "scale": 0.3},
        {"mask": torch.zeros(5, T, dtype=torch.bool)},
        {"sinks": torch.tensor([0.0, 5.0, -math.inf, 1.0])},
    ):
        for use_length in (True, False):
            given: dict[str, Any] = {**options, "use_length": use_length}
            out = kvq_ops.attention(query, *stores, key_name, value_name, **given)
            known = lengths if use_length else None
            checks.assert_tight(out, checks.exact_attention(query, *dense, lengths=known, **options))
            wide = reference.attention(
                query, *stores, get_format(key_name), get_format(value_name), compute=torch.float64, **given
            )
            assert (wide - out.double()).abs().max() < 1e-5
    swapped = checks.exact_attention(query, dense[0], np.roll(dense[1], 1, 2), lengths=lengths)
    with pytest.raises(AssertionError):
        checks.assert_tight(kvq_ops.attention(query, *stores, key_name, value_name), swapped)


def test_a_mask_may_end_anywhere_in_a_group() -> None:
    name = "test_keys_g8r5s3"
    x, query = data(name), torch.randn(2, 2, 1, 32)
    store = filled(name, x, [T])
    dense = kvq_ops.dequantize(store, name).numpy()
    for reach in range(1, T + 1):
        mask = torch.arange(T) < reach
        out = kvq_ops.attention(query, store, store, name, name, mask=mask)
        checks.assert_tight(out, checks.exact_attention(query, dense, dense, mask=mask, lengths=[T] * 2))


# ---------------------------------------------------------------------------------------------------------- as operators


@pytest.mark.parametrize(
    "name", ["test_keys_g8r5s3", "kivi2_values", "int4_group32+outlier1%+hadamard+recent2+sink2"]
)
def test_opcheck(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(2, 2, 20, 32)
    store = filled(name, x, [17], capacity=24)
    kvq = torch.ops.kvq
    query = torch.randn(2, 4, 3, 32)
    for op, args, kwargs in (
        (kvq.quantize, (x, name), {}),
        (kvq.dequantize, (store, name, torch.float16), {}),
        (kvq.append_, (checks.copy(store), torch.arange(17, 20), x[:, :, 17:], name), {}),
        (
            kvq.append_,
            (fmt.empty_store(2, 2, 9, 32), torch.zeros(2, 1, dtype=torch.int64), x[:, :, :1], name),
            {},
        ),
        (
            kvq.attention,
            (query, store, store, name, name),
            {"mask": torch.rand(3, 24) > 0.5, "use_length": False},
        ),
        (
            kvq.attention,
            (query, store, kvq_ops.quantize(torch.randn(2, 2, 24, 64), "none"), name, "none"),
            {},
        ),
    ):
        results = torch.library.opcheck(op.default, args, kwargs)
        assert set(results.values()) == {"SUCCESS"}


class Step(nn.Module):
    """One decoding step over stores that are buffers."""

    def __init__(self, key_name: str, value_name: str, tokens: int) -> None:
        super().__init__()
        self.names, self.count = (key_name, value_name), []
        for side, name in zip("kv", self.names, strict=True):
            store = get_format(name).empty_store(1, 2, tokens, 32)
            self.count.append(len(store))
            for i, plane in enumerate(store):
                self.register_buffer(f"{side}{i}", plane)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        stores = [
            [getattr(self, f"{side}{i}") for i in range(n)] for side, n in zip("kv", self.count, strict=True)
        ]
        for store, name in zip(stores, self.names, strict=True):
            torch.ops.kvq.append_(store, position, x, name)
        out: Tensor = torch.ops.kvq.attention(x, *stores, *self.names, causal=True)
        return out


@pytest.mark.parametrize(
    "names", [("test_keys_g8r5s3", "int4_group32+recent4"), ("int8_per_channel", "mxfp4+sink2")]
)
@pytest.mark.parametrize("how", ["compile", "export"])
def test_compiled_and_exported_steps_equal_eager_ones(how: str, names: tuple[str, str]) -> None:
    eager, other = Step(*names, 40), Step(*names, 40)
    x = torch.randn(1, 2, 40, 32)
    with torch.no_grad():
        if how == "compile":
            torch._dynamo.reset()
            run: Any = torch.compile(other, backend="aot_eager", fullgraph=True)
        else:
            run = torch.export.export(other, (x[:, :, :1], torch.tensor([0]))).module()
        for t in range(36):
            token, position = x[:, :, t : t + 1], torch.tensor([t])
            assert torch.equal(run(token, position), eager(token, position))
    buffers = dict(run.named_buffers()) if how == "export" else dict(other.named_buffers())
    for name, plane in eager.named_buffers():
        assert torch.equal(plane, buffers[name]), name
    fmt = get_format(names[0])
    assert (
        int(eager.get_buffer(f"k{fmt.index('coded')}")) > 0
        and int(eager.get_buffer(f"k{len(fmt.planes) - 1}")) == 36
    )

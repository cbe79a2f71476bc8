"""Broken twins: the checks of attention must reject each fault that is planted in the kernels' sources, or they prove nothing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.runtime.errors import InterpreterError

from kvq_ops.triton_kernels import attention as launcher
from kvq_ops.triton_kernels import attention_kernel, merge, rotary, rotate, rows, scaled, stored, tiles
from tests.cpu.test_attention import filled
from tests.triton.planted import plant
from tests.triton.test_attention import check, in_pages

INT8, INT4 = ("int8_per_token_head",) * 2, ("int4_group32",) * 2
LOW = ("int8_per_token_head_asym_fp32",) * 2
WINDOW, SINKS = ("int8_per_token_head+recent5",) * 2, ("int8_per_token_head+recent5+sink3",) * 2
HALF = {"dtype": torch.float16}
MASK = torch.arange(40) % 3 != 0

# name: module, what is there, what is put there, formats, how it is called.
FAULTS: dict[str, tuple[ModuleType, str, str, tuple[str, str], dict[str, Any]]] = {
    "key scales dropped": (attention_kernel, " * k_factor[None, :]", "", INT8, {}),
    "value scales dropped": (attention_kernel, "p * v_factor[None, :]", "p", INT8, {}),
    "value scales of a tile mixed up": (
        attention_kernel, "(p * share[None, :])", "(p * (_ROOM / most))", INT8, HALF),
    "tile factor forgotten": (attention_kernel, "v) * (most * (1.0 / _ROOM))", "v) * (1.0 / _ROOM)", INT8, HALF),
    "key minima dropped": (attention_kernel, "s += q_sum[:, None] * k_low[None, :]", "pass", LOW, {}),
    "value minima dropped": (attention_kernel, "acc += below[:, None]", "pass", LOW, {}),
    "minima not rescaled": (attention_kernel, "below = below * shrink + ", "below = below + ", LOW, {"tokens": 90}),
    "sums not rescaled": (attention_kernel, "acc = acc * shrink[:, None]", "pass", INT8, {"tokens": 90}),
    "scale dropped": (attention_kernel, "s *= row_factor[:, None]", "pass", INT8, {}),
    "mask dropped": (attention_kernel, "s = tl.where(bias == float(\"-inf\"), bias, s + bias)", "pass", INT8, {"mask": MASK}),
    "mask ends the tokens": (attention_kernel, "tl.where(seen, token, low - 1)", "tl.where(seen, token - 1, low - 1)",
                             INT8, {"mask": torch.arange(40) < 20}),
    "the lowest number closes": (attention_kernel, "tl.maximum(bias * _LOG2E, _LOWEST)", "bias * _LOG2E", INT8,
                                 {"mask": torch.full((40,), torch.finfo(torch.float32).min)}),
    "causal shifted": (attention_kernel, "(token[None, :] <= newest[:, None])", "(token[None, :] < newest[:, None])",
                       INT8, {"causal": True}),
    "diagonal cut off": (attention_kernel, "queries + i_last + 1, end)", "queries + i_first + 1, end)", INT8, {"causal": True}),
    "window off by one": (attention_kernel, "> newest[:, None] - window)", ">= newest[:, None] - window)", INT8, {"window": 9}),
    "window cut short": (attention_kernel, "queries + i_first - window + 1, 0)", "queries + i_last - window + 2, 0)",
                         INT8, {"window": 9}),
    "one token too many": (attention_kernel, "(token < end_token)", "(token < end_token + 1)", INT8, {"lengths": [30]}),
    "no bound at all": (attention_kernel, "live = (token >= first_token) & (token < end_token)", "live = token >= first_token",
                        INT8, {}),
    "heads mixed up": (attention_kernel, "query_head = head * GROUP + r % GROUP", "query_head = r % GROUP * 2 + head", INT8, {}),
    "a part is lost": (attention_kernel, "tl.minimum((split + 1) * each, blocks)", "tl.minimum(split * each + 1, blocks)",
                       INT8, {"tokens": 90, "splits": 1}),
    "parts not weighted": (merge, "tl.exp2(m - base), 0.0)", "1.0, 0.0)", INT8, {"tokens": 90, "splits": 2}),
    "sums of parts not weighted": (merge, "weight * weight_sum", "weight_sum", INT8, {"tokens": 90, "splits": 2}),
    "sinks dropped": (merge, "total += tl.exp2(sink - base)", "pass", INT8,
                      {"tokens": 90, "splits": 2, "sinks": torch.ones(4)}),
    "sinks dropped without parts": (attention_kernel, "total = total * shrink + tl.exp2(sink - base)", "pass", INT8,
                                    {"sinks": torch.ones(4)}),
    "softcap dropped": (attention_kernel, "s = tanh(s / softcap) * (softcap * _LOG2E)", "s *= _LOG2E", INT8, {"softcap": 1.0}),
    "nibbles swapped": (stored, "low, high = nibbles_half(load_rows(rows, live, DIM // 2, DT // 2, 1, BOUND), ASM)",
                        "high, low = nibbles_half(load_rows(rows, live, DIM // 2, DT // 2, 1, BOUND), ASM)", INT4, {}),
    "tokens not brought back": (scaled, "                factor = power\n", "", INT4, HALF),
    "oldest waiting token missed": (tiles, "(token >= count) & (token < count + window)",
                                    "(token > count) & (token < count + window)", WINDOW, {}),
    "sinks read as codes": (tiles, "(token < first_tokens)", "(token < first_tokens - 1)", SINKS, {}),
    "outliers beside their places": (scaled, "channel[None, :] == where[:, None]", "channel[None, :] == where[:, None] + 1",
                                     ("int4_group32+outlier5%",) * 2, {}),
    "positions off by one": (rotary, "(at - 1)", "at", ("nuq4_keys", "none"), {}),
    "pages of the first token": (rows, "(token // PAGE)", "((start + n * 0) // PAGE)", INT8, {"page": 8}),
    "slots not within pages": (rows, "return page, start * 0, token % PAGE", "return page, start * 0, n % PAGE", INT8,
                               {"page": 12}),
    "signs of queries dropped": (rotate, "y *= channel_signs(channel)", "pass", ("turbo4", "none"), {}),
    "signs of the result dropped": (merge, "acc *= channel_signs(channel)", "pass", ("none", "turbo4"), {}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, right, wrong, names, options = FAULTS[fault]
    options = dict(options)
    tokens, splits = options.pop("tokens", 40), options.pop("splits", 0)
    lengths, page = options.pop("lengths", None), options.pop("page", 0)
    dtype = options.pop("dtype", torch.float32)
    if splits:
        monkeypatch.setattr(launcher, "count_splits", lambda *_: splits)
    stores = [filled(name, 1, 2, tokens, 32, lengths) for name in names]
    # Scales differ from token to token, and scores spread.
    if "scale" in right or "share" in right or "factor" in right or "power" in right:
        for store in stores:
            store[1].mul_(torch.logspace(-1, 1, tokens).view(1, 1, tokens, *[1] * (store[1].dim() - 3)))
    query = (torch.randn(1, 4, 3, 32) * 3).to(dtype)
    pages = in_pages(stores, names, page) if page else None
    check(query, stores, names, pages, **options)
    plant(monkeypatch, tmp_path, module, right, wrong)
    with pytest.raises((AssertionError, InterpreterError)) as caught:
        check(query, stores, names, pages, **options)
    # By its results, or by where it reads; a kernel that does not run at all would prove nothing.
    assert caught.type is AssertionError or "OutOfBounds" in str(caught.value), caught.value

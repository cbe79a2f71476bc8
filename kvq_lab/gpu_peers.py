"""Attention over bf16 by others, where they are installed: what the formats of this package are timed beside.

Each is a function ``(query [B, Hq, 1, D], key, value [B, Hkv, T, D]) -> call``, where ``call()`` gives ``[B, Hq, D]``. None is
needed: each raises ``ImportError`` where its package is not there, and whatever its version raises where that differs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PAGE = 16


def flashinfer(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """FlashInfer's decode over pages of 16 tokens in bf16, planned outside of what is timed."""
    package = importlib.import_module("flashinfer")
    batch, heads, tokens, dim = key.shape
    each = tokens // PAGE
    # [pages, 2, page, heads, dim], filled one half after the other.
    cache = key.new_empty((batch * each, 2, PAGE, heads, dim))
    for side, x in enumerate((key, value)):
        cache[:, side].view(batch, each, PAGE, heads, dim).copy_(x.transpose(1, 2).unflatten(1, (each, PAGE)))
    work = torch.empty(256 * 2**20, dtype=torch.uint8, device=key.device)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(work, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=key.device) * each,
        torch.arange(batch * each, dtype=torch.int32, device=key.device),
        torch.full((batch,), PAGE, dtype=torch.int32, device=key.device),
        query.shape[1],
        heads,
        dim,
        PAGE,
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
    )
    flat = query[:, :, 0].contiguous()
    call: Callable[[], Tensor] = lambda: wrapper.run(flat, cache)  # noqa: E731
    return call


def vllm(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """vLLM's Triton kernel over pages of 16 tokens in bf16, cut along the sequence where its version can."""
    try:
        module = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
    except ImportError:
        module = importlib.import_module("vllm.attention.ops.triton_unified_attention")
    batch, heads, tokens, dim = key.shape
    query_heads = query.shape[1]
    pools = [
        x.transpose(1, 2).reshape(batch * tokens // PAGE, PAGE, heads, dim).contiguous() for x in (key, value)
    ]
    table = torch.arange(batch * tokens // PAGE, dtype=torch.int32, device=key.device).view(batch, -1)
    flat = query[:, :, 0].contiguous()
    out = torch.empty_like(flat)
    scratch = functools.partial(torch.empty, dtype=torch.float32, device=key.device)
    # As many sequences as its backend cuts along the tokens: more fill the GPU as they are.
    parts, rows = 16, max(1, 128 // heads)
    given = {
        "q": flat,
        "k": pools[0],
        "v": pools[1],
        "out": out,
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=key.device),
        "max_seqlen_q": 1,
        "seqused_k": torch.full((batch,), tokens, dtype=torch.int32, device=key.device),
        "max_seqlen_k": tokens,
        "softmax_scale": dim**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": torch.ones(batch, heads, device=key.device),
        "v_descale": torch.ones(batch, heads, device=key.device),
        "seq_threshold_3D": rows,
        "num_par_softmax_segments": parts,
        "softmax_segm_output": scratch(rows, query_heads, parts, dim),
        "softmax_segm_max": scratch(rows, query_heads, parts),
        "softmax_segm_expsum": scratch(rows, query_heads, parts),
    }
    taken = asked_for(module.unified_attention, given)

    def call() -> Tensor:
        module.unified_attention(**taken)
        return out

    return call


def asked_for(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """What of ``given`` a function takes.

    Raises:
        TypeError: it asks for something else too: its version is not one that is known here.
    """
    parameters = inspect.signature(function).parameters
    needed = [name for name, one in parameters.items() if one.default is one.empty and name not in given]
    if needed:
        raise TypeError(f"{function.__name__} of this version also asks for {', '.join(needed)}")
    return {name: value for name, value in given.items() if name in parameters}


PEERS: tuple[tuple[str, Callable[..., Callable[[], Tensor]]], ...] = (
    ("FlashInfer bf16", flashinfer),
    ("vLLM Triton bf16", vllm),
)

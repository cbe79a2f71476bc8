"""Quantized KV caches for any PyTorch model: formats, operators, and a cache handle.

import kvq_ops
store = kvq_ops.quantize(keys, "int8_per_token_head")
out = kvq_ops.attention(query, store, values_store, "int8_per_token_head", "int8_per_token_head", causal=True)
"""

from __future__ import annotations

import cutlass_kernels

from . import cpu, errors, formats, triton_kernels
from .config import checked
from .formats import Format, KVFormat, get_format, parse_kv_format, register_format
from .handle import QuantizedKV
from .ops import append_, attention, dequantize, quantize
from .paged import paged_append_, paged_attention
from .registry import explain, use_implementation

__version__ = "0.1.0"

cpu.register_kernels()
triton_kernels.register_kernels()
cutlass_kernels.register_kernels()

__all__ = [
    "Format",
    "KVFormat",
    "QuantizedKV",
    "append_",
    "attention",
    "checked",
    "dequantize",
    "errors",
    "explain",
    "formats",
    "get_format",
    "paged_append_",
    "paged_attention",
    "parse_kv_format",
    "quantize",
    "register_format",
    "use_implementation",
]

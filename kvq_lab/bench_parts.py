"""What ``kvq bench`` measures unless told otherwise, as names and numbers that need no import to list."""

from __future__ import annotations

PARTS = ("decode", "prefill", "append", "linearity", "model")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
CONTEXTS = (512, 1024, 2048, 4096, 8192)
MODEL_FORMATS = ("int8_per_token_head", "fp8_per_token_head", "int4_group32", "nvfp4")
MODEL_DTYPES = ("float32", "bfloat16")
LLAMA_CACHES = ("f16", "q8_0", "q4_0")

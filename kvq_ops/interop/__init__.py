"""Caches that other systems store, read into stores of this toolkit, and back where they take them.

* ``vllm``: pages of vLLM and FlashInfer, int8 and fp8 per token and head, and NVFP4; read and write.
* ``llama_cpp``: q8_0 and q4_0 blocks; read and write.
* ``hf``: caches of Hugging Face transformers in the quanto and HQQ backends; read.

Codes and scales are copied, never computed again, unless a function says that it encodes or the caller asks for it by
``requantize=True``. Nothing here imports the systems themselves: they hand over plain tensors.
"""

from __future__ import annotations

from . import hf, llama_cpp, vllm

__all__ = ["hf", "llama_cpp", "vllm"]

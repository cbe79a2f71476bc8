"""What int8 per token and head does to a KV cache: the formula, the bytes, and the error of attention.

    python examples/kv_quantization_reference.py

Keys and values of 2 sequences, 4 heads, 16 tokens and 32 channels are stored by ``kvq_ops`` and, beside it, by the plain
formula ``s = amax / 127``, ``q = clamp(round(x / s), -127, 127)``. Both must agree in every bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

import kvq_ops

FORMAT = "int8_per_token_head"
BATCH, HEADS, TOKENS, HEAD_DIM = 2, 4, 16, 32


def plain_formula(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes ``[B, H, T, D]`` and fp32 scales ``[B, H, T]`` of ``x``, with nothing from ``kvq_ops``."""
    x = x.float()
    scale = x.abs().amax(-1).clamp_min(1e-8) / 127
    codes = (x / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    return codes, scale


def nbytes(*tensors: Tensor) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def main() -> None:
    torch.manual_seed(137)
    keys, values = (torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM).half() for _ in range(2))
    key_store, value_store = (kvq_ops.quantize(x, FORMAT) for x in (keys, values))

    # The planes of a store are plain tensors: codes, scales, and how many tokens each row holds.
    codes = nbytes(key_store[0], value_store[0])
    scales = nbytes(key_store[1], value_store[1])
    lengths = nbytes(key_store[2], value_store[2])
    before = nbytes(keys, values)
    print(f"fp16 keys and values    {before} bytes")
    print(f"int8 codes and scales   {codes} + {scales} bytes")
    print(f"ratio                   {before / (codes + scales):.3f}")
    print(f"row lengths             {lengths} bytes, whatever the number of tokens")

    for what, x, store in (("keys", keys, key_store), ("values", values, value_store)):
        formula_codes, formula_scale = plain_formula(x)
        same = torch.equal(store[0], formula_codes) and torch.equal(store[1], formula_scale)
        print(f"{what + ' by the formula':23} {'equal, bit for bit' if same else 'DIFFERENT'}")
        if not same:
            raise SystemExit(1)

    query = torch.randn(BATCH, HEADS, 1, HEAD_DIM)
    exact = torch.nn.functional.scaled_dot_product_attention(query, keys.float(), values.float())
    quantized = kvq_ops.attention(query, key_store, value_store, FORMAT, FORMAT)
    error = (quantized - exact).abs().max() / exact.abs().max()
    print(f"attention error         {100 * error:.2f}% of the largest output")


if __name__ == "__main__":
    main()

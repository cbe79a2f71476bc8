"""A plain module with cache buffers: find the caches, quantize them, compile, and read the report.

python examples/quantize_a_model.py
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import passes


class Attention(nn.Module):
    """Grouped-query attention over a static cache, written as anyone would write it."""

    def __init__(self, width: int = 64, heads: int = 4, kv_heads: int = 2, tokens: int = 64) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, kv_heads * self.head_dim)
        self.value = nn.Linear(width, kv_heads * self.head_dim)
        self.register_buffer("k_cache", torch.zeros(1, kv_heads, tokens, self.head_dim))
        self.register_buffer("v_cache", torch.zeros(1, kv_heads, tokens, self.head_dim))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        batch, count, _ = x.shape
        q = self.query(x).view(batch, count, self.heads, -1).transpose(1, 2)
        k = self.key(x).view(batch, count, self.kv_heads, -1).transpose(1, 2)
        v = self.value(x).view(batch, count, self.kv_heads, -1).transpose(1, 2)
        self.k_cache[:, :, position] = k
        self.v_cache[:, :, position] = v
        mask = torch.arange(self.k_cache.shape[2]) <= position.unsqueeze(1)
        out = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch, count, -1)


class Decoder(nn.Module):
    def __init__(self, layers: int = 2, tokens: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(tokens=tokens) for _ in range(layers))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, position)
        return x


def main() -> None:
    torch.manual_seed(0)
    dense = Decoder().eval()
    model = copy.deepcopy(dense)
    print(passes.quantize_kv_cache_(model, "int8_per_token_head", (torch.zeros(1, 1, 64), torch.tensor([0]))))

    step = torch.compile(model, backend="kvq", fullgraph=True)
    with torch.no_grad():
        for start, count in ((0, 8), (8, 1), (9, 1)):
            x, position = torch.randn(1, count, 64), torch.arange(start, start + count)
            expected = dense(x, position)
            error = (step(x, position) - expected).norm() / expected.norm()
            print(f"{count} token(s) at {start}: relative error {error:.1%}")
    print(passes.report())


if __name__ == "__main__":
    main()

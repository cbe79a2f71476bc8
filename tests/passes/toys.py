"""Small decoders with dense cache buffers, and the same with quantized ones, for tests of the passes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvq_ops.formats import parse_kv_format
from kvq_ops.handle import QuantizedKV

B, HQ, HKV, D, CAPACITY, WIDTH, VOCABULARY = 2, 4, 2, 32, 64, 64, 97


def write_index_copy(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    cache.index_copy_(2, position, new)
    return cache


class Layer(nn.Module):
    """Grouped-query attention over two cache buffers ``[B, Hkv, T, D]``, and a small MLP."""

    def __init__(
        self,
        write: Callable[[Tensor, Tensor, Tensor], Tensor] = write_index_copy,
        *,
        batch: int = B,
        capacity: int = CAPACITY,
        head_dim: int = D,
        persistent: bool = True,
        cached: bool = True,
    ) -> None:
        super().__init__()
        self.head_dim, self.write = head_dim, write
        self.q = nn.Linear(WIDTH, HQ * head_dim, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * HKV * head_dim, bias=False)
        self.out = nn.Linear(HQ * head_dim, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        if cached:
            shape = (batch, HKV, capacity, head_dim)
            self.register_buffer("k_cache", torch.zeros(shape), persistent=persistent)
            self.register_buffer("v_cache", torch.zeros(shape), persistent=persistent)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, _ = x.shape
        query = self.q(x).view(batch, tokens, HQ, self.head_dim).transpose(1, 2)
        key, value = self.kv(x).view(batch, tokens, 2, HKV, self.head_dim).unbind(2)
        return query, key.transpose(1, 2), value.transpose(1, 2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.project(x)
        keys = self.write(self.k_cache, position, key)
        values = self.write(self.v_cache, position, value)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return self.finish(x, out)


def causal_mask(position: Tensor, capacity: int) -> Tensor:
    """``[B or 1, 1, Tq, capacity]``: keys up to each query's own position."""
    slots = torch.arange(capacity, device=position.device)
    mask = slots <= position.unsqueeze(-1)
    return mask[None, None] if position.dim() == 1 else mask.unsqueeze(1)


class Decoder(nn.Module):
    """Token ids and positions to logits."""

    def __init__(self, layers: int = 2, layer: Callable[..., nn.Module] = Layer, **kwargs: object) -> None:
        super().__init__()
        self.capacity = int(kwargs.get("capacity", CAPACITY))  # type: ignore[call-overload]
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([layer(**kwargs) for _ in range(layers)])

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        x, mask = self.embedding(ids), causal_mask(position, self.capacity)
        for layer in self.layers:
            x = layer(x, position, mask)
        return F.linear(x, self.embedding.weight)


def quantized(model: nn.Module, format: str) -> nn.Module:
    """A copy of ``model`` whose buffers ``*k_cache`` and ``*v_cache`` are handles of the same content."""
    model = copy.deepcopy(model)
    formats = parse_kv_format(format)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if name.endswith(("k_cache", "v_cache")):
                row = formats.key if name.endswith("k_cache") else formats.value
                module._buffers[name] = QuantizedKV.from_dense(buffer, row, length=0)
    return model


def handles(model: nn.Module) -> list[QuantizedKV]:
    return [buffer for buffer in model.buffers() if isinstance(buffer, QuantizedKV)]


def chunks(batch: int, sizes: list[int], start: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Inputs for calls of ``sizes`` tokens one after the other."""
    calls = []
    for size in sizes:
        calls.append((torch.randint(VOCABULARY, (batch, size)), torch.arange(start, start + size)))
        start += size
    return calls

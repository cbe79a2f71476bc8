"""One small decoder, whose caches are kept as a spelling says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvq_ops  # noqa: F401  registers the operators

B, HQ, HK, T, D, WIDTH = 2, 4, 2, 12, 16, 24


@dataclass(frozen=True)
class Spelling:
    """How a model keeps its caches.

    Attributes:
        buffers: registers them on the model.
        update: ``(model, layer, keys, values, positions)``, both ``[B, Hk, n, D]``: stores them and gives all that
            the layer attends to, ``[B, Hk, T, D]``.
        mask: which of these each query sees, ``[n, T]`` or what broadcasts to the scores; ``None`` for all.
        layers: how many layers the model has.
        longest: the most tokens of one call, where they may vary under export; 0 where they may not.
        steps: ``(first position, tokens)`` of the calls to make.
    """

    buffers: Callable[[Decoder], None]
    update: Callable[[Decoder, int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    mask: Callable[[Decoder, Tensor], Tensor | None] | None = None
    layers: int = 1
    longest: int = T
    steps: tuple[tuple[int, int], ...] = ((0, 5), (5, 1), (6, 1), (7, 3), (10, 1))


class Decoder(nn.Module):
    """Layers of grouped-query attention over caches kept as ``spelling`` says.

    With ``fake`` set to the name of a format, keys and values are rounded to it before they are stored: what a quantized cache
    must come to, in plain torch.
    """

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling, self.fake = spelling, ""
        self.q = nn.ModuleList(nn.Linear(WIDTH, HQ * D, bias=False) for _ in range(spelling.layers))
        self.k = nn.ModuleList(nn.Linear(WIDTH, HK * D, bias=False) for _ in range(spelling.layers))
        self.v = nn.ModuleList(nn.Linear(WIDTH, HK * D, bias=False) for _ in range(spelling.layers))
        self.o = nn.ModuleList(nn.Linear(HQ * D, WIDTH, bias=False) for _ in range(spelling.layers))
        self.register_buffer("causal", torch.tril(torch.ones(T, T, dtype=torch.bool)))
        spelling.buffers(self)
        self.eval()

    def cache(self, name: str, *shape: int) -> None:
        self.register_buffer(name, torch.zeros(shape))

    def project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, _ = x.shape
        q = self.q[layer](x).view(batch, tokens, HQ, D).transpose(1, 2)
        k = self.k[layer](x).view(batch, tokens, HK, D).transpose(1, 2)
        v = self.v[layer](x).view(batch, tokens, HK, D).transpose(1, 2)
        if self.fake:
            k, v = fake_quantize(k, self.fake), fake_quantize(v, self.fake)
        return q, k, v

    def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.project(layer, x)
        keys, values = self.spelling.update(self, layer, k, v, position)
        mask = self.causal[position] if self.spelling.mask is None else self.spelling.mask(self, position)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return x + self.o[layer](out.transpose(1, 2).reshape(batch, tokens, -1))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for layer in range(self.spelling.layers):
            x = self.attend(layer, x, position)
        return x


def fake_quantize(x: Tensor, format: str) -> Tensor:
    """``x [B, H, n, D]`` as a cache in a format with a scale for each token gives it back."""
    return torch.ops.kvq.dequantize(torch.ops.kvq.quantize(x.contiguous(), format), format, x.dtype)

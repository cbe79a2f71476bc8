"""H2O on a Llama in plain torch, one row at a time: growing lists of tokens for each kv head, no cache, no masks.

Written from the paper's description (Zhang et al. 2023, section 4): each head keeps the newest tokens and those with the largest
sum of attention probabilities. Nothing here is shared with ``kvq_ops``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Head:
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class H2O:
    """One row of a Llama.

    Args:
        pads: padding in front of the row, which takes part in the count of tokens and is dropped first.
        lightest: keep the lightest instead: wrong.
    """

    def __init__(
        self,
        model: Any,
        budget: int,
        sinks: int,
        recent: int,
        slack: int = 1,
        pads: int = 0,
        lightest: bool = False,
    ) -> None:
        self.model, self.budget, self.sinks, self.recent, self.slack = model, budget, sinks, recent, slack
        self.sign = -1 if lightest else 1
        count = model.config.num_hidden_layers
        self.heads = [[Head() for _ in range(model.config.num_key_value_heads)] for _ in range(count)]
        self.pads = [pads] * count
        self.seen = 0

    @torch.no_grad()
    def step(self, ids: list[int]) -> Tensor:
        """Logits ``[N, V]`` of tokens that come together."""
        if not ids:
            return torch.zeros(0, self.model.config.vocab_size)
        body = self.model.model
        x = body.embed_tokens(torch.tensor(ids))
        at = torch.arange(self.seen, self.seen + len(ids))
        cos, sin = (t[0] for t in body.rotary_emb(x[None], at[None]))
        for index, layer in enumerate(body.layers):
            x = x + self._attention(index, layer.self_attn, layer.input_layernorm(x), cos, sin)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.seen += len(ids)
        return self.model.lm_head(body.norm(x))

    def _attention(self, index: int, block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dim = block.head_dim

        def heads(projected: Tensor) -> Tensor:
            return projected.view(len(x), -1, dim)

        def rotate(y: Tensor) -> Tensor:
            left, right = y[..., : dim // 2], y[..., dim // 2 :]
            return y * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]

        q, k, v = rotate(heads(block.q_proj(x))), rotate(heads(block.k_proj(x))), heads(block.v_proj(x))
        group = q.shape[1] // k.shape[1]
        out = torch.zeros_like(q)
        for h, head in enumerate(self.heads[index]):
            held = len(head.keys)
            for n in range(len(x)):
                head.keys.append(k[n, h])
                head.values.append(v[n, h])
                head.weights.append(0.0)
                head.positions.append(self.seen + n)
            for n in range(len(x)):
                reach = held + n + 1
                keys, values = torch.stack(head.keys[:reach]), torch.stack(head.values[:reach])
                for g in range(h * group, (h + 1) * group):
                    p = (keys @ q[n, g] * dim**-0.5).softmax(0)
                    out[n, g] = p @ values
                    for t in range(reach):
                        head.weights[t] += float(p[t])
        self._evict(index)
        return block.o_proj(out.flatten(1))

    def _evict(self, index: int) -> None:
        total = self.pads[index] + len(self.heads[index][0].keys)
        if total < self.budget + self.slack:
            return
        drop = total - self.budget
        gone = min(drop, self.pads[index])
        self.pads[index] -= gone
        for head in self.heads[index]:
            count = len(head.keys)
            loose = range(self.sinks, count - self.recent)
            light = sorted(loose, key=lambda t: (self.sign * head.weights[t], -t))[: drop - gone]
            for name in ("keys", "values", "weights", "positions"):
                setattr(head, name, [x for t, x in enumerate(getattr(head, name)) if t not in light])

"""Dense models that fake-quantize in plain torch, to compare models over stores with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvq_ops import ops
from kvq_ops.formats import get_format
from kvq_ops.handle import QuantizedKV


class FakeQuantizer(nn.Module):
    """Values through codes and back. Static scales are those of the first values, as a cache would keep them."""

    def __init__(self, format: str) -> None:
        super().__init__()
        self.format = get_format(format)
        self.static: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        store = self.format.empty_store(*x.shape, dtype=x.dtype)
        for i, scale in self.static.items():
            store[i].copy_(scale)
        ops.append_(store, torch.arange(x.shape[2]), x, self.format.name)
        self.static = {i: store[i] for i in self.format.static_planes}
        return ops.dequantize(store, self.format.name, x.dtype)


def fakes(format: str) -> nn.ModuleList:
    """One each for keys and values, or none."""
    return nn.ModuleList([FakeQuantizer(format), FakeQuantizer(format)] if format else [])


def with_stores(model: nn.Module, format: str) -> nn.Module:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if name.endswith("_cache"):
                module._buffers[name] = QuantizedKV.empty(buffer.shape, format)
    return model


def pair(make: Callable[[str], nn.Module], format: str) -> tuple[nn.Module, nn.Module]:
    """A model that fake-quantizes in plain torch, and the same weights over stores."""
    fake, stored = make(format), make("")
    stored.load_state_dict(fake.state_dict())
    return fake.eval(), with_stores(stored.eval(), format)


def compiled(model: Callable, **options) -> Callable:
    return torch.compile(model, backend="kvq", fullgraph=True, options={"lower": "eager", **options})


def assert_same_caches(stored: nn.Module, fake: nn.Module) -> None:
    dense = dict(fake.named_buffers())
    found = 0
    for name, buffer in stored.named_buffers():
        if isinstance(buffer, QuantizedKV):
            found += 1
            assert torch.equal(buffer.dequantize(), dense[name]), name
    assert found == sum(name.endswith("_cache") for name in dense)

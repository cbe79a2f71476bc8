"""SmolLM2 cut short, stepped through a cache, and fake-quantized in plain torch."""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvq_lab.calibrate import calibrate
from kvq_ops.calibration import Calibration
from kvq_ops.formats import Format, get_format, parse_kv_format
from kvq_ops.hf import QuantizedCache
from tests.ops.oracles import normal_table, random_signs

Step = Callable[[Tensor, int], Tensor]


def truncated(model: Any, layers: int) -> Any:
    """The first ``layers`` layers of ``model``, with its embedding and head."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        short = type(model)(config)
    short = short.to_empty(device="cpu")
    short.load_state_dict(model.state_dict(), strict=False)
    short.tie_weights()
    short.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    return short.eval().requires_grad_(False)


def stepper(model: Any, call: Callable[..., Any], cache: Any) -> Step:
    """A function of ids and their position, through ``call``, which is ``model`` or compiled from it."""
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names and "past_key_values" not in names else "past_key_values"

    def step(ids: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + ids.shape[1]).unsqueeze(0)
        logits: Tensor = call(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache}).logits
        return logits

    return step


def quantized_cache(model: Any, format: str, length: int) -> QuantizedCache:
    """A cache for ``length`` tokens; codebooks are fitted to a few tokens, which is enough to have some."""
    calibration = None
    if parse_kv_format(format).needs_calibration:
        known = _fitted.setdefault(model, {})
        if format not in known:
            with torch.enable_grad():
                known[format] = calibrate(model, torch.arange(100, 164).view(1, -1), format)
        calibration = known[format]
    return QuantizedCache(
        model.config, format, max_cache_len=length, dtype=torch.float32, calibration=calibration
    )


_fitted: weakref.WeakKeyDictionary[Any, dict[str, Calibration]] = weakref.WeakKeyDictionary()


def run(step: Step, ids: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Logits of calls of ``sizes`` tokens one after the other."""
    out, start = [], 0
    with torch.no_grad():
        for size in sizes:
            out.append(step(ids[:, start : start + size], start))
            start += size
    return out


class FakeQuantized(DynamicCache):
    """A growing dense cache whose new keys and values pass through quantize and dequantize in plain torch.

    Written from the formulas, for formats whose groups lie within one token, for groups of tokens that one call brings whole, and
    for float8 scales that the first call fixes.
    """

    def __init__(self, config: Any, format: str) -> None:
        super().__init__(config=config)
        self.format = parse_kv_format(format)
        self.scales: dict[tuple[int, str], Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        key = self.through(key_states, self.format.key, (layer_idx, "key"))
        value = self.through(value_states, self.format.value, (layer_idx, "value"))
        return super().update(key, value, layer_idx, *args, **kwargs)

    def through(self, x: Tensor, fmt: Format, where: tuple[int, str]) -> Tensor:
        if fmt.lossless:
            return x
        if "+hadamard" in fmt.name:
            turned = x @ hadamard(x.shape[-1])
            return self.through(turned, get_format(fmt.name.replace("+hadamard", "")), where) @ hadamard(
                x.shape[-1]
            )
        if fmt.name == "kivi4_keys+recent0":
            assert x.shape[2] % 32 == 0, "calls of whole groups"
            lines = self.through(x.transpose(2, 3), get_format("int4_group32"), where)
            return lines.transpose(2, 3)
        if fmt.name == "kivi4_values+recent0":
            return self.through(x, get_format("int4_group32"), where)
        if fmt.name == "turbo4":
            norm = x.norm(dim=-1, keepdim=True).half().float()
            signs = torch.from_numpy(random_signs(x.shape[-1]))
            turned = (x * signs) @ hadamard(x.shape[-1])
            table = torch.from_numpy(normal_table(4))
            z = turned * x.shape[-1] ** 0.5 / norm
            entries = table[(z.unsqueeze(-1) - table).abs().argmin(-1)]
            return (entries * norm / entries.norm(dim=-1, keepdim=True)) @ hadamard(x.shape[-1]) * signs
        if fmt.name == "int8_per_token_head":
            scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
            return (x / scale).round().clamp(-127, 127) * scale
        if fmt.name.startswith("int4_group"):
            size = int(fmt.name.removeprefix("int4_group"))
            groups = x.unflatten(-1, (-1, size))
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            scale, minimum = ((high - low) / 15).half().float(), low.half().float()
            codes = torch.where(scale > 0, (groups - minimum) / scale, 0.0).round().clamp(0, 15)
            return (codes * scale + minimum).flatten(-2)
        if fmt.name.startswith("fp8"):
            element = torch.float8_e5m2 if fmt.name == "fp8_e5m2" else torch.float8_e4m3fn
            largest = torch.finfo(element).max
            if fmt.name == "fp8_per_token_head":
                scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / largest
            else:
                axes = (0, 2, 3) if fmt.name == "fp8_per_head" else (0, 1, 2, 3)
                fitted = x.abs().amax(axes, keepdim=True).clamp(min=1e-8) / largest
                scale = self.scales.setdefault(where, fitted)
            return (x / scale).clamp(-largest, largest).to(element).float() * scale
        if fmt.name == "nvfp4":
            scale = self.scales.setdefault(where, x.abs().amax().clamp(min=1e-8) / (448 * 6))
            blocks = x.unflatten(-1, (-1, 16))
            factor = (blocks.abs().amax(-1, keepdim=True) / (6 * scale)).clamp(max=448)
            factor = factor.to(torch.float8_e4m3fn).float() * scale
            scaled = torch.where(factor > 0, blocks / factor, 0.0)
            return (e2m1(scaled) * factor).flatten(-2)
        raise NotImplementedError(f"write the formula of {fmt.name} here, from the table of formats")


def hadamard(n: int) -> Tensor:
    """Sylvester's matrix over ``sqrt(n)``, entry by entry: the parity of ``i & j`` is its sign."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    return torch.tensor(signs, dtype=torch.float32) / math.sqrt(n)


def e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of ``x``; ties to the even code."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (size / step).round().mul(step).clamp(max=6) * x.sign()

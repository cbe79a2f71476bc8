"""Add a format and an implementation, and use both through torch.compile.

The format keeps int8 codes with one bfloat16 scale for 16 channels. It is one row and one codec; the operators, the cache handle
and the graph pass know nothing of it. The implementation is a plain function that the registry prefers where it applies.

    python examples/author_a_format.py
"""

from __future__ import annotations

import types
from collections.abc import Mapping

import torch
from quantize_a_model import Decoder
from torch import Tensor

import kvq_ops
import passes
from kvq_ops import codecs, reference
from kvq_ops.formats import Format, Plane
from kvq_ops.registry import Implementation, Request, register

GROUP = 16


def calibrate(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    return {}


def encode(x: Tensor, fmt: Format, static: Mapping[str, Tensor]) -> dict[str, Tensor]:
    groups = x.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1).clamp_min(1e-8) / 127).bfloat16()
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
    return {"codes": codes.flatten(-2).to(torch.int8), "scale": scale}


def decode(planes: Mapping[str, Tensor], fmt: Format) -> Tensor:
    groups = planes["codes"].float().unflatten(-1, (-1, GROUP))
    return (groups * planes["scale"].float().unsqueeze(-1)).flatten(-2)


def add_format() -> Format:
    codec = types.SimpleNamespace(calibrate=calibrate, encode=encode, decode=decode)
    codecs.register_codec("example_int8_groups", codec)
    return kvq_ops.register_format(
        Format(
            "example_int8_group16",
            "example_int8_groups",
            8,
            (Plane("codes", "BHTD", torch.int8), Plane("scale", "BHTD", torch.bfloat16, per=GROUP)),
            group=GROUP,
            pack=GROUP,
            summary="int8, one bfloat16 scale for 16 channels of a token",
        )
    )


calls = 0


def run(*args: object, **kwargs: object) -> Tensor:
    """Stands for a kernel: counts its calls and lets the reference do the work."""
    global calls
    calls += 1
    return reference.attention(*args, **kwargs)  # type: ignore[arg-type]


def refuses(request: Request) -> str | None:
    return None if request.dtype is torch.float32 else f"{request.dtype}: float32 only"


def main() -> None:
    torch.manual_seed(0)
    row = add_format()
    register(Implementation("example", "attention", run, refuses, priority=100))
    print(kvq_ops.explain("attention", row, row, head_dim=16))
    print(kvq_ops.explain("attention", row, row, head_dim=16, dtype=torch.float16))

    model = Decoder().eval()
    passes.quantize_kv_cache_(model, row.name, (torch.zeros(1, 1, 64), torch.tensor([0])))
    step = torch.compile(model, backend="kvq", fullgraph=True)
    with torch.no_grad():
        step(torch.randn(1, 8, 64), torch.arange(8))
    print(passes.report())
    print(f"the implementation ran {calls} times, {row.bits_per_value(16):.1f} bits a value")


if __name__ == "__main__":
    main()

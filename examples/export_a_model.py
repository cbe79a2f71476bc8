"""Export a model, quantize the caches of the program, package it with AOTInductor and run the package.

python examples/export_a_model.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from quantize_a_model import Decoder

import passes


def main() -> None:
    torch.manual_seed(0)
    model = Decoder(tokens=4096).eval()
    example = (torch.randn(1, 1, 64), torch.tensor([0]))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(model, example)
        quantized = passes.quantize_exported(program, "key=int8_per_token_head,value=fp8_per_token_head")
        sizes = []
        for name, one in (("dense", program), ("quantized", quantized)):
            path = Path(folder) / f"{name}.pt2"
            torch.export.save(one, path)
            sizes.append(path.stat().st_size)
        print(
            f"file: {sizes[0] >> 10} KiB dense, {sizes[1] >> 10} KiB quantized; buffers of the first layer:"
        )
        print("  " + ", ".join(n for n in quantized.state_dict if n.startswith("layers.0.") and "cache" in n))
        package = torch._inductor.aoti_compile_and_package(
            quantized, package_path=str(Path(folder) / "model.pt2")
        )
        run = torch._inductor.aoti_load_package(package)
        eager = quantized.module()
        for at in range(3):
            x, position = torch.randn(1, 1, 64), torch.tensor([at])
            same = torch.allclose(run(x, position), eager(x, position), atol=1e-6)
            print(f"step {at}: package equals eager: {same}")


if __name__ == "__main__":
    main()

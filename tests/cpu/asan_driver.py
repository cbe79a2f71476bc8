"""Every kernel once over stores of exact size, for a run under AddressSanitizer; see ``test_asan``."""

from __future__ import annotations

import torch

from kvq_ops.formats import get_format
from tests.cpu.stores import NAMES, empty, fits, implementation


def main() -> None:
    torch.set_num_threads(2)
    ran = 0
    for name in NAMES:
        fmt = get_format(name)
        for dim in (2, 7, 16, 24, 33, 64, 72, 128):
            if not fits(fmt, dim):
                continue
            store = empty(name, 2, 2, 67, dim)
            for start, stop in ((0, 65), (65, 66), (66, 67)):
                x = torch.randn(2, 2, stop - start, dim)
                implementation("append_", "cpu").run(store, torch.arange(start, stop), x, fmt)
            implementation("dequantize", "cpu").run(store, fmt, torch.float16)
            for heads, queries in ((2, 1), (8, 1), (6, 11)):
                for options in ({"causal": True}, {"mask": torch.rand(queries, 67) < 0.8, "softcap": 2.0}):
                    query = torch.randn(2, heads, queries, dim)
                    out = implementation("attention", "cpu").run(query, store, store, fmt, fmt, **options)
                    assert out.isfinite().all(), name
            ran += 1
    print("ran", ran)


if __name__ == "__main__":
    main()

"""What reading tiles costs in machine code, where it is easily lost: masks, keys that are turned, 3-bit codes."""

from __future__ import annotations

from tests.triton.offline import VERSIONS, Case, compiled, matrix

ATTEND = "tests.triton.attention_launches:attend"

# Tokens of a tile, and lane instructions for each number, keys and values together, at most.
COSTS = {
    "bool mask": ({"formats": "int8_per_token_head", "mask": "bool"}, 64, 6.5),
    "float mask": ({"formats": "int4_group32", "mask": "float16"}, 64, 7.5),
    "turned keys": ({"formats": "key=nuq4_keys,value=none"}, 32, 11.0),
    "int3": ({"formats": "int3_group32"}, 64, 8.5),
}


@matrix("sm_90", versions=VERSIONS[:1])
def test_costs(target: str, version: str) -> None:
    made = compiled(
        [Case(name, ATTEND, arguments, loops=True) for name, (arguments, _, _) in COSTS.items()],
        target,
        version,
    )
    for name, (_, block, ceiling) in COSTS.items():
        assert not isinstance(made[name], str), made[name]
        kernel = next(kernel for kernel in made[name] if kernel.name == "attend_kernel")
        assert kernel.stack == 0, f"{name}: {kernel.stack} bytes spilled"
        assert kernel.count("cp.async.c"), f"{name}: nothing is loaded ahead"
        cost = kernel.loop * kernel.warps * 32 / (block * 2 * 128)
        assert 0.5 < cost <= ceiling, f"{name}: {cost:.2f} lane instructions for each number"
        if name == "int3":
            # A multiprocessor has 16 converters for 128 lanes.
            assert not kernel.count(r"cvt\.rn\.f(16|32)\.[su]")

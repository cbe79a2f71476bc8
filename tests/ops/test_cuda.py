"""The same bytes and the same attention on CUDA, where a machine has it."""

from __future__ import annotations

import pytest
import torch

import kvq_ops
from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.attention_cases import OPTIONS, case
from tests.ops.codec_data import KINDS, make

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", checks.NAMES)
def test_codes_and_scales_equal_the_oracle(name: str, kind: str) -> None:
    """Among others a division by a Python number: CUDA multiplies by its reciprocal, which moves scales by a bit."""
    fmt = get_format(name)
    for head_dim in (64, 100):
        for dtype in checks.DTYPES:
            x = make(kind, (2, 2, 3, head_dim), dtype)
            want = checks.expected(fmt, x)
            store = kvq_ops.quantize(x.cuda(), name)
            checks.assert_planes(store, fmt, want, f"{kind} D={head_dim} {dtype}")
            appended = [p.cuda() for p in fmt.empty_store(2, 2, 3, head_dim, dtype=dtype)]
            kvq_ops.append_(appended, torch.arange(3, device="cuda"), x.cuda(), name)
            checks.assert_planes(appended, fmt, want, f"append_ {kind} D={head_dim} {dtype}")
            decoded = kvq_ops.dequantize([p.cpu() for p in store], name, dtype)
            assert torch.equal(kvq_ops.dequantize(store, name, dtype).cpu(), decoded)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["none", "int8_per_token_head", "int4_group32"])
def test_attention(name: str, option: str) -> None:
    made = case(name, lengths=[9, 4], **OPTIONS[option]())
    moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in made.options.items()}
    out = made.run(
        query=made.query.cuda(),
        key_store=[p.cuda() for p in made.key_store],
        value_store=[p.cuda() for p in made.value_store],
        **moved,
    )
    made.check_tight(out.cpu())

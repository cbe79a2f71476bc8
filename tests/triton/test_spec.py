"""What the kernels refuse before they are asked to do it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvq_ops.formats import get_format
from kvq_ops.triton_kernels.spec import Spec, spec_of


@pytest.mark.parametrize("codec", ["float8", "codebook", "block_scaled"])
def test_groups_of_tokens_are_of_integers(codec: str) -> None:
    """No row has such groups of anything else; one that does would be coded by a rule that the kernels lack."""
    fmt = get_format("int8_channel32_sym+recent32")
    assert fmt.base is not None and isinstance(spec_of(fmt), Spec)
    element = torch.float8_e4m3fn if codec != "codebook" else None
    change = {"codec": codec, "element": element, "bits": 4 if codec == "codebook" else 8}
    names = {"codebook": "half_range", "block_scaled": "exponent"}
    planes = tuple(replace(p, name=names.get(codec, "scale")) if p.name == "scale" else p for p in fmt.planes)
    if codec == "codebook":
        planes = tuple(replace(p, per=2) if p.name == "codes" else p for p in planes)
    made = replace(
        fmt, name="made_up", planes=planes, base=replace(fmt.base, planes=planes[:-2], **change), **change
    )
    reason = spec_of(made)
    assert isinstance(reason, str) and f"groups of tokens by the rule of codec {codec!r}" in reason

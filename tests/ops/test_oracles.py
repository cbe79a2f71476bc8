"""The numpy oracles of these tests agree with the golden one wherever that has the format, and miss no codec."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch

from kvq_ops import formats
from kvq_ops.formats import Format, Plane, get_format
from tests.ops import checks, oracle_numbers, oracles
from tests.ops.codec_data import KINDS, make
from tests.ops.oracle_numbers import F32

# The golden oracle neither saturates nor computes logarithms next to the ends of fp32.
WITHIN_RANGE = [kind for kind in KINDS if kind not in ("huge", "subnormal")]


def assert_golden(name: str, x: np.ndarray, dense: np.ndarray, **planes: np.ndarray) -> None:
    fmt = get_format(name)
    fmt = fmt.base or fmt
    ours = oracles.expected(fmt, x)
    for plane, want in planes.items():
        assert np.array_equal(ours[plane], want), f"{name} {plane}"
    assert np.array_equal(oracles.decoded(fmt, ours), dense), name


@pytest.mark.parametrize("kind", WITHIN_RANGE)
def test_the_oracles_agree_with_the_golden_one(kind: str) -> None:
    x = oracle_numbers.array(make(kind, (1, 2, 40, 96)))
    codes, scale = oracle.int8_per_token_head_encode(x)
    assert_golden(
        "int8_per_token_head", x, oracle.int8_per_token_head_decode(codes, scale), codes=codes, scale=scale
    )
    values, scale = oracle.fp8_per_token_head_encode(x)
    assert_golden("fp8_per_token_head", x, values * scale[..., None], scale=scale)
    for name, bits, group in (
        ("int4_group32", 4, 32),
        ("int4_group64", 4, 64),
        ("int4_per_token_head", 4, 96),
        ("int3_group32", 3, 32),
        ("int2_group32", 2, 32),
    ):
        codes, scale, low = oracle.asymmetric_encode(x, bits, group)
        dense = oracle.asymmetric_decode(codes, scale, low, group)
        assert_golden(name, x, dense, codes=oracle.pack(codes, bits), scale=scale, minimum=low)
    for name, bits in (("kivi4_keys", 4), ("kivi2_keys", 2)):
        codes, scale, low = oracle.asymmetric_encode(x, bits, 32, axis=2)
        dense = oracle.asymmetric_decode(codes, scale, low, 32, axis=2)
        assert_golden(name, x, dense, codes=oracle.pack(codes, bits), scale=scale, minimum=low)
    for name, element in (("mxfp4", "e2m1"), ("mxfp8", "e4m3")):
        values, exponent = oracle.mx_encode(x, element)
        assert_golden(name, x, oracle.mx_decode(values, exponent), exponent=exponent + 127)
    g = oracles.calibrated(get_format("nvfp4"), x)["decode_scale"][0]
    if g:
        codes, sf = oracle.nvfp4_encode(x, g)
        faint = np.repeat(sf == 0, 16, -1)
        ours = oracles.expected(get_format("nvfp4"), x)
        got = np.where(faint, codes, oracles.unpacked(ours["codes"], 4))
        assert np.array_equal(got, codes), "beside blocks that the golden oracle erases"
        assert kind == "one_outlier" or not faint.any() or not x.any()


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_the_normal_codebook_is_lloyd_and_maxs(bits: int) -> None:
    _, _, best = oracle.lloyd_max(bits, steps=60)
    table = oracles.normal_table(bits).astype(np.float64)
    xs = np.linspace(-8, 8, 400001)
    p = np.exp(-xs * xs / 2)
    error = float((((xs - table[oracles.nearest(xs, table)]) ** 2) * p).sum() / p.sum())
    assert error <= best * (1 + 1e-6)
    assert error == pytest.approx({2: 0.1175, 3: 0.03455, 4: 0.00950}[bits], rel=2e-3)
    figures = {2: [0.4528, 1.5105], 3: [0.2452, 0.7561, 1.3440, 2.1521]}.get(bits, [])
    # Published to four digits, after fewer iterations than these.
    assert np.allclose(oracles.normal_table(bits)[2 ** (bits - 1) :][: len(figures)], figures, atol=3e-4)


@pytest.mark.parametrize("d", [1, 2, 64, 96])
def test_butterflies_are_hadamards(d: int) -> None:
    n = d & -d
    x = np.random.default_rng(0).standard_normal((5, d)).astype(F32)
    assert np.allclose(oracles.butterflies(x), x @ np.kron(np.eye(d // n), oracle.hadamard(n)), atol=1e-6)


def test_every_float8_byte_decodes_to_its_value() -> None:
    for element, table in checks.MAGNITUDES.items():
        codes = torch.arange(len(table), dtype=torch.uint8)
        for sign, byte in ((1, codes), (-1, codes + 128)):
            assert np.array_equal(byte.view(element).float().numpy(), sign * table)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_unpacking_undoes_packing(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 5, 24)).astype(np.uint8)
    assert np.array_equal(oracles.unpacked(oracle.pack(codes, bits), bits), codes)


def test_a_row_without_an_oracle_fails() -> None:
    row = Format("made_up", "unheard_of", 8, (Plane("codes", "BHTD", torch.uint8),))
    with pytest.raises(pytest.fail.Exception, match="no oracle"):
        checks.expected(row, torch.zeros(1, 1, 1, 8))
    assert {get_format(n).codec for n in formats.names()} <= set(oracles.ENCODERS)

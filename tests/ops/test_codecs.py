"""Codes, scales and decoded values, bit for bit against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvq_ops
from kvq_ops import registry
from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.checks import DTYPES, F32, LISTED, NAMES
from tests.ops.codec_data import E2M1_TIES, HEAD_DIMS, KINDS, make


def one_of_them_in_single_rows(*kinds: str) -> pytest.MarkDecorator:
    """The first kind of values goes through the kernels row by row, the others in tiles of many rows (``whole_tiles``)."""
    first = pytest.param(kinds[0], marks=pytest.mark.single_rows)
    return pytest.mark.parametrize("kind", [first, *kinds[1:]])


@one_of_them_in_single_rows(*KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", checks.implementations("quantize"))
def test_codes_and_scales_equal_the_oracle(implementation: str, name: str, kind: str) -> None:
    fmt = get_format(name)
    ran = 0
    for head_dim in checks.head_dims(fmt, *HEAD_DIMS):
        for dtype in DTYPES:
            if checks.refusal(implementation, "quantize", [fmt], [head_dim], dtype):
                continue
            x = make(kind, (2, 2, 3, head_dim), dtype)
            with registry.use_implementation(implementation):
                store = kvq_ops.quantize(x, name)
            checks.assert_planes(store, fmt, checks.expected(fmt, x), f"{kind} D={head_dim} {dtype}")
            assert store[-1].tolist() == [3, 3]
            assert [p.dtype for p in store] == fmt.plane_dtypes(dtype)
            ran += 1
    if not ran:
        pytest.skip(f"{implementation} refuses {name} here")


@one_of_them_in_single_rows("random", "huge", "all_positive", "e2m1_ties")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", checks.implementations("append_"))
def test_append_writes_the_same_codes(implementation: str, name: str, kind: str) -> None:
    fmt = get_format(name)
    for head_dim in checks.head_dims(fmt, 64, 100):
        if checks.refusal(implementation, "append_", [fmt], [head_dim], torch.float32):
            pytest.skip(f"{implementation} refuses {name} here")
        x = make(kind, (2, 2, 3, head_dim))
        store = fmt.empty_store(2, 2, 7, head_dim)
        untouched = checks.copy(store)
        with registry.use_implementation(implementation):
            kvq_ops.append_(store, torch.tensor([4, 2, 5]), x, name)
        want = checks.expected(fmt, x)
        for plane, tensor, before in zip(fmt.planes[:-1], store, untouched, strict=False):
            got = checks.array(tensor)
            if plane.per_token:
                assert np.array_equal(got[:, :, [4, 2, 5]], want[plane.name]), plane.name
                assert torch.equal(tensor[:, :, [0, 1, 3, 6]], before[:, :, [0, 1, 3, 6]]), plane.name
            else:
                assert np.array_equal(got, want[plane.name]), plane.name
        assert store[-1].tolist() == [6, 6]


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 64), (3, 1, 1, 96), (1, 3, 2, 100), (2, 2, 0, 64), (0, 2, 3, 64), (2, 0, 3, 64)]
)
@pytest.mark.parametrize("name", LISTED)
def test_small_and_empty_shapes(name: str, shape: tuple[int, ...]) -> None:
    fmt = get_format(name)
    shape = (*shape[:3], *checks.head_dims(fmt, shape[3]))
    x = torch.randn(shape)
    store = kvq_ops.quantize(x, name)
    assert [tuple(p.shape) for p in store] == fmt.plane_shapes(*shape)
    assert store[-1].tolist() == [shape[2]] * shape[0]
    if x.numel():
        checks.assert_planes(store, fmt, checks.expected(fmt, x), str(shape))
    else:
        assert all(not store[i].any() for i in fmt.static_planes), "nothing was there to fit a scale to"
    assert kvq_ops.dequantize(store, name).shape == shape


@pytest.mark.parametrize("name", LISTED)
def test_non_contiguous_inputs_give_the_same_codes(name: str) -> None:
    fmt = get_format(name)
    base = torch.randn(2, 5, 3, 192)
    views = {
        "heads last": base[..., :64].transpose(1, 2),
        "every second channel": base[..., ::2],
        "every second token": base[:, :, ::2, :64],
        "expanded heads": base[:, :1, :, :64].expand(2, 4, 3, 64),
        "middle": base[:, 1:3, 1:, 64:128],
    }
    for what, view in views.items():
        x = view.contiguous()
        checks.assert_same_planes(kvq_ops.quantize(view, name), kvq_ops.quantize(x, name), fmt, what)
        stores = [fmt.empty_store(*x.shape) for _ in range(2)]
        position = torch.arange(x.shape[2])
        kvq_ops.append_(stores[0], position, view, name)
        kvq_ops.append_(stores[1], position, x, name)
        checks.assert_same_planes(stores[0], stores[1], fmt, what)


@pytest.mark.parametrize("name", LISTED)
def test_append_into_a_store_of_views(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(2, 2, 3, 64)
    plain = fmt.empty_store(2, 2, 6, 64)
    # Per-token planes with heads and tokens stored the other way round.
    views = [p.transpose(1, 2).contiguous().transpose(1, 2) if p.dim() > 2 else p.clone() for p in plain]
    for store in (plain, views):
        kvq_ops.append_(store, torch.tensor([[0, 1, 2], [3, 4, 5]]), x, name)
    checks.assert_same_planes(views, plain, fmt)
    assert torch.equal(kvq_ops.dequantize(views, name), kvq_ops.dequantize(plain, name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", checks.implementations("dequantize"))
def test_decoding_equals_the_oracle(implementation: str, name: str) -> None:
    fmt = get_format(name)
    for kind in ("random", "one_outlier", "subnormal", "huge"):
        for head_dim in checks.head_dims(fmt, 64, 100):
            for dtype in DTYPES:
                if checks.refusal(implementation, "dequantize", [fmt], [head_dim], dtype):
                    pytest.skip(f"{implementation} refuses {name} here")
                store = kvq_ops.quantize(make(kind, (2, 2, 3, head_dim), dtype), name)
                with registry.use_implementation(implementation):
                    got = kvq_ops.dequantize(store, name, dtype)
                want = checks.decoded(fmt, store)
                largest = torch.finfo(dtype).max
                want = torch.from_numpy(np.clip(want, -largest, largest).astype(F32)).to(dtype)
                if implementation == "triton" and fmt.rotation:
                    # Another order of sums, and one rounding of the result.
                    unit = 2.0**-21 + (torch.finfo(dtype).eps if dtype is not torch.float32 else 0.0)
                    size = want.float().abs().amax(-1, keepdim=True)
                    assert got.dtype == dtype and ((got.float() - want.float()).abs() <= unit * size).all(), (
                        kind
                    )
                    continue
                assert got.dtype == dtype and torch.equal(got, want), f"{kind} D={head_dim} {dtype}"


def test_golden_vectors() -> None:
    """Section 2.13 of the format notes, the ones that this table stores."""
    codes, scale, _ = kvq_ops.quantize(
        torch.tensor([1.0, -2.0, 3.0, -4.0]).view(1, 1, 1, 4), "int8_per_token_head"
    )
    assert codes.flatten().tolist() == [32, -64, 95, -127]
    assert scale.view(torch.int32).item() == 0x3D010204
    x = torch.zeros(1, 1, 1, 16)
    x[..., 0], x[..., 1:8] = 448 * 6, torch.tensor(E2M1_TIES, dtype=torch.float32) * 448
    fmt = get_format("nvfp4")
    store = kvq_ops.quantize(x, "nvfp4")
    assert checks.element_codes(fmt, store).flatten().tolist()[1:8] == [0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("name", NAMES)
def test_E4_head_dims(name: str) -> None:
    """Any head size works, or is refused before anything is allocated."""
    fmt = get_format(name)
    for head_dim in (16, 24, 33, 63, 64, 80, 96, 100, 256):
        x = torch.randn(1, 2, 3, head_dim)
        if head_dim % fmt.pack:
            for make_store in (
                lambda d=head_dim: fmt.empty_store(1, 2, 3, d),
                lambda x=x: kvq_ops.quantize(x, name),
            ):
                with pytest.raises(kvq_ops.errors.HeadDimError, match=str(head_dim)):
                    make_store()
        else:
            checks.assert_planes(kvq_ops.quantize(x, name), fmt, checks.expected(fmt, x), f"D={head_dim}")

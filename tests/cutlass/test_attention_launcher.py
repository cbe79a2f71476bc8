"""What the launcher plans, hands on and refuses; and that the host function passes on what the simulator was given."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import kvq_ops
from cutlass_kernels import attention as launcher
from cutlass_kernels import build
from kvq_ops import reference, registry
from kvq_ops.errors import ImplementationError
from kvq_ops.formats import get_format
from kvq_ops.registry import Request
from tests.ops.attention_cases import OPTIONS, Case, case


def _request(
    formats: tuple[str, ...], dims: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> Request:
    return Request("attention", device, tuple(map(get_format, formats)), dims, dtype)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (_request(("nvfp4", "nvfp4"), (128, 128), device="cpu"), "tensors on cpu"),
        (_request(("nvfp4", "int4_group32"), (128, 128)), "int4_group32"),
        (_request(("mxfp4", "mxfp4"), (128, 128)), "format mxfp4"),
        (_request(("nvfp4+recent4", "nvfp4"), (128, 128)), "format nvfp4+recent4"),
        (_request(("nvfp4", "nvfp4"), (96, 96)), "head_dim 96: 64, 128, 256"),
        (_request(("nvfp4", "fp8_e4m3"), (128, 128), torch.float64), "torch.float64"),
    ],
)
def test_what_is_refused(request_: Request, reason: str) -> None:
    assert reason in str(launcher.refuses(request_))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it decides")
def test_without_a_gpu_the_reason_says_so() -> None:
    reason = build.why_not() or "no CUDA device here"
    assert launcher.refuses(_request(("nvfp4", "fp8_per_token_head"), (128, 64))) == reason


def _call(c: Case) -> torch.Tensor:
    formats = get_format(c.key_format), get_format(c.value_format)
    return launcher.attention(c.query, c.key_store, c.value_store, *formats, **c.options)


def _want(c: Case) -> torch.Tensor:
    formats = get_format(c.key_format), get_format(c.value_format)
    return reference.attention(c.query, c.key_store, c.value_store, *formats, **c.options)


def test_long_prefill_goes_to_the_next_implementation() -> None:
    """65 rows: on this device, where the next one can run."""
    c = case("nvfp4", heads=2, kv_heads=2, queries=65, tokens=70, dim=64, causal=True)
    torch.testing.assert_close(_call(c), _want(c), rtol=1e-4, atol=1e-5)
    with pytest.raises(ImplementationError, match="CUDA devices"):
        _call(case("nvfp4", heads=2, kv_heads=2, queries=64, tokens=70, dim=64, causal=True))


def test_odd_pages_go_to_the_next_implementation() -> None:
    pool = kvq_ops.quantize(torch.randn(3, 2, 5, 64), "nvfp4")
    query, table, length = torch.randn(1, 4, 1, 64), torch.tensor([[2, 0, 1]]), torch.tensor([13])
    formats = get_format("nvfp4"), get_format("nvfp4")
    got = launcher.paged_attention(query, pool, pool, table, length, *formats)
    want = kvq_ops.paged_attention(query, pool, pool, table, length, "nvfp4", "nvfp4")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_nobody_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        op: [row for row in rows if row.name == "cutlass"] for op, rows in registry._implementations.items()
    }
    monkeypatch.setattr(registry, "_implementations", rows)
    with pytest.raises(ImplementationError, match="query rows"):
        _call(case("nvfp4", heads=2, kv_heads=2, queries=65, tokens=70, dim=64))


def test_nothing_to_attend_to_is_zeros() -> None:
    c = case("nvfp4", heads=4, kv_heads=2, queries=1, tokens=0, dim=64)
    assert torch.equal(_call(c), torch.zeros(2, 4, 1, 64))
    c = case("nvfp4", batch=0, heads=4, kv_heads=2, queries=1, tokens=5, dim=64)
    assert _call(c).shape == (0, 4, 1, 64)


def test_tokens_beyond_the_reach_of_a_word_are_handed_on() -> None:
    fmt = get_format("nvfp4")
    with torch.device("meta"):
        near = [torch.empty(shape, dtype=kind) for shape, kind in zip(
            fmt.plane_shapes(1, 8, 1 << 20, 128), fmt.plane_dtypes(torch.float32), strict=True)]  # fmt: skip
    assert launcher._within_words(near, fmt)
    far = [near[0].as_strided(near[0].shape, (1 << 40, 64, 1 << 13, 1)), *near[1:]]
    assert not launcher._within_words(far, fmt)


def test_more_sequences_than_a_grid_has_are_handed_on() -> None:
    """Axes of a grid but the first end at 65535."""
    for batch, heads, rows, fits in (
        (65535, 2, 1, True),
        (65536, 2, 1, False),
        (1, 32767, 17, True),
        (1, 32768, 17, False),
    ):
        query = torch.empty(batch, heads * rows, 1, 64, device="meta")
        assert launcher._fits_grid(query, heads) == fits
    assert not launcher._fits_grid(torch.empty(1, 65, 1, 64, device="meta"), 1)


def test_the_check_of_arguments_sees_what_the_compiled_function_refuses() -> None:
    """The control of ``contract``: what stands in for the function that is not called in the simulator."""
    if reason := build.why_not():
        pytest.skip(reason)
    from tests.cutlass.attention_runs import contiguous
    from tests.cutlass.contract import check_arguments

    planned, _ = contiguous(case("nvfp4", heads=4, kv_heads=2, queries=1, tokens=8, dim=128))
    stand_ins = launcher.ATTENTION.make("sm_100a", **planned.shape)[1][:-2]
    given = list(planned.arguments.values())
    check_arguments(stand_ins, given, "fine")
    names = list(planned.arguments)
    codes, scales = planned.arguments["key_codes"], planned.arguments["key_scales"]
    wrong = {
        "key_codes": (
            torch.zeros(codes.numel() + 8, dtype=torch.uint8)[8:].view(codes.shape),
            "multiple of 16 bytes",
        ),
        "key_scales": (torch.zeros(2, 2, 8, 9, dtype=torch.uint8)[..., :8], "no multiple of 2"),
        "value_codes": (codes.int(), "int32 for"),
        "value_static": (None, "NoneType for"),
        "query": (torch.zeros(2, 4, 1, 256, dtype=torch.float32)[..., ::2], "a stride of 2, not 1"),
        "stats": (scales, "4 axes"),
        "tokens": (codes, "argument 17: Tensor for"),
    }
    for name, (argument, said) in wrong.items():
        changed = list(given)
        changed[names.index(name)] = argument
        with pytest.raises(AssertionError, match=said):
            check_arguments(stand_ins, changed, "changed")


@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "want"),
    [(1, 1, 64, 1), (1, 1, 65, 2), (1, 8, 1 << 17, 37), (64, 8, 1 << 17, 1), (1, 1, 1 << 20, 64)],
)
def test_splits_fill_the_processors(batch: int, heads: int, tokens: int, want: int) -> None:
    query = torch.empty(batch, heads * 4, 1, 128)
    assert launcher._splits(query, heads, tokens, launcher.STEP) == want


def test_misaligned_planes_are_copied_and_others_are_not() -> None:
    c = case("nvfp4", heads=4, kv_heads=2, queries=1, tokens=8, dim=128)
    storage = torch.zeros(c.key_store[0].numel() + 1, dtype=torch.uint8)
    odd = storage[1:].view(c.key_store[0].shape)
    odd.copy_(c.key_store[0])
    formats = get_format("nvfp4"), get_format("nvfp4")
    kept = launcher.plan(c.query, c.key_store, c.value_store, *formats).arguments["key_codes"]
    assert kept.data_ptr() == c.key_store[0].data_ptr()
    moved = launcher.plan(c.query, [odd, *c.key_store[1:]], c.value_store, *formats).arguments["key_codes"]
    assert moved.data_ptr() % 16 == 0 and torch.equal(moved, c.key_store[0])


# --------------------------------------------------------------------------------------- the function that launches


class _Tensor:
    def __init__(self, tensor: torch.Tensor, address: int) -> None:
        self.shape, self.stride, self.iterator = tensor.shape, tensor.stride(), address


class _Launched:
    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.launch_: dict[str, Any] = {}

    def __call__(self, *arguments: Any) -> _Launched:
        self.arguments = arguments
        return self

    def launch(self, **options: Any) -> None:
        self.launch_ = options


def _flat(x: Any) -> list[Any]:
    if isinstance(x, tuple) and not hasattr(x, "target"):
        return [leaf for part in x for leaf in _flat(part)]
    if x is None or isinstance(x, str) or hasattr(x, "target"):  # constants of the shape class
        return []
    return [x.value if hasattr(x, "value") else x]


@pytest.mark.parametrize("name", ["plain", "everything", "bool_mask", "whole_buffer"])
@pytest.mark.parametrize("page", [0, 16])
def test_the_host_function_passes_on_what_was_simulated(
    name: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    from cutlass_kernels import attend
    from cutlass_kernels.attention_kernel import Shape, shared_bytes
    from tests.cutlass.attention_runs import Addresses, contiguous, kernel_arguments, paged

    if page:
        c = case("nvfp4", "fp8_per_token_head", dim=64, tokens=32, lengths=[20, 6], softcap=2.0)
        planned, _ = paged(c, page)
    else:
        planned, _ = contiguous(case("fp8_per_head", "nvfp4", dim=64, lengths=[9, 6], **OPTIONS[name]()))
    function = inspect.unwrap(attend.attend)
    names = list(inspect.signature(function).parameters)
    assert names == [*planned.arguments, "shape", "stream"]

    places = Addresses({})
    first, second = kernel_arguments(planned.arguments, places)
    given = {
        key: _Tensor(value, places.of(value)) if isinstance(value, torch.Tensor) else value
        for key, value in planned.arguments.items()
    }
    kernels = _Launched(), _Launched()
    monkeypatch.setattr(attend, "stretch_kernel", kernels[0])
    monkeypatch.setattr(attend, "merge_kernel", kernels[1])
    fields = {key: value for key, value in planned.shape.items() if key in Shape._fields}
    function(**given, shape=Shape(**fields, target="sm_100a"), stream=None)
    assert _flat(kernels[0].arguments[:-1]) == pytest.approx(first, abs=0)
    assert _flat(kernels[1].arguments[:-2]) == pytest.approx(second, abs=0)
    assert kernels[1].arguments[-2:] == (planned.shape["values"], planned.shape["value_dim"])
    assert tuple(map(int, kernels[0].launch_["grid"])) == planned.grid
    assert kernels[0].launch_["block"] == (128, 1, 1)
    assert kernels[0].launch_["smem"] == shared_bytes(planned.shape["head_dim"])
    assert (
        int(kernels[1].launch_["grid"][0])
        == planned.arguments["stats"].numel() // 2 // planned.arguments["splits"]
    )
    assert np.prod(kernels[1].launch_["block"]) == planned.shape["value_dim"]


def test_the_compiled_function_takes_these_arguments() -> None:
    """As far as that goes without a GPU: their number and kinds are right, and the first tensor is on the wrong device."""
    if reason := build.why_not():
        pytest.skip(reason)
    from tests.cutlass.attention_runs import contiguous

    planned, _ = contiguous(case("fp8_per_head", "nvfp4", dim=64, lengths=[9, 6]))
    compiled = launcher.ATTENTION.compiled("sm_100a", **planned.shape)
    with pytest.raises(ValueError, match=r"argument #0 .* expected device_type=cuda"):
        compiled(*planned.arguments.values())
    with pytest.raises(TypeError, match="Expects 21 parameters"):
        compiled(*list(planned.arguments.values())[1:])

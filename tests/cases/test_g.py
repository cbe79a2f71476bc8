"""Group G: life of scales, settings that must not be ignored, and bytes, over every format of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import kvq_ops
import passes
from kvq_ops import QuantizedKV, get_format, registry
from kvq_ops.errors import CalibrationError, ImplementationError, NothingRewrittenError
from kvq_ops.formats import parse_kv_format
from kvq_ops.registry import Implementation, Request
from tests.cases import every
from tests.cases.every import HKV, HQ, ROWS, SPECS, B, Step
from tests.ops import checks

# ------------------------------------------------------------------------------------------------------------------ G1

# Formats whose scales span tokens and are fitted to the first of them.
FITTED_ONCE = tuple(
    name for name in ROWS if get_format(name).static_planes and not get_format(name).calibrated
)
MORE_STATIC = ("int8_per_tensor", "int8_per_head", "int4_per_head", "int4_per_tensor_asym")


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("name", [*FITTED_ONCE, *MORE_STATIC])
def test_g1_a_scale_is_never_frozen_by_a_warm_up_on_zeros(name: str) -> None:
    x = torch.randn(B, HKV, 12, 16)
    fmt = get_format(name)
    cache = QuantizedKV.empty((B, HKV, 32, 16), name)
    every.append(cache, torch.zeros_like(x), [12])
    assert not any(cache.planes()[i].any() for i in fmt.static_planes), "zeros are nothing to fit to"
    every.append(cache, torch.cat([torch.zeros_like(x), 10 * x], 2), [12], 12)
    fresh = QuantizedKV.empty((B, HKV, 32, 16), name)
    every.append(fresh, 10 * x, [12])
    for i in fmt.static_planes:
        assert torch.equal(cache.planes()[i], fresh.planes()[i])
    if not fmt.windowed:
        assert torch.equal(cache.dequantize()[:, :, 12:24], fresh.dequantize()[:, :, :12])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_per_head", "nvfp4", "int8_per_tensor"])
def test_g1_warm_up_compile_data_and_recalibration(name: str) -> None:
    """Warm up on zeros, compile, feed data, feed data ten times as loud, recalibrate: one graph, and each scale is seen."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    query, key, value = torch.randn(B, HQ, 6, 16), torch.randn(B, HKV, 6, 16), torch.randn(B, HKV, 6, 16)
    fmt = get_format(name)
    shape = (B, HKV, 24, 16)
    step = Step(QuantizedKV.empty(shape, name), QuantizedKV.empty(shape, name))
    compiled = torch.compile(step, backend="kvq", fullgraph=True, options={"lower": "eager"})
    address = [plane.data_ptr() for plane in step.k_cache.planes()]

    def call(key: Tensor, value: Tensor) -> Tensor:
        return compiled(query, key, value, torch.arange(6))

    def start_again(static: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None) -> None:
        for i, cache in enumerate((step.k_cache, step.v_cache)):
            cache.zero_()
            if static is not None:
                cache.calibrate_(static[i])

    def check(out: Tensor, key: Tensor, value: Tensor, static: list[dict[str, Tensor]]) -> None:
        for cache, x, planes in ((step.k_cache, key, static[0]), (step.v_cache, value, static[1])):
            for plane in planes:
                assert torch.equal(cache.planes()[fmt.index(plane)], planes[plane]), plane
            want = QuantizedKV.from_dense(x, name, static=planes)
            assert torch.equal(cache.dequantize()[:, :, :6], want.dequantize())
        mask = torch.arange(24) <= torch.arange(6).unsqueeze(1)
        stores = [kvq_ops.dequantize(cache.store, name).numpy() for cache in (step.k_cache, step.v_cache)]
        checks.assert_tight(out, checks.exact_attention(query, *stores, mask=mask))

    assert not call(torch.zeros_like(key), torch.zeros_like(value)).any()
    static = [every.static_for(name, x) for x in (key, value)]
    check(call(key, value), key, value, static)
    loud = [every.static_for(name, 10 * x) for x in (key, value)]
    start_again()
    check(call(10 * key, 10 * value), 10 * key, 10 * value, loud)
    # Scales of other text, put in place: seen at once, by the same graph, in the same memory.
    other = tuple(every.static_for(name, 3 * x + 1) for x in (key, value))
    start_again(other)  # type: ignore[arg-type]
    check(call(key, value), key, value, list(other))
    assert graphs() == 1 and address == [plane.data_ptr() for plane in step.k_cache.planes()]
    # The check would notice a frozen scale.
    with pytest.raises(AssertionError):
        check(call(key, value), key, value, loud)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4", "int8_per_head"])
def test_g1_codes_are_never_given_another_scale(name: str) -> None:
    """A cache that holds tokens refuses a new calibration: their codes would mean something else."""
    x = torch.randn(B, HKV, 6, 16)
    cache = every.filled(name, x)
    before = [plane.clone() for plane in cache.planes()]
    with pytest.raises(CalibrationError, match="empty it first"):
        cache.calibrate_(every.static_for(name, 10 * x))
    assert all(torch.equal(a, b) for a, b in zip(before, cache.planes(), strict=True))


# ------------------------------------------------------------------------------------------------------------------ G5


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An implementation that asks for what a GPU of compute capability 8.0 lacks, and one for every int4 format."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))

    def refuses(request: Request) -> str | None:
        major, minor = torch.cuda.get_device_capability()
        if any(fmt.codec == "float8" for fmt in request.formats) and (major, minor) < (8, 9):
            return f"float8 needs compute capability 8.9, this device has {major}.{minor}"
        if any(fmt.bits < 8 for fmt in request.formats):
            return "formats below 8 bits are not implemented here"
        return None

    kept = {op: list(rows) for op, rows in registry._implementations.items()}
    for op in kept:
        registry.register(Implementation("old_gpu", op, _never, refuses, priority=1000))
    yield
    for op, rows in kept.items():
        registry._implementations[op][:] = rows
    registry._choices.clear()


def _never(*_: object) -> object:
    raise AssertionError("an implementation that refused was run")


@pytest.mark.parametrize(("name", "why"), [("fp8_per_token_head", "8.0"), ("int4_group32", "below 8 bits")])
def test_g5_what_cannot_run_raises_at_once_and_names_the_others(old_gpu: None, name: str, why: str) -> None:
    x = torch.randn(B, HKV, 6, 16)
    query = torch.randn(B, HQ, 1, 16)
    store = kvq_ops.quantize(x, name)
    asked: list[Callable[[], object]] = [
        lambda: kvq_ops.quantize(x, name),
        lambda: kvq_ops.dequantize(store, name),
        lambda: kvq_ops.append_(store, torch.arange(1), x[:, :, :1], name),
        lambda: kvq_ops.attention(query, store, store, name, name),
    ]
    before = [plane.clone() for plane in store]
    for call in asked:
        with registry.use_implementation("old_gpu"), pytest.raises(ImplementationError) as raised:
            call()
        assert why in raised.value.got and "torch" in raised.value.allowed
    assert all(torch.equal(a, b) for a, b in zip(before, store, strict=True))
    # Left open, the choice falls on one that can, and says so.
    out = kvq_ops.attention(query, store, store, name, name)
    assert out.isfinite().all()
    lines = registry.explain("attention", get_format(name), get_format(name), head_dim=16)
    assert f"old_gpu: rejected: {'float8' if '8.0' in why else 'formats'}" in lines and "chosen" in lines
    with pytest.raises(ImplementationError, match="old_gpu"), registry.use_implementation("old_gpv"):
        pass


def test_g5_what_cannot_run_raises_before_anything_is_compiled(
    old_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.compile_fx as compile_fx

    compiled: list[object] = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *a, **k: compiled.append(a))
    torch._dynamo.reset()
    x = torch.randn(B, HKV, 6, 16)
    step = Step(every.empty("fp8_per_token_head", x), every.empty("fp8_per_token_head", x))
    before = [plane.clone() for plane in step.k_cache.planes()]
    with registry.use_implementation("old_gpu"), pytest.raises(Exception, match="capability 8.9") as raised:
        torch.compile(step, backend="kvq", fullgraph=True)(torch.randn(B, HQ, 6, 16), x, x, torch.arange(6))
    assert isinstance(raised.value, ImplementationError) or "ImplementationError" in str(raised.value)
    assert not compiled and all(torch.equal(a, b) for a, b in zip(before, step.k_cache.planes(), strict=True))


class Blended(Step):
    """Attention over something else than the cache: the graph pass has nothing to fuse."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        self.k_cache.index_copy_(2, position, key)
        self.v_cache.index_copy_(2, position, value)
        keys = self.k_cache * 0.5 + self.k_cache.roll(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, self.v_cache, enable_gqa=True)


def test_g5_a_fallback_is_an_error_unless_asked_for_and_then_counted() -> None:
    x = torch.randn(B, HKV, 6, 16)
    call = (torch.randn(B, HQ, 6, 16), x, x, torch.arange(6))
    want = Blended(every.empty("int4_group32", x), every.empty("int4_group32", x))(*call)
    torch._dynamo.reset()
    passes.clear_report()
    with pytest.raises(NothingRewrittenError, match="allow_unrewritten"):
        step = Blended(every.empty("int4_group32", x), every.empty("int4_group32", x))
        torch.compile(step, backend="kvq", options={"lower": "eager"})(*call)
    torch._dynamo.reset()
    passes.clear_report()
    step = Blended(every.empty("int4_group32", x), every.empty("int4_group32", x))
    options = {"lower": "eager", "allow_unrewritten": True}
    out = torch.compile(step, backend="kvq", options=options)(*call)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    report = passes.report()
    assert (report.found, report.rewritten, len(report.left)) == (1, 0, 1)
    assert report.left[0].reason and "0 of 1" in str(report) and report.data()["rewritten"] == 0


# ------------------------------------------------------------------------------------------------------------------ G6


def storages(*caches: QuantizedKV) -> int:
    """Bytes of the distinct storages, counted here."""
    seen = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for c in caches for p in c.planes()}
    return sum(seen.values())


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("name", ROWS)
def test_g6_bytes_are_those_of_the_storages_and_below_fp16(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    shape = (1, HKV, 1024, 64)
    cache = QuantizedKV.empty(shape, name, dtype=dtype)
    assert cache.nbytes == storages(cache) == fmt.nbytes(*shape, dtype)
    kinds = {p.name: t.numel() * t.element_size() for p, t in zip(fmt.planes, cache.planes(), strict=True)}
    assert sum(kinds.values()) == cache.nbytes, "every kind of byte is counted, exact tokens too"
    if not fmt.lossless:
        assert cache.nbytes < 2 * cache.numel() or (dtype == torch.float32 and fmt.windowed)
    # Filling it allocates nothing that stays.
    every.append(
        every.empty(name, torch.randn(1, HKV, 64, 64).to(dtype), 1024),
        torch.randn(1, HKV, 64, 64).to(dtype),
        [64],
    )
    assert cache.nbytes == storages(cache)


@pytest.mark.parametrize("spec", SPECS)
def test_g6_the_report_says_what_the_storages_hold(spec: str) -> None:
    torch._dynamo.reset()
    passes.clear_report()
    pair = parse_kv_format(spec)
    x = torch.randn(B, HKV, 6, 16)
    caches = [every.empty(pair.key.name, x, 64), every.empty(pair.value.name, x, 64)]
    compiled = torch.compile(Step(*caches), backend="kvq", fullgraph=True, options={"lower": "eager"})
    compiled(torch.randn(B, HQ, 6, 16), x, x, torch.arange(6))
    (graph,) = passes.report().graphs
    assert sorted(c.bytes for c in graph.caches) == sorted(storages(c) for c in caches)
    assert sum(c.dense_bytes for c in graph.caches) == sum(c.numel() * 4 for c in caches)
    total = storages(*caches)
    assert f"{total:,} bytes instead of {2 * caches[0].numel() * 4:,}" in str(passes.report())


def peak(run: Callable[[], object]) -> int:
    """The most bytes that ``run`` held at once beyond what there was before."""
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as trace:
        run()
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.no_poison
@pytest.mark.parametrize("name", ROWS)
def test_g6_a_prefill_peaks_with_its_own_tokens_never_with_the_cache(name: str) -> None:
    """64 tokens into a cache of 512 and into one of 4096: the same peak, so no copy of the cache is ever made."""
    x = torch.randn(1, HKV, 64, 32)
    peaks = []
    for capacity in (512, 4096):
        cache = every.empty(name, x, capacity)
        every.append(cache, x, [64])  # whatever is set up once
        cache = every.empty(name, x, capacity)
        peaks.append(peak(lambda cache=cache: every.append(cache, x, [64])))
    assert peaks[0] > 0 or get_format(name).lossless
    assert peaks[1] <= peaks[0] + 1024, f"{peaks} bytes at capacities 512 and 4096"


@pytest.mark.no_poison
def test_g6_the_peak_is_seen() -> None:
    """The measure above notices a copy."""
    x = torch.zeros(1, HKV, 4096, 32)
    assert peak(lambda: x.clone()) >= x.numel() * 4
    assert peak(lambda: x.add_(1)) < 4096

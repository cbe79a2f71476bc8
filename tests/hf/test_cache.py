"""QuantizedCache under transformers' own models and generation loop."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers.cache_utils import StaticCache, StaticSlidingWindowLayer  # noqa: E402

from kvq_ops import QuantizedKV, dequantize, errors, quantize  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from kvq_ops.hf_generate import use_quantized_cache_  # noqa: E402
from tests.hf.models import config, encoder_inputs, model, prompt  # noqa: E402

# transformers 5.24 begins to call the argument ``cache``; older ones know this name only.
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

DECODERS = (
    "llama",
    "mistral",
    "gemma3",
    "qwen3",
    "gpt_oss",
    "gpt2",
    "gpt_bigcode",
    "opt",
    "bloom",
    "falcon_multi_query",
    "falcon_new",
    "deepseek_v3",
)
PER_TOKEN = ("int8_per_token_head", "fp8_per_token_head", "int4_group32")


def generate(name: str, ids: Tensor, new: int = 12, **kwargs: Any) -> Tensor:
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    return model(name).generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **kwargs)


@torch.no_grad()
def forward(name: str, ids: Tensor, cache: Any, **kwargs: Any) -> Tensor:
    return model(name)(input_ids=ids, past_key_values=cache, use_cache=True, **kwargs).logits


class FakeQuantized(StaticCache):
    """A static cache whose states pass through the codes first, in plain torch: the reference."""

    def __init__(self, config: Any, key: str, value: str, max_cache_len: int) -> None:
        super().__init__(config=config, max_cache_len=max_cache_len)
        self.names = (key, value)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        layer = self.layers[layer_idx]
        # transformers attends to a prompt that overflows an empty window before it stores it.
        sliding = isinstance(layer, StaticSlidingWindowLayer)
        unstored = sliding and not layer.cumulative_length_int and key_states.shape[2] > layer.max_cache_len
        states = [
            dequantize(quantize(x, name), name, x.dtype)
            for x, name in zip((key_states, value_states), self.names, strict=True)
        ]
        out = super().update(*states, layer_idx, *args, **kwargs)
        return (key_states, value_states) if unstored else out


# -------------------------------------------------------------------------------- lossless: exactly the same tokens


@pytest.mark.parametrize("name", DECODERS)
def test_none_generates_the_tokens_of_no_cache(name: str) -> None:
    ids = prompt()
    cache = QuantizedCache(config(name), "none", max_cache_len=32, batch_size=2)
    planned = [tuple(handle.shape) for handle in cache.handles()]
    assert torch.equal(generate(name, ids, past_key_values=cache), generate(name, ids))
    # Shapes were known from the configuration, so that a first call may be a compiled one.
    assert planned == [tuple(handle.shape) for handle in cache.handles()] and planned


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "deepseek_v3"])
def test_none_with_beams(name: str) -> None:
    ids = prompt()
    cache = QuantizedCache(config(name), "none", max_cache_len=32)
    got = generate(name, ids, num_beams=3, past_key_values=cache)
    assert torch.equal(got, generate(name, ids, num_beams=3))


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_none_with_left_padding(name: str) -> None:
    ids = prompt(3)
    mask = torch.ones_like(ids)
    ids[0, :4], mask[0, :4] = 0, 0
    ids[2, :7], mask[2, :7] = 0, 0
    cache = QuantizedCache(config(name), "none", max_cache_len=32)
    got = generate(name, ids, attention_mask=mask, past_key_values=cache)
    assert torch.equal(got, generate(name, ids, attention_mask=mask))


@pytest.mark.parametrize("sizes", [(11,), (3, 3, 3, 2), (1,) * 11, (7, 4), (9, 1, 1)])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_d8_chunked_prefill_equals_one_pass(name: str, sizes: tuple[int, ...]) -> None:
    """Eleven tokens and six more through a window of eight: window-masked attention, storage bounded."""
    ids = prompt(2, 17)
    whole = model(name)(input_ids=ids).logits.detach()
    cache = QuantizedCache(config(name), "none", max_cache_len=20)
    parts = [forward(name, chunk, cache) for chunk in ids.split([*sizes, *[1] * 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    for layer, sliding in zip(cache.layers, cache.is_sliding, strict=True):
        assert layer.keys.shape[2] == (8 if sliding else 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_d2_second_prompt_on_one_cache(dtype: torch.dtype) -> None:
    """Prefill 10, decode 3, prefill 6: length 19, and the same as one pass."""
    twin = copy.deepcopy(model("llama")).to(dtype)
    cache = QuantizedCache(twin.config, "none", max_cache_len=24, dtype=dtype)
    exact = StaticCache(config=twin.config, max_cache_len=24)
    ids = prompt(1, 19)
    with torch.no_grad():
        for chunk in ids.split([10, 1, 1, 1, 6], 1):
            got = twin(input_ids=chunk, past_key_values=cache).logits
            expected = twin(input_ids=chunk, past_key_values=exact).logits
            assert got.dtype == dtype and torch.equal(got, expected)
    assert int(cache.get_seq_length()) == 19
    assert all(h.dtype == dtype and h.length.tolist() == [19] for h in cache.handles())
    with pytest.raises(errors.DtypeError, match="reset"):
        model("llama")(
            input_ids=ids[:, :1], past_key_values=cache
        ) if dtype != torch.float32 else twin.half()(input_ids=ids[:, :1], past_key_values=cache)
    assert int(cache.get_seq_length()) == 19


def test_multi_turn_generate() -> None:
    for name in ("llama", "gemma3"):
        cache = QuantizedCache(config(name), "none", max_cache_len=48)
        ids = prompt(1)
        for turn in range(3):
            got = generate(name, ids, new=5, past_key_values=cache)
            assert torch.equal(got, generate(name, ids, new=5))
            ids = torch.cat([got, prompt(1, 4 + turn)], 1)


def test_reset_forgets_everything() -> None:
    for spec in ("none", "nvfp4", "fp8_per_head"):
        cache = QuantizedCache(config("gemma3"), spec, max_cache_len=32)
        first = generate("gemma3", prompt(), past_key_values=cache)
        cache.reset()
        assert int(cache.get_seq_length()) == 0 and not any(
            plane.any() for h in cache.handles() for plane in h.store
        )
        assert torch.equal(first, generate("gemma3", prompt(), past_key_values=cache))


# ------------------------------------------------------------------------------------------ quantized: the reference


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt2", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize(
    "formats",
    [*((f, f) for f in PER_TOKEN), ("int8_per_token_head", "int4_group32"), ("none", "int4_group32")],
)
def test_logits_equal_fake_quantization(name: str, formats: tuple[str, str]) -> None:
    key, value = formats
    ids = prompt(2, 18)
    cache = QuantizedCache(config(name), f"key={key},value={value}", max_cache_len=20)
    reference = FakeQuantized(config(name), key, value, 20)
    exact = StaticCache(config=config(name), max_cache_len=20)
    moved = 0.0
    for chunk in ids.split([6, 1, 4, *[1] * 7], 1):
        got, expected = forward(name, chunk, cache), forward(name, chunk, reference)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        moved = max(moved, float((forward(name, chunk, exact) - expected).abs().max()))
    assert moved > 1e-3, "quantization must show, or this compares nothing"


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
@pytest.mark.parametrize("spec", [*PER_TOKEN, "nvfp4", "fp8_e4m3"])
def test_sliding_layers_move_codes_and_never_code_twice(name: str, spec: str) -> None:
    cache = QuantizedCache(config(name), spec, max_cache_len=40)
    ids = prompt(2, 30)
    forward(name, ids[:, :6], cache)
    layer = cache.layers[0]
    at = 6
    for step in (1, 1, 1, 1, 3, 1, 5, 1):
        before = [plane.clone() for plane in layer.keys.store]
        forward(name, ids[:, at : at + step], cache)
        overflow = max(0, min(at, 8) + step - 8)
        kept = min(at, 8) - overflow
        for plane, new, old in zip(layer.keys.format.planes, layer.keys.store, before, strict=True):
            if plane.per_token:
                assert torch.equal(new[:, :, :kept], old[:, :, overflow : overflow + kept])
            elif plane.static:
                assert torch.equal(new, old)
        at += step
        assert layer.keys.shape[2] == 8 and layer.keys.length.tolist() == [8 if at >= 8 else at] * 2


def test_d9_sliding_layers_see_their_window_and_full_layers_everything() -> None:
    """Perturb the oldest token: what sliding layers read stays, what full layers read changes."""
    ids = prompt(1, 24)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] - 3 + 1) % 61 + 3
    caches = []
    for tokens in (ids, other):
        cache = QuantizedCache(config("gemma3"), "int8_per_token_head", max_cache_len=32)
        for chunk in tokens.split(1, 1):
            forward("gemma3", chunk, cache)
        caches.append(cache)
    sliding, full = ([c.layers[i].keys.dequantize() for c in caches] for i in (0, 1))
    assert torch.equal(*sliding) and not torch.equal(*full)


def test_d5_padding_and_neighbours_do_not_change_a_row() -> None:
    ids = prompt(2, 9)
    for spec in PER_TOKEN:
        alone = QuantizedCache(config("llama"), spec, max_cache_len=12)
        both = QuantizedCache(config("llama"), spec, max_cache_len=12)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        forward("llama", ids[1:], alone)
        forward("llama", ids, both, attention_mask=mask)
        for a, b in zip(alone.handles(), both.handles(), strict=True):
            # The first layer's states come from matrix products of other shapes, which may differ in the last bit.
            torch.testing.assert_close(a.dequantize(), b.dequantize()[1:], rtol=1e-3, atol=2e-2)
        first_a, first_b = next(alone.handles()), next(both.handles())
        assert (first_a.store[0].int() - first_b.store[0][1:].int()).abs().float().mean() < 0.01


def test_e5_fully_masked_padding_leaves_other_rows_alone() -> None:
    ids = prompt(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :8] = 0
    cache = QuantizedCache(config("llama"), "int8_per_token_head", max_cache_len=12)
    logits = forward("llama", ids, cache, attention_mask=mask)
    assert logits[1].isfinite().all() and logits[0, -1].isfinite().all()
    assert all(h.dequantize().isfinite().all() for h in cache.handles())


# ----------------------------------------------------------------------------------- crop, reorder, select, interleave


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("spec", ["none", "int4_group32", "fp8_e4m3"])
def test_d1_rollback_equals_never_drafted(name: str, spec: str) -> None:
    ids = prompt(2, 8)
    drafted = QuantizedCache(config(name), spec, max_cache_len=20)
    forward(name, ids[:, :3], drafted)
    forward(name, ids[:, 3:8], drafted)
    never = QuantizedCache(config(name), spec, max_cache_len=20)
    forward(name, ids[:, :3], never)
    kept = [
        [plane[:, :, :5].clone() if plane.dim() > 2 else plane for plane in h.store]
        for h in drafted.handles()
    ]
    drafted.crop(-3)
    for handle, old in zip(drafted.handles(), kept, strict=True):
        assert handle.length.tolist() == [5, 5]
        for plane, new, before in zip(handle.format.planes, handle.store, old, strict=True):
            if plane.per_token:
                assert torch.equal(new[:, :, :5], before) and not new[:, :, 5:].any()
    forward(name, ids[:, 3:5], never)
    assert int(drafted.get_seq_length()) == int(never.get_seq_length()) == 5
    a, b = forward(name, ids[:, 5:6], drafted), forward(name, ids[:, 5:6], never)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3) if spec == "none" else None
    drafted.crop(0)
    assert int(drafted.get_seq_length()) == 6


def test_crop_past_a_window_raises_before_any_layer_changes() -> None:
    cache = QuantizedCache(config("gemma3"), "int8_per_token_head", max_cache_len=20)
    forward("gemma3", prompt(1, 11), cache)
    before = [plane.clone() for h in cache.handles() for plane in h.store]
    with pytest.raises(errors.UnsupportedWriteError, match="window"):
        cache.crop(-1)
    for bad in (1, -12):
        with pytest.raises(errors.CapacityError):
            cache.crop(bad)
    assert all(
        torch.equal(a, b) for a, b in zip(before, (p for h in cache.handles() for p in h.store), strict=True)
    )
    assert int(cache.get_seq_length()) == 11


def test_assisted_generation_rolls_back() -> None:
    ids = prompt(1)
    cache = QuantizedCache(config("llama"), "none", max_cache_len=48)
    got = generate("llama", ids, prompt_lookup_num_tokens=3, past_key_values=cache)
    assert torch.equal(got, generate("llama", ids))


def test_d1_reorder_moves_codes_in_place() -> None:
    cache = QuantizedCache(config("gemma3"), "int4_group32", max_cache_len=20, batch_size=3)
    forward("gemma3", prompt(3, 10), cache)
    before = [[plane.clone() for plane in h.store] for h in cache.handles()]
    address = [plane.data_ptr() for h in cache.handles() for plane in h.store]
    index = torch.tensor([2, 0, 0])
    cache.reorder_cache(index)
    for handle, old in zip(cache.handles(), before, strict=True):
        assert all(torch.equal(new, was[index]) for new, was in zip(handle.store, old, strict=True))
    assert address == [plane.data_ptr() for h in cache.handles() for plane in h.store]
    cache.batch_repeat_interleave(2)
    assert all(h.shape[0] == 6 for h in cache.handles()) and cache.batch_size == 6
    cache.batch_select_indices(torch.tensor([5, 0]))
    assert all(torch.equal(h.store[0][0], old[0][0]) for h, old in zip(cache.handles(), before, strict=True))
    assert cache.batch_size == 2


# --------------------------------------------------------------------------------------------------- memory and errors


@pytest.mark.parametrize("spec", ["int8_per_token_head", "key=int8_per_token_head,value=int4_group32"])
def test_g6_bytes_are_live_storages_and_nothing_dense_is_alive(spec: str) -> None:
    cache = QuantizedCache(config("gemma3"), spec, max_cache_len=61, batch_size=2)
    storages = {
        p.untyped_storage()._cdata: p.untyped_storage().nbytes() for h in cache.handles() for p in h.store
    }
    assert cache.nbytes == sum(storages.values())
    shapes = {h.shape for h in cache.handles()}

    def alive() -> list[Any]:
        gc.collect()
        return [
            t for t in gc.get_objects() if type(t) is Tensor and t.shape in shapes and t.is_floating_point()
        ]

    others = alive()  # what earlier tests in this process have left, in shapes as common as these

    def dense() -> list[Any]:
        return [t for t in alive() if not any(t is one for one in others)]

    generate("gemma3", prompt(), past_key_values=cache)
    assert cache.nbytes == sum(storages.values()), "generating does not make it larger"
    assert cache.nbytes < cache.dense_nbytes / 2
    assert not dense()
    control = torch.zeros(next(iter(shapes)))
    assert len(dense()) == 1 and control.numel(), "the search must be able to find one"


def test_an_empty_cache_fits_itself_to_the_first_states() -> None:
    cache = QuantizedCache(config("llama"), "int8_per_token_head", max_cache_len=32, dtype=torch.bfloat16)
    forward("llama", prompt(3, 4), cache)
    assert {(h.shape[0], h.dtype) for h in cache.handles()} == {(3, torch.float32)}


def test_errors_come_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: Any, **__: Any) -> Any:
        raise AssertionError("allocated")

    odd = copy.deepcopy(config("qwen3"))
    odd.head_dim = 5
    monkeypatch.setattr(QuantizedKV, "empty", allocate)
    make = QuantizedCache
    llama = config("llama")
    with pytest.raises(errors.UnknownFormatError, match="int8_per_token_head"):
        make(llama, "int8_per_tokn", 8)
    for bad in (0, -1, 1.5, True, None, "8"):
        with pytest.raises(errors.FormatError, match="max_cache_len"):
            make(llama, "none", bad)  # type: ignore[arg-type]
    with pytest.raises(errors.HeadDimError, match="multiple of 2"):
        make(odd, "int4_group32", 8)
    with pytest.raises(errors.HeadDimError):
        make(odd, "key=none,value=nvfp4", 8)
    for kwargs in (
        {"skip": 2},
        {"skip": [-3]},
        {"skip": "sliding_atention"},
        {"layers": {7: "none"}},
        {"skip": [None]},
    ):
        with pytest.raises(errors.FormatError, match="layer"):
            make(llama, "none", 8, **kwargs)
    with pytest.raises(errors.UnknownFormatError):
        make(llama, "none", 8, layers={0: "int9"})


def test_d12_overflow_raises_and_changes_nothing() -> None:
    cache = QuantizedCache(config("llama"), "int8_per_token_head", max_cache_len=8)
    forward("llama", prompt(1, 8), cache)
    before = [plane.clone() for h in cache.handles() for plane in h.store]
    with pytest.raises(errors.CapacityError, match=r"8 tokens are stored[\s\S]*max_cache_len"):
        forward("llama", prompt(1, 1), cache)
    assert all(
        torch.equal(a, b) for a, b in zip(before, (p for h in cache.handles() for p in h.store), strict=True)
    )
    assert int(cache.get_seq_length()) == 8
    with pytest.raises(errors.CapacityError):
        forward("llama", prompt(1, 9), QuantizedCache(config("llama"), "none", max_cache_len=8))


def test_another_batch_raises_while_tokens_are_stored() -> None:
    for name in ("llama", "mistral"):
        cache = QuantizedCache(config(name), "int8_per_token_head", max_cache_len=20)
        forward(name, prompt(2, 10), cache)
        with pytest.raises(errors.ShapeError, match="reset"):
            forward(name, prompt(3, 1), cache)
        assert int(cache.get_seq_length()) == 10
        cache.reset()
        forward(name, prompt(3, 1), cache)


def test_b5_training_gets_one_clear_error() -> None:
    cache = QuantizedCache(config("llama"), "int8_per_token_head", max_cache_len=20)
    with pytest.raises(errors.GradientError, match="no_grad"):
        model("llama")(input_ids=prompt(1, 4), past_key_values=cache)


# ------------------------------------------------------------------------------------------------ formats of layers


def names(cache: QuantizedCache) -> list[str]:
    return [str(pair) for pair in cache.layer_formats]


def test_formats_of_layers() -> None:
    text = copy.deepcopy(config("gemma3"))
    text.num_hidden_layers = 6
    text.layer_types = ["sliding_attention", "full_attention"] * 3
    i8, i4 = "int8_per_token_head", "int4_group32"

    def make(**kwargs: Any) -> list[str]:
        return names(QuantizedCache(text, i8, 16, **kwargs))

    assert make() == [i8] * 6
    assert make(skip=(0, -1)) == ["none", i8, i8, i8, i8, "none"]
    assert make(skip="full_attention") == [i8, "none"] * 3
    assert make(layers={"sliding_attention": i4}) == [i4, i8] * 3
    assert make(layers={3: i4, -1: f"key={i8},value={i4}"}) == [i8, i8, i8, i4, i8, f"key={i8},value={i4}"]
    assert make(layers={0: "none", "sliding_attention": i4}, skip=2) == ["none", i8, "none", i8, i4, i8]


def test_layers_read_in_their_own_format() -> None:
    cache = QuantizedCache(
        config("llama"), "int4_group32", 20, layers={0: "key=none,value=int8_per_token_head"}, skip=[1]
    )
    exact = StaticCache(config=config("llama"), max_cache_len=20)
    forward("llama", prompt(1, 9), cache)
    forward("llama", prompt(1, 9), exact)
    assert [h.format.name for h in cache.handles()] == ["none", "int8_per_token_head", "none", "none"]
    assert torch.equal(cache.layers[0].keys.dequantize(), exact.layers[0].keys)
    error = (cache.layers[0].values.dequantize() - exact.layers[0].values).abs().max()
    assert 0 < error < exact.layers[0].values.abs().max() / 100


# ------------------------------------------------------------------------------------------------- generate by itself


@pytest.mark.parametrize("name", ["llama", "gemma3", "bart"])
def test_generate_makes_quantized_caches_by_itself(name: str) -> None:
    twin = copy.deepcopy(model(name))
    use_quantized_cache_(twin, "none")
    use_quantized_cache_(twin, "none")
    run = encoder_inputs(name) if name == "bart" else {"input_ids": prompt()}
    run |= {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True}
    for user in (twin, copy.deepcopy(twin)):
        got = user.generate(**run)
        cache = got.past_key_values
        own = cache.self_attention_cache if name == "bart" else cache
        assert isinstance(own, QuantizedCache)
        assert torch.equal(got.sequences, model(name).generate(**run).sequences)
    given = StaticCache(config=twin.config, max_cache_len=32)
    if name != "bart":
        assert twin.generate(past_key_values=given, **run).past_key_values is given
        assert twin.generate(cache_implementation="static", **run).past_key_values.layers[0].keys is not None
        assert not isinstance(model(name).generate(**run).past_key_values, QuantizedCache)
    with pytest.raises(errors.FormatError):
        use_quantized_cache_(twin, "none", skip=99)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_cache_go_their_own_way(way: Any) -> None:
    cache = QuantizedCache(config("gemma3"), "int8_per_token_head", max_cache_len=20)
    forward("gemma3", prompt(1, 10), cache)
    twin = way(cache)
    assert torch.equal(forward("gemma3", prompt(1, 1), twin), forward("gemma3", prompt(1, 1), cache))
    forward("gemma3", prompt(1, 3), twin)
    assert int(cache.get_seq_length()) == 11 and int(twin.get_seq_length()) == 14
    assert repr(cache).startswith("QuantizedCache(int8_per_token_head, 2 layers, ")

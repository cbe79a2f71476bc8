"""What only looks like a cache, or is used in a way codes cannot follow, stays dense, is named, and stays right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import passes
from kvq_ops.errors import NothingRewrittenError

from .cache_checks import INT8, assert_same, check_compile, compiled, expected, exported, handles, inputs, run
from .cache_decoder import HK, B, D, Decoder, Spelling, T
from .cache_spellings import SPELLINGS, each, index_put_, of, pair

ONE = replace(SPELLINGS["index_put_"], layers=1)


class MulAfter(Decoder):
    def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        out = super().attend(layer, x, position)
        self.k0.mul_(0.9)
        return out


class MulBefore(Decoder):
    def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        self.k0.mul_(0.9)
        return super().attend(layer, x, position)


class AddPart(Decoder):
    """Writes whole tokens, and then adds to one of them."""

    def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        out = super().attend(layer, x, position)
        self.v0[:, :, 0] += 0.25
        return out


class ThroughView(Decoder):
    """Rescales through a view that mixes the axes."""

    def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        out = super().attend(layer, x, position)
        self.k0.view(B, HK, -1)[:, :, :5].zero_()
        return out


class PartOfHeadVector(Decoder):
    """Writes some channels of a token."""

    def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        self.k0[:, :, 0, : D // 2] = 1.0
        return super().attend(layer, x, position)


class AlsoMean(Decoder):
    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return super().forward(x, position) + self.k0.mean()


class AlsoNorm(Decoder):
    """Reads the values before they are written, too."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        size = self.v0.pow(2).sum()
        return super().forward(x, position) / (1 + size)


class KeysScaled(Decoder):
    """Attention reads a computed tensor, though it comes from the cache."""

    def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.project(layer, x)
        self.k0[:, :, position], self.v0[:, :, position] = k, v
        keys = torch.tanh(self.k0)
        out = F.scaled_dot_product_attention(
            q, keys, self.v0, attn_mask=self.causal[position], enable_gqa=True
        )
        return x + self.o[layer](out.transpose(1, 2).reshape(batch, tokens, -1))


class SameMemory(Decoder):
    """A second tensor of the model shows the same memory, so a write through it would be lost."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__(spelling)
        self.register_buffer("whole", torch.zeros(2, B, HK, T, D))
        self.k0, self.v0 = self.whole[0], self.whole[1]


class LearnedPrefix(Decoder):
    """Keys and values that are parameters: weights, not a cache."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__(spelling)
        self.k_prefix = nn.Parameter(torch.randn(B, HK, 4, D))
        self.v_prefix = nn.Parameter(torch.randn(B, HK, 4, D))

    def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, _, _ = self.project(layer, x)
        out = F.scaled_dot_product_attention(q, self.k_prefix, self.v_prefix, enable_gqa=True)
        return x + self.o[layer](out.transpose(1, 2).reshape(batch, tokens, -1))


class NoCache(Decoder):
    """Keys and values are computed in this call alone; buffers of the right shape are written and not attended to."""

    def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.project(layer, x)
        self.k0[:, :, position], self.v0[:, :, position] = k, v
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.o[layer](out.transpose(1, 2).reshape(batch, tokens, -1))


@dataclass(frozen=True)
class Case:
    """A model none of whose caches can be quantized.

    Attributes:
        why: what the report must say.
        exported: what it must say under export, where that differs.
    """

    model: Callable[[Spelling], Decoder]
    why: str
    exported: str = ""


CASES = {
    "mul_after": Case(MulAfter, "k0 is written by mul_ (aten.mul_.Tensor)"),
    "mul_before": Case(MulBefore, "mul_ writes into the cache in a way that codes cannot follow"),
    "add_part": Case(AddPart, "v0 is written by add_"),
    "through_view": Case(ThroughView, "k0 is written by zero_ (aten.zero_.default): a write through a view"),
    "part_of_head_vector": Case(PartOfHeadVector, "k0 is written by"),
    "mean": Case(AlsoMean, "k0 is also read by mean"),
    "norm": Case(AlsoNorm, "v0 is also read by pow"),
    "computed": Case(KeysScaled, "tanh is computed here and not read from a cache"),
    "same_memory": Case(SameMemory, "k0 shares memory with another tensor", "k0 shares memory with whole"),
    "parameter": Case(LearnedPrefix, "k_prefix is a parameter", "k_prefix is no cache but a parameter"),
    "no_cache": Case(NoCache, "is computed here and not read from a cache"),
}


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_stays_dense_and_right(name: str) -> None:
    case = CASES[name]
    net = case.model(ONE)
    want = expected(net, "none")
    state = copy.deepcopy(net.state_dict())
    tensors = dict(net.named_buffers())
    with pytest.raises(NothingRewrittenError) as error:
        passes.quantize_kv_cache_(net, INT8, inputs(ONE)[1])
    assert case.why in str(error.value), str(error.value)
    assert all(tensors[key] is one for key, one in net.named_buffers())
    assert all(torch.equal(state[key], one) for key, one in net.state_dict().items())
    step = compiled(net, allow_unrewritten=True)
    assert_same(run(step, ONE), want, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_stays_dense_and_right_under_export(name: str) -> None:
    case = CASES[name]
    net = case.model(ONE)
    program = exported(net)
    with pytest.raises(NothingRewrittenError) as error:
        passes.quantize_exported(program, INT8)
    why = case.exported or case.why
    assert why.removeprefix("k0 ").removeprefix("v0 ") in str(error.value), str(error.value)
    left = passes.quantize_exported(program, INT8, allow_unrewritten=True)
    assert set(left.state_dict) == set(program.state_dict)
    assert_same(run(left.module(), ONE), expected(net, "none"), 1e-5)


def test_one_bad_cache_does_not_spoil_the_others() -> None:
    """The layer whose cache is rescaled stays dense as a whole; the other layer is quantized."""
    spelling = SPELLINGS["index_put_"]

    class MulSecond(Decoder):
        def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
            out = super().attend(layer, x, position)
            if layer == 1:
                self.v1.mul_(0.5)
            return out

        def project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            fake, self.fake = self.fake, self.fake if layer == 0 else ""
            made = super().project(layer, x)
            self.fake = fake
            return made

    net = MulSecond(spelling)
    want = expected(net, INT8)
    report = passes.quantize_kv_cache_(net, INT8, inputs(spelling)[1])
    assert set(handles(net)) == {"k0", "v0"}
    assert report.rewritten == 1 and report.found == 2
    assert "v1 stays dense: it is written by mul_" in report.text()
    assert_same(run(compiled(net), spelling), want)


# ------------------------------------------------------------------------------------------- right, though it looks odd


def test_two_writers_that_are_understood() -> None:
    """A sink slot is written anew in each step."""

    def write(cache: Tensor, position: Tensor, new: Tensor) -> None:
        cache[:, :, position] = new
        cache[:, :, :1] = new[:, :, -1:] * 1.0

    spelling = replace(ONE, update=each(write))
    for format in ("none", INT8):
        check_compile(spelling, format)


def test_writer_after_the_read() -> None:
    """Attention must see the codes as they were before the second write."""

    class Late(Decoder):
        def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
            batch, tokens, _ = x.shape
            q, k, v = self.project(layer, x)
            keys, values = of(self, layer)
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=self.causal[position], enable_gqa=True
            )
            keys[:, :, position], values[:, :, position] = k, v
            return x + self.o[layer](out.transpose(1, 2).reshape(batch, tokens, -1))

    net = Late(ONE)
    want = expected(net, INT8)
    report = passes.quantize_kv_cache_(net, INT8, inputs(ONE)[1])
    assert report.rewritten == 1
    assert_same(run(compiled(net), ONE), want)


def test_write_between_read_and_attention() -> None:
    """A view of the cache is taken before the write and read after it; it must show what was written."""

    class ViewFirst(Decoder):
        def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
            batch, tokens, _ = x.shape
            q, k, v = self.project(layer, x)
            keys, values = self.k0[:, :, :10], self.v0[:, :, :10]
            self.k0[:, :, position], self.v0[:, :, position] = k, v
            mask = self.causal[position][:, :10]
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            return x + self.o[layer](out.transpose(1, 2).reshape(batch, tokens, -1))

    spelling = replace(ONE, steps=ONE.steps[:-1])
    net = ViewFirst(spelling)
    want = expected(net, INT8)
    passes.quantize_kv_cache_(net, INT8, inputs(spelling)[1])
    assert_same(run(compiled(net), spelling), want)


def test_clone_before_the_write_keeps_what_was() -> None:
    """Attention reads a copy from before the write: the old tokens, whatever has been written since."""

    class Old(Decoder):
        def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
            batch, tokens, _ = x.shape
            q, k, v = self.project(layer, x)
            keys, values = self.k0.clone(), self.v0.clone()
            self.k0[:, :, position], self.v0[:, :, position] = k, v
            out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            return x + self.o[layer](out.transpose(1, 2).reshape(batch, tokens, -1))

    net = Old(ONE)
    want = expected(net, INT8)
    try:
        passes.quantize_kv_cache_(net, INT8, inputs(ONE)[1])
    except NothingRewrittenError:
        want = expected(net, "none")
    assert_same(run(compiled(net, allow_unrewritten=True), ONE), want)


def channels_apart(x: Tensor) -> Tensor:
    """Even channels first: another layout of the same size, which no permutation of whole axes undoes."""
    return x.view(*x.shape[:3], D // 2, 2).transpose(3, 4).reshape(x.shape)


def heads_apart(x: Tensor) -> Tensor:
    return x.view(B, 2, 2, T, D).transpose(1, 2).reshape(B, 4, T, D)


def tokens_apart(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], T // 2, 2, D).transpose(2, 3).reshape(x.shape)


def tokens_as_channels(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], D, T).transpose(2, 3)


PERMUTED = {
    "channels_of_keys": (channels_apart, None, HK, "reads the channels of the cache in another order"),
    "channels_of_values": (None, channels_apart, HK, "reads the channels of the cache in another order"),
    "channels_of_both": (
        channels_apart,
        channels_apart,
        HK,
        "reads the channels of the cache in another order",
    ),
    "heads_of_keys": (heads_apart, None, 4, "reads the heads of the cache in another order"),
    "heads_of_values": (None, heads_apart, 4, "reads the heads of the cache in another order"),
    "tokens_of_keys": (tokens_apart, None, HK, "spreads the tokens over several axes"),
    "tokens_of_both": (tokens_apart, tokens_apart, HK, "spreads the tokens over several axes"),
    "regrouped": (tokens_as_channels, None, HK, "view_3 regroups"),
    "heads_of_both": (heads_apart, heads_apart, 4, ""),
}
"""What is done to keys and to values as they are read, kv heads, and why that is refused (or an empty string)."""


@pytest.mark.parametrize("name", PERMUTED)
def test_permuted_into_another_layout_of_the_same_size(name: str) -> None:
    """Taking the result for the plain cache would give the right shapes and wrong scores."""
    move_keys, move_values, heads, why = PERMUTED[name]

    def update(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = of(net, layer)
        keys[:, :, position] = k if heads == HK else torch.cat([k, k * 0.5], 1)
        values[:, :, position] = v if heads == HK else torch.cat([v, v + 1], 1)
        keys = keys if move_keys is None else move_keys(keys)
        return keys, values if move_values is None else move_values(values)

    spelling = replace(ONE, buffers=lambda net: pair(net, B, heads, T, D), update=update)
    net = Decoder(spelling)
    try:
        report = passes.quantize_kv_cache_(net, INT8, inputs(spelling)[1])
    except NothingRewrittenError as error:
        assert why and why in str(error), str(error)
    else:
        assert not why and report.rewritten == 1, report.text()
    eager = run(copy.deepcopy(net), spelling)
    assert_same(run(compiled(net, allow_unrewritten=True), spelling), eager)


@pytest.mark.parametrize("swapped", [False, True])
def test_keys_and_values_swapped(swapped: bool) -> None:
    """What is read as keys gets the format of keys, whatever the buffer is called."""

    def update(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        first, second = of(net, layer)
        keys, values = (second, first) if swapped else (first, second)
        keys[:, :, position], values[:, :, position] = k, v
        return keys, values

    net = Decoder(replace(ONE, update=update))
    passes.quantize_kv_cache_(net, f"key={INT8},value=none", inputs(ONE)[1])
    formats = {name: one.format.name for name, one in handles(net).items()}
    assert formats == ({"v0": INT8, "k0": "none"} if swapped else {"k0": INT8, "v0": "none"})


@pytest.mark.parametrize("layout", ["bhtd", "bthd", "bhdt", "tbhd"])
def test_tied_sizes(layout: str) -> None:
    """T = H = D = B: only the dataflow tells the axes apart."""
    n = 4
    torch.manual_seed(1)
    order = [layout.index(letter) for letter in "bhtd"]

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fake = ""
            self.register_buffer("keys", torch.zeros(n, n, n, n))
            self.register_buffer("values", torch.zeros(n, n, n, n))
            self.register_buffer("causal", torch.tril(torch.ones(n, n, dtype=torch.bool)))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
            if self.fake:
                k, v = (
                    torch.ops.kvq.dequantize(torch.ops.kvq.quantize(x, self.fake), self.fake, x.dtype)
                    for x in (k, v)
                )
            back = [order.index(i) for i in range(4)]
            for cache, new in ((self.keys, k), (self.values, v)):
                cache.index_copy_(layout.index("t"), position, new.permute(back))
            keys, values = self.keys.permute(order), self.values.permute(order)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.causal[position])

    calls = [(*torch.randn(3, n, n, 1, n).unbind(0), torch.tensor([i])) for i in range(n)]
    rounded, ours = Tied(), Tied()
    rounded.fake = INT8
    with torch.no_grad():
        report = passes.quantize_kv_cache_(ours, INT8, calls[0])
        assert [cache.axes for cache in report.graphs[0].caches] == [layout, layout]
        step = compiled(ours)
        assert_same([step(*call) for call in calls], [rounded(*call) for call in calls])


def test_buffer_of_the_same_shape_that_attention_does_not_read() -> None:
    class Extra(Decoder):
        def __init__(self, spelling: Spelling) -> None:
            super().__init__(spelling)
            self.register_buffer("other", torch.zeros(B, HK, T, D))

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            self.other[:, :, position] = x[:, None, :, :D]
            return super().forward(x, position) + self.other.sum()

    net = Extra(ONE)
    want = expected(net, INT8)
    passes.quantize_kv_cache_(net, INT8, inputs(ONE)[1])
    assert set(handles(net)) == {"k0", "v0"}
    assert_same(run(compiled(net), ONE), want, 1e-5)


def test_masks_belong_to_their_layers() -> None:
    """One layer of a window and one without: the oldest token moves the full layer only (D9)."""
    window = 3

    def update(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = of(net, layer)
        keys[:, :, position], values[:, :, position] = k, v
        return keys, values

    class Alternating(Decoder):
        def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
            batch, tokens, _ = x.shape
            q, k, v = self.project(layer, x)
            keys, values = update(self, layer, k, v, position)
            mask = self.causal[position]
            if layer == 0:
                mask = mask & (torch.arange(T) > position[:, None] - window)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            return self.o[layer](out.transpose(1, 2).reshape(batch, tokens, -1))

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            return torch.cat([self.attend(layer, x, position) for layer in range(2)], -1)

    spelling = Spelling(pair, update, layers=2)
    steps = inputs(spelling)
    net = Alternating(spelling)
    passes.quantize_kv_cache_(net, INT8, steps[1])
    results = []
    for change in (0.0, 5.0):
        step = compiled(copy.deepcopy(net))
        moved = [(x.clone(), position) for x, position in steps]
        moved[0][0][:, 0] += change
        with torch.no_grad():
            results.append([step(x, position) for x, position in moved][-1])
    sliding, full = (results[0] - results[1]).chunk(2, -1)
    assert torch.equal(sliding, torch.zeros_like(sliding))
    assert full.abs().max() > 1e-3


def test_index_put_accumulate_is_refused() -> None:
    def write(cache: Tensor, position: Tensor, new: Tensor) -> None:
        cache.index_put_(
            (torch.arange(B)[:, None], torch.arange(HK)[None]), new.sum(2, keepdim=True), accumulate=True
        )

    net = Decoder(replace(ONE, update=each(write)))
    with pytest.raises(NothingRewrittenError, match="is written by"):
        passes.quantize_kv_cache_(net, INT8, inputs(ONE)[1])


def test_index_put_is_not_confused_by_a_mask_of_tokens() -> None:
    """``cache[:, :, keep] = new`` with a boolean ``keep``: right or refused."""

    def write(cache: Tensor, position: Tensor, new: Tensor) -> None:
        cache[:, :, torch.arange(T) == position] = new

    spelling = replace(ONE, update=each(write), steps=tuple((i, 1) for i in range(4)))
    net = Decoder(spelling)
    want = expected(net, INT8)
    try:
        passes.quantize_kv_cache_(net, INT8, inputs(spelling)[1])
    except NothingRewrittenError as error:
        assert "is written by index_put_" in str(error)
        return
    assert_same(run(net, spelling), want)


def test_plain_write_is_the_control() -> None:
    """The same model without what the cases add is quantized: the cases are refused for what they add."""
    net = Decoder(replace(ONE, update=each(index_put_)))
    passes.quantize_kv_cache_(net, INT8, inputs(ONE)[1])
    assert set(handles(net)) == {"k0", "v0"}

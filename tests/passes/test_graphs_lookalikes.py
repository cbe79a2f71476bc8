"""Graphs that resemble attention over a cache but mean something else: left alone or rewritten, and right in any case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import passes
from kvq_ops.errors import UnsupportedWriteError
from kvq_ops.handle import QuantizedKV

from .fake_quantized import assert_same_caches, compiled, fakes, pair, with_stores
from .toys import CAPACITY, HKV, HQ, WIDTH, D, Layer, causal_mask

B = 2
FORMAT = "int8_per_token_head"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    passes.clear_report()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Look(Layer):
    """A layer whose use of its caches a subclass decides in ``attend``."""

    def __init__(self, format: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fake = fakes(format)

    def forward(self, x: Tensor, position: Tensor) -> Any:
        query, key, value = self.project(x)
        if self.fake:
            key, value = self.fake[0](key), self.fake[1](value)
        return self.attend(query, key, value, position)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Any:
        raise NotImplementedError

    def fill(self, key: Tensor, value: Tensor, position: Tensor) -> None:
        self.k_cache.index_copy_(2, position, key)
        self.v_cache.index_copy_(2, position, value)

    def sdpa(self, query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        mask = causal_mask(position, keys.shape[2])
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


class ReadElsewhere(Look):
    """The cache is also summed over its tokens."""

    def attend(self, query, key, value, position):
        self.fill(key, value, position)
        return self.sdpa(query, self.k_cache, self.v_cache, position), self.k_cache.sum(2)


class WriteAfterCopy(Look):
    """Attention reads the cache as it was before this call's keys came."""

    def attend(self, query, key, value, position):
        keys, values = self.k_cache.clone(), self.v_cache.clone()
        self.fill(key, value, position)
        return self.sdpa(query, keys, values, position + 1)


class WriteAfterDecoding(Look):
    """As before, but what is read are computed values."""

    def attend(self, query, key, value, position):
        keys, values = self.k_cache * 1.5, self.v_cache + 0.0
        self.fill(key, value, position)
        return self.sdpa(query, keys, values, position + 1)


class WriteAfterView(Look):
    """A view of the cache sees a write that comes after it was made."""

    def attend(self, query, key, value, position):
        keys, values = self.k_cache[:, :, :], self.v_cache.permute(0, 1, 3, 2)
        self.fill(key, value, position)
        return self.sdpa(query, keys, values.transpose(2, 3), position)


class WriteBetweenReadAndAttention(Look):
    """The scores are of the old keys; the values are of the new ones."""

    def attend(self, query, key, value, position):
        keys = self.k_cache.repeat_interleave(HQ // HKV, 1)
        scores = query @ keys.transpose(2, 3) * D**-0.5
        self.fill(key, value, position)
        scores = scores.masked_fill(~causal_mask(position, keys.shape[2]), -torch.inf)
        return scores.softmax(-1) @ self.v_cache.repeat_interleave(HQ // HKV, 1)


class TwoWriters(Look):
    """Each new token is also written at the end of the cache."""

    def attend(self, query, key, value, position):
        self.fill(key, value, position)
        self.fill(-key, 2 * value, CAPACITY - 1 - position)
        return F.scaled_dot_product_attention(query, self.k_cache, self.v_cache, enable_gqa=True)


class Swapped(Look):
    """Keys and values change roles."""

    def attend(self, query, key, value, position):
        self.fill(key, value, position)
        return self.sdpa(query, self.v_cache, self.k_cache, position)


class KeysAsValues(Look):
    """One cache is both."""

    def attend(self, query, key, value, position):
        self.fill(key, value, position)
        return (
            self.sdpa(query, self.k_cache, self.k_cache, position) + self.v_cache.sum(2, keepdim=True)[:, :1]
        )


class Tied(Look):
    """Heads, tokens and channels are equally many, and attention runs over the wrong ones."""

    def attend(self, query, key, value, position):
        self.fill(key, value, position)
        side = self.k_cache.shape[2]
        q = query[:, :, :1].expand(-1, -1, side, -1).repeat(1, side // HQ, 1, 1)
        keys, values = self.order(self.k_cache), self.order(self.v_cache)
        return F.scaled_dot_product_attention(q, keys, values)

    @staticmethod
    def order(cache: Tensor) -> Tensor:
        raise NotImplementedError


class HeadsAsTokens(Tied):
    @staticmethod
    def order(cache):
        return cache.transpose(1, 2)


class ChannelsAsTokens(Tied):
    @staticmethod
    def order(cache):
        return cache.transpose(2, 3)


class Reinterpreted(Tied):
    """Another layout of the same size: the memory of ``[H, D]`` read as ``[D, H]``."""

    @staticmethod
    def order(cache):
        batch, heads, tokens, channels = cache.shape
        return cache.transpose(1, 2).reshape(batch, tokens, channels, heads).transpose(1, 2)


def check(kind: type[Look], steps: tuple[int, ...] = (4, 1, 1), format: str = FORMAT) -> passes.Report:
    """Run a model over stores and its fake-quantized twin side by side."""
    fake, stored = pair(kind, format)
    step, start = compiled(stored, allow_unrewritten=True), 0
    for size in steps:
        x, position = torch.randn(B, size, WIDTH), torch.arange(start, start + size)
        torch.testing.assert_close(step(x, position), fake(x, position), rtol=1e-5, atol=1e-5)
        start += size
    assert_same_caches(stored, fake)
    return passes.report()


@pytest.mark.parametrize(
    "kind", [ReadElsewhere, WriteAfterCopy, WriteAfterView, TwoWriters, Swapped, KeysAsValues]
)
def test_rewritten(kind: type[Look]) -> None:
    report = check(kind)
    assert report.rewritten == report.found >= 1, report.text()


@pytest.mark.parametrize("kind", [WriteAfterDecoding, WriteBetweenReadAndAttention])
def test_left_with_a_reason(kind: type[Look]) -> None:
    report = check(kind)
    assert report.rewritten == 0 and report.found >= 1
    assert all(site.reason and site.node for site in report.left), report.text()


@pytest.mark.parametrize("kind", [HeadsAsTokens, ChannelsAsTokens, Reinterpreted])
def test_tied_sizes(kind: type[Tied]) -> None:
    class Square(kind):  # type: ignore[misc, valid-type]
        def __init__(self, format: str = "") -> None:
            super().__init__(format, capacity=8, head_dim=8)
            self.kv = nn.Linear(WIDTH, 2 * 8 * 8, bias=False)
            for name in ("k_cache", "v_cache"):
                self._buffers[name] = torch.zeros(B, 8, 8, 8)

        def project(self, x):
            query = self.q(x).unflatten(2, (HQ, 8)).transpose(1, 2)
            key, value = self.kv(x).unflatten(2, (2, 8, 8)).unbind(2)
            return query, key.transpose(1, 2), value.transpose(1, 2)

    report = check(Square)
    assert report.rewritten == 0
    assert all(site.reason for site in report.left), report.text()


@pytest.mark.parametrize("format", ["none", FORMAT, "int4_group32"])
def test_a2_mask_that_is_not_causal(format: str) -> None:
    """A2: a random additive mask for each row; what stands at masked tokens does not matter."""

    class Masked(Look):
        def forward(self, x, position, mask):
            query, key, value = self.project(x)
            if self.fake:
                key, value = self.fake[0](key), self.fake[1](value)
            self.fill(key, value, position)
            return F.scaled_dot_product_attention(
                query, self.k_cache, self.v_cache, attn_mask=mask, enable_gqa=True
            )

    fake, stored = pair(lambda f: Masked(f, capacity=9), format)
    spoiled = with_stores(Masked(capacity=9).eval(), format)
    spoiled.load_state_dict({k: v for k, v in fake.state_dict().items() if "cache" not in k}, strict=False)
    step, x, position = compiled(stored), torch.randn(B, 9, WIDTH), torch.arange(9)
    hidden = torch.rand(B, 1, 1, 9) > 0.5
    hidden[:, :, :, 0] = False
    mask = torch.randn(B, 1, 9, 9).masked_fill(hidden, -torch.inf)
    out = step(x, position, mask)
    torch.testing.assert_close(out, fake(x, position, mask), rtol=0, atol=1e-5)

    # The same, with 1e3 at the masked tokens of keys and values.
    real_project = spoiled.project

    def project(x):
        query, key, value = real_project(x)
        gone = hidden.transpose(2, 3)
        return query, key.masked_fill(gone, 1e3), value.masked_fill(gone, 1e3)

    spoiled.project = project  # type: ignore[method-assign]
    torch.testing.assert_close(compiled(spoiled)(x, position, mask), out, rtol=0, atol=1e-5)
    # The twin that drops the mask is far away, so the comparison can fail.
    open_ = spoiled(x, position, torch.zeros_like(mask))
    assert (open_ - out).abs().max() > 1.0
    assert passes.report().rewritten == 2


# ------------------------------------------------------------------------------------------ writes that must not be lost


class FlatWrite(Look):
    """Writes through a view in which heads and tokens are one axis."""

    def attend(self, query, key, value, position):
        self.fill(key, value, position)
        self.k_cache.view(B, -1, D)[:, 3].zero_()
        return self.sdpa(query, self.k_cache, self.v_cache, position)


class ChannelWrite(Look):
    """Writes half of each head vector; the codes of the other half share its scale."""

    def attend(self, query, key, value, position):
        self.fill(key, value, position)
        self.k_cache[:, :, position, : D // 2] = key[..., : D // 2]
        return self.sdpa(query, self.k_cache, self.v_cache, position)


@pytest.mark.parametrize("kind", [FlatWrite, ChannelWrite])
def test_write_that_codes_cannot_follow(kind: type[Look]) -> None:
    stored = with_stores(kind().eval(), FORMAT)
    step = compiled(stored)
    for _ in range(2):  # the second call must not find a compiled function that goes on without the write
        with pytest.raises(UnsupportedWriteError) as caught:
            step(torch.randn(B, 4, WIDTH), torch.arange(4))
        text = str(caught.value)
        assert "got:" in text and "allowed:" in text and "do:" in text
    assert all(int(handle.length.max()) == 0 for handle in (stored.k_cache, stored.v_cache))


def test_scaled_in_place() -> None:
    """Dynamo itself runs the write on a fake cache; what it reports names our reason."""

    class Scaled(Look):
        def attend(self, query, key, value, position):
            self.fill(key, value, position)
            self.k_cache.mul_(0.5)
            return self.sdpa(query, self.k_cache, self.v_cache, position)

    stored = with_stores(Scaled().eval(), FORMAT)
    with pytest.raises(Exception, match="in-place operation that does not write whole tokens"):
        compiled(stored)(torch.randn(B, 4, WIDTH), torch.arange(4))


def test_stores_are_not_shared_between_rows() -> None:
    """A cache expanded over the batch is read by all rows, written by none."""
    prefix = QuantizedKV.from_dense(torch.randn(1, HKV, 8, D), FORMAT)
    values = QuantizedKV.from_dense(torch.randn(1, HKV, 8, D), FORMAT)

    def shared(query, keys, values):
        keys, values = keys.expand(3, -1, -1, -1), values.expand(3, -1, -1, -1)
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    query = torch.randn(3, HQ, 2, D)
    out = compiled(shared, allow_unrewritten=True)(query, prefix, values)
    torch.testing.assert_close(
        out, shared(query, prefix.dequantize(), values.dequantize()), rtol=0, atol=1e-5
    )

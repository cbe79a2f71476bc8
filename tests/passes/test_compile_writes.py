"""Every way of writing and holding a cache, compiled: codes equal plain-torch fake quantization, outputs equal attention over it.

One layer is used, so that keys and values do not depend on earlier rounding and codes can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import passes
from kvq_ops.formats import get_format
from kvq_ops.handle import QuantizedKV

from .fake_quantized import assert_same_caches, compiled, fakes, pair, with_stores
from .toys import CAPACITY, HKV, HQ, WIDTH, Layer, causal_mask

B, D = 2, 32
# One with scales for each token, one with a scale that the first write fixes.
FORMATS = ("int8_per_token_head", "nvfp4")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    passes.clear_report()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------ writes into buffers


@dataclass(frozen=True)
class Write:
    """A spelling of a write.

    Attributes:
        run: ``(cache, position, start, new)`` to the keys or values that attention reads.
        rows: positions are ``[B, Tq]``.
        capacity: of the cache; smaller than the number of tokens for rings.
        pieces: a call writes in several pieces, so that the first fixes static scales for the others.
    """

    run: Callable[[Tensor, Tensor, int, Tensor], Tensor]
    rows: bool = False
    capacity: int = CAPACITY
    pieces: bool = False
    mask: Callable[[Tensor, int], Tensor] = causal_mask


WRITES: dict[str, Write] = {}


def spelling(**kwargs):
    def add(run):
        WRITES[run.__name__] = Write(run, **kwargs)
        return run

    return add


@spelling()
def index_copy(cache, position, start, new):
    return cache.index_copy_(2, position, new)


@spelling()
def index_put(cache, position, start, new):
    cache[:, :, position] = new
    return cache


@spelling()
def index_put_functionally_then_copy(cache, position, start, new):
    cache.copy_(cache.index_copy(2, position, new))
    return cache


@spelling(rows=True)
def index_put_by_row(cache, position, start, new):
    rows = torch.arange(cache.shape[0], device=cache.device)[:, None]
    cache[rows, :, position] = new.transpose(1, 2)
    return cache


@spelling(rows=True, pieces=True)
def index_put_by_row_in_a_loop(cache, position, start, new):
    for row in range(cache.shape[0]):
        cache[row].index_copy_(1, position[row], new[row])
    return cache


@spelling()
def slice_copy(cache, position, start, new):
    cache[:, :, start : start + new.shape[2]].copy_(new)
    return cache


@spelling()
def slice_assign(cache, position, start, new):
    cache[:, :, start : start + new.shape[2]] = new
    return cache


@spelling()
def narrow_copy(cache, position, start, new):
    cache.narrow(2, start, new.shape[2]).copy_(new)
    return cache


@spelling()
def slice_scatter_then_copy(cache, position, start, new):
    cache.copy_(torch.slice_scatter(cache, new, 2, start, start + new.shape[2]))
    return cache


@spelling()
def prefix_of_reads_and_writes(cache, position, start, new):
    # Only the tokens that are filled are attended to; the mask is cut to match.
    end = start + new.shape[2]
    cache[:, :, start:end] = new
    return cache[:, :, :end]


@spelling()
def batch_prefix(cache, position, start, new):
    part = cache[: new.shape[0]]
    part[:, :, position] = new
    return part


@spelling(pieces=True)
def token_by_token(cache, position, start, new):
    for i in range(new.shape[2]):
        cache[:, :, start + i] = new[:, :, i]
    return cache


@spelling()
def rows_of_tokens(cache, position, start, new):
    # The cache as [T, B, H, D], as some decoders keep it.
    cache.permute(2, 0, 1, 3)[position] = new.permute(2, 0, 1, 3)
    return cache


def ring_mask(position: Tensor, capacity: int) -> Tensor:
    """Every slot that is filled: ``capacity`` newest tokens, for calls of one token."""
    slots = torch.arange(capacity, device=position.device)
    return (slots <= position[-1])[None, None, None]


@spelling(capacity=8, mask=ring_mask)
def ring(cache, position, start, new):
    return cache.index_copy_(2, position % cache.shape[2], new)


@spelling(capacity=8, mask=ring_mask)
def ring_by_roll(cache, position, start, new):
    # Once full, the oldest token leaves at the front.
    full = (position[-1] >= cache.shape[2]).to(torch.int64)
    slots = (torch.arange(cache.shape[2]) + full) % cache.shape[2]
    rolled = cache[:, :, slots]
    rolled[:, :, position.clamp(max=cache.shape[2] - 1)] = new
    cache.copy_(rolled)
    return cache


class Step(Layer):
    """One attention over buffers, without anything after it that could hide a difference."""

    def __init__(self, write: Write, format: str = "", batch: int = B) -> None:
        super().__init__(batch=batch, capacity=write.capacity)
        self.spelling = write
        self.fake = fakes(format)

    def forward(self, x: Tensor, position: Tensor, start: int) -> Tensor:
        query, key, value = self.project(x)
        if self.fake:
            key, value = self.fake[0](key), self.fake[1](value)
        keys = self.spelling.run(self.k_cache, position, start, key)
        values = self.spelling.run(self.v_cache, position, start, value)
        mask = self.spelling.mask(position, self.spelling.capacity)[..., : keys.shape[2]]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(
    "name, format",
    [(n, f) for n, w in WRITES.items() for f in FORMATS if not (w.pieces and get_format(f).static_planes)],
)
def test_write(name: str, format: str) -> None:
    write = WRITES[name]
    fake, stored = pair(lambda f: Step(write, f), format)
    step = compiled(stored)
    sizes = [1] * 11 if write.capacity < CAPACITY else [5, 1, 1, 3]
    start = 0
    for size in sizes:
        x = torch.randn(B, size, WIDTH)
        position = torch.arange(start, start + size)
        if write.rows:
            position = position + torch.tensor([[0], [2]])
        expected = fake(x, position, start)
        torch.testing.assert_close(step(x, position, start), expected, rtol=0, atol=1e-5)
        start += size
    assert_same_caches(stored, fake)
    report = passes.report()
    assert report.rewritten == report.found == len(report.graphs) >= 1, report.text()


# -------------------------------------------------------------------------------------------- where caches come from


class Bare(Layer):
    """Attention whose caches come from outside."""

    def __init__(self, format: str = "") -> None:
        super().__init__(cached=False)
        self.fake = fakes(format)

    def new(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.project(x)
        if self.fake:
            key, value = self.fake[0](key), self.fake[1](value)
        return query, key, value

    @staticmethod
    def attend(query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        mask = causal_mask(position, keys.shape[2])
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


class Arguments(Bare):
    def forward(self, x, position, caches):
        query, key, value = self.new(x)
        keys, values = caches
        keys[:, :, position] = key
        values[:, :, position] = value
        return self.attend(query, keys, values, position), caches


class Dictionaries(Bare):
    def forward(self, x, position, caches):
        query, key, value = self.new(x)
        keys, values = caches["layers"][0]["k"], caches["layers"][0]["v"]
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, value)
        return self.attend(query, keys, values, position), caches


class IndexCopied(Bare):
    def forward(self, x, position, caches):
        query, key, value = self.new(x)
        keys, values = (
            old.index_copy(2, position, new) for old, new in zip(caches, (key, value), strict=True)
        )
        return self.attend(query, keys, values, position), (keys, values)


class SliceScattered(Bare):
    def forward(self, x, position, caches):
        query, key, value = self.new(x)
        keys, values = (
            torch.slice_scatter(old, new, 2, 0, new.shape[2])
            for old, new in zip(caches, (key, value), strict=True)
        )
        return self.attend(query, keys, values, torch.arange(x.shape[1])), (keys, values)


class Growing(Bare):
    def forward(self, x, position, caches):
        query, key, value = self.new(x)
        keys, values = (torch.cat([old, new], 2) for old, new in zip(caches, (key, value), strict=True))
        return self.attend(query, keys, values, position), (keys, values)


def plain(value):
    """Handles in a nested value as what they decode to."""
    return torch.utils._pytree.tree_map_only(QuantizedKV, lambda t: t.dequantize(), value)


def caches_for(kind: type[Bare], format: str | None) -> object:
    tokens = 0 if kind is Growing else CAPACITY

    def one():
        shape = (B, HKV, tokens, D)
        return torch.zeros(shape) if format is None else QuantizedKV.empty(shape, format)

    return {"layers": [{"k": one(), "v": one()}]} if kind is Dictionaries else (one(), one())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", [Arguments, Dictionaries, IndexCopied, SliceScattered, Growing])
def test_caches_passed_in_and_returned(kind: type[Bare], format: str) -> None:
    fake, stored = kind(format).eval(), kind().eval()
    stored.load_state_dict(fake.state_dict())
    step = compiled(stored)
    dense, codes = caches_for(kind, None), caches_for(kind, format)
    start = 0
    for size in (4, 1, 1, 2):
        x, position = torch.randn(B, size, WIDTH), torch.arange(start, start + size)
        expected, dense = fake(x, position, dense)
        out, codes = step(x, position, codes)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        leaves = torch.utils._pytree.tree_leaves(codes)
        assert leaves and all(isinstance(leaf, QuantizedKV) for leaf in leaves)
        assert all(leaf.format == get_format(format) for leaf in leaves)
        for a, b in zip(
            torch.utils._pytree.tree_leaves(plain(codes)), torch.utils._pytree.tree_leaves(dense), strict=True
        ):
            assert torch.equal(a, b)
        start += size
    assert passes.report().rewritten == passes.report().found >= 1


def test_growing_cache_does_not_compile_for_each_length() -> None:
    """C6: sizes of a cache that grows become symbolic."""
    stored = Growing().eval()
    step, codes = compiled(stored), caches_for(Growing, "int8_per_token_head")
    for at in range(12):
        _, codes = step(torch.randn(B, 1, WIDTH), torch.tensor([at]), codes)
    assert codes[0].shape[2] == 12
    assert len(passes.report().graphs) <= 3


def test_caches_of_two_formats_in_one_graph() -> None:
    class Two(nn.Module):
        def __init__(self, a: str = "", b: str = "") -> None:
            super().__init__()
            self.a, self.b = Step(WRITES["index_copy"], a), Step(WRITES["slice_assign"], b)

        def forward(self, x, position, start):
            return self.a(x, position, start), self.b(x, position, start)

    fake, stored = Two("int8_per_token_head", "int4_group32").eval(), Two().eval()
    stored.load_state_dict(fake.state_dict())
    with_stores(stored.a, "int8_per_token_head")
    with_stores(stored.b, "int4_group32")
    step, start = compiled(stored), 0
    for size in (4, 1):
        inputs = (torch.randn(B, size, WIDTH), torch.arange(start, start + size), start)
        torch.testing.assert_close(step(*inputs), fake(*inputs), rtol=0, atol=1e-5)
        start += size
    assert_same_caches(stored, fake)
    (site_a, site_b) = passes.report().graphs[0].sites
    assert site_a.formats == ("int8_per_token_head",) * 2
    assert site_b.formats == ("int4_group32",) * 2


def test_one_cache_read_by_two_layers() -> None:
    """Layers that share another layer's cache read it and write nothing."""

    class Shared(nn.Module):
        def __init__(self, format: str = "") -> None:
            super().__init__()
            self.owner = Step(WRITES["index_copy"], format)
            self.reader = nn.Linear(WIDTH, HQ * D, bias=False)

        def forward(self, x, position, start):
            first = self.owner(x, position, start)
            query = self.reader(x).unflatten(2, (HQ, D)).transpose(1, 2)
            mask = causal_mask(position, CAPACITY)
            keys, values = self.owner.k_cache, self.owner.v_cache
            return first + F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, enable_gqa=True
            )

    fake, stored = pair(Shared, "int8_per_token_head")
    step, start = compiled(stored), 0
    for size in (4, 1):
        inputs = (torch.randn(B, size, WIDTH), torch.arange(start, start + size), start)
        torch.testing.assert_close(step(*inputs), fake(*inputs), rtol=0, atol=1e-5)
        start += size
    assert passes.report().graphs[0].rewritten == 2
    assert len(passes.report().graphs[0].caches) == 2


# -------------------------------------------------------------------------------------------------------------- shapes


def test_dynamic_batch() -> None:
    """Batches 1, 2, 3, ...: one graph each for the first two, then one for all."""
    format = "int8_per_token_head"
    fake, stored = Arguments(format).eval(), Arguments().eval()
    stored.load_state_dict(fake.state_dict())
    step = compiled(stored)
    for batch in (1, 2, 3, 5, 4):
        dense = [torch.zeros(batch, HKV, CAPACITY, D) for _ in range(2)]
        codes = [QuantizedKV.empty(one.shape, format) for one in dense]
        for start in range(3):
            x, position = torch.randn(batch, 1, WIDTH), torch.tensor([start])
            expected, _ = fake(x, position, dense)
            torch.testing.assert_close(step(x, position, codes)[0], expected, rtol=0, atol=1e-5)
        assert all(torch.equal(a.dequantize(), b) for a, b in zip(codes, dense, strict=True))
    assert len(passes.report().graphs) <= 3


def test_chunked_prefill_equals_one_prefill() -> None:
    """The store after chunks of any size holds the codes of one prefill (0/1 specialisation: a chunk of one)."""
    x = torch.randn(B, 13, WIDTH)
    outputs, stores = [], []
    for sizes in ([13], [1, 5, 7], [6, 6, 1], [2, 3, 1, 7]):
        torch._dynamo.reset()
        torch.manual_seed(1)
        stored = with_stores(Step(WRITES["index_copy"]).eval(), "int4_group32")
        step, start, out = compiled(stored), 0, []
        for size in sizes:
            out.append(step(x[:, start : start + size], torch.arange(start, start + size), 0))
            start += size
        outputs.append(torch.cat(out, 2))
        stores.append([plane for b in (stored.k_cache, stored.v_cache) for plane in b.store])
    for out, store in zip(outputs[1:], stores[1:], strict=True):
        torch.testing.assert_close(out, outputs[0], rtol=0, atol=2e-5)
        for a, b in zip(store, stores[0], strict=True):
            assert torch.equal(a, b)

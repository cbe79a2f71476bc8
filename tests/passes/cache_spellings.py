"""The many ways in which models keep the keys and values of a small decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .cache_decoder import HK, HQ, B, D, Decoder, Spelling, T

# --------------------------------------------------------------------------------------- one buffer for each, bhtd


def pair(net: Decoder, *shape: int) -> None:
    for layer in range(net.spelling.layers):
        for name in ("k", "v"):
            net.cache(f"{name}{layer}", *(shape or (B, HK, T, D)))


def of(net: Decoder, layer: int) -> tuple[Tensor, Tensor]:
    return getattr(net, f"k{layer}"), getattr(net, f"v{layer}")


def each(
    write: Callable[[Tensor, Tensor, Tensor], Tensor | None],
) -> Callable[[Decoder, int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Update both caches of a layer by ``write(cache, position, new)``, which may give another tensor to read."""

    def update(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        read = []
        for cache, new in zip(of(net, layer), (k, v), strict=True):
            result = write(cache, position, new)
            read.append(cache if result is None else result)
        return read[0], read[1]

    return update


def index_copy_(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache.index_copy_(2, position, new)


def index_put_(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache[:, :, position] = new


def index_put_rows(cache: Tensor, position: Tensor, new: Tensor) -> None:
    rows = torch.arange(cache.shape[0])[:, None]
    cache[rows, :, position[None, :].expand(cache.shape[0], -1)] = new.transpose(1, 2)


def index_put_mixed(cache: Tensor, position: Tensor, new: Tensor) -> None:
    """Every row of its own; the mask does not know, so all rows stand at the same length here."""
    for row in range(cache.shape[0]):
        cache[row].index_copy_(1, position, new[row])


def put_call(cache: Tensor, position: Tensor, new: Tensor) -> None:
    torch.ops.aten.index_put_(cache, [None, None, position], new)


def span(position: Tensor, new: Tensor) -> tuple[int, int]:
    start = position[0].item()
    torch._check(start >= 0)
    torch._check(start + new.shape[2] <= T)
    return start, new.shape[2]


def slice_copy(cache: Tensor, position: Tensor, new: Tensor) -> None:
    start, tokens = span(position, new)
    cache[:, :, start : start + tokens] = new


def narrow_copy(cache: Tensor, position: Tensor, new: Tensor) -> None:
    start, tokens = span(position, new)
    cache.narrow(2, start, tokens).copy_(new)


def slice_scatter(cache: Tensor, position: Tensor, new: Tensor) -> None:
    start, tokens = span(position, new)
    cache.copy_(cache.slice_scatter(new, 2, start, start + tokens))


def functional_index_copy(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    written = cache.index_copy(2, position, new)
    cache.copy_(written)
    return written


def functional_index_put(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache.copy_(torch.ops.aten.index_put(cache, [None, None, position], new))


def where_write(cache: Tensor, position: Tensor, new: Tensor) -> None:
    """One-hot writes, as accelerators without scatter do them; for one token."""
    hot = (torch.arange(T) == position).view(1, 1, T, 1)
    cache.copy_(torch.where(hot, new, cache))


def prefix_then_tokens(cache: Tensor, position: Tensor, new: Tensor) -> None:
    if new.shape[2] > 3:
        cache[:, :, : new.shape[2]] = new
    else:
        cache[:, :, position] = new


def prefix_copy(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache[:, :, : new.shape[2]].copy_(new)


def whole_copy(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache.copy_(new)


# ------------------------------------------------------------------------------------------------- windows


W = 6


def ring_write(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache[:, :, position % W] = new


def ring_mask(net: Decoder, position: Tensor) -> Tensor:
    last = position[-1]
    held = last - (last - torch.arange(W)) % W
    return (held >= 0) & (held <= position[:, None]) & (held > position[:, None] - W)


def shift_mask(net: Decoder, position: Tensor) -> Tensor:
    held = position[-1] - (W - 1) + torch.arange(W)
    return (held >= 0) & (held <= position[:, None]) & (held > position[:, None] - W)


def roll_and_write(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    tokens = new.shape[2]
    moved = cache.roll(-tokens, 2)
    moved[:, :, -tokens:] = new
    cache.copy_(moved)
    return moved


def roll_index_copy(cache: Tensor, position: Tensor, new: Tensor) -> None:
    """As transformers' static sliding cache writes one token past its window."""
    moved = cache.roll(-1, dims=2)
    moved.index_copy_(2, torch.tensor([W - 1]), new)
    cache.copy_(moved)


def cat_and_copy(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    moved = torch.cat([cache[:, :, new.shape[2] :], new], 2)
    cache.copy_(moved)
    return moved


def cat_whole_and_cut(cache: Tensor, position: Tensor, new: Tensor) -> Tensor:
    """Attend to the whole window and what is new, keep the newest ``W``."""
    joined = torch.cat([cache, new], 2)
    cache.copy_(joined[:, :, new.shape[2] :])
    return joined


def joined_mask(net: Decoder, position: Tensor) -> Tensor:
    held = torch.cat([position[0] - W + torch.arange(W), position])
    return (held >= 0) & (held <= position[:, None]) & (held > position[:, None] - W)


RING_STEPS = ((0, 3), (3, 1), (4, 3), (7, 1), (8, 2), (10, 1))
SINGLE = tuple((i, 1) for i in range(9))


# -------------------------------------------------------------------------------------- several caches in one tensor


def kv_leading(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    cache = getattr(net, f"c{layer}")
    cache[0].index_copy_(2, position, k)
    cache[1].index_copy_(2, position, v)
    return cache[0], cache[1]


def kv_middle(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    cache = getattr(net, f"c{layer}")
    cache[:, 0, :, position] = k
    cache[:, 1, :, position] = v
    keys, values = cache.unbind(1)
    return keys, values


def kv_together(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Both written by one operation."""
    cache = getattr(net, f"c{layer}")
    cache.index_copy_(3, position, torch.stack([k, v]))
    return cache[0], cache[1]


def kv_channels(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    cache = getattr(net, f"c{layer}")
    cache[:, :, position] = torch.cat([k, v], -1)
    return cache[..., :D], cache[..., D:]


def kv_channels_apart(
    net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    cache = getattr(net, f"c{layer}")
    cache[:, :, position, :D] = k
    cache[:, :, position, D:] = v
    return cache.split(D, -1)


def kv_heads(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Values as further heads behind those of the keys."""
    cache = getattr(net, f"c{layer}")
    cache[:, :, position] = torch.cat([k, v], 1)
    return cache[:, :HK], cache[:, HK:]


def kv_rows(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Values as further rows behind those of the keys."""
    cache = getattr(net, f"c{layer}")
    cache.index_copy_(2, position, torch.cat([k, v]))
    keys, values = cache.chunk(2)
    return keys, values


def both(*shape: int) -> Callable[[Decoder], None]:
    def register(net: Decoder) -> None:
        for layer in range(net.spelling.layers):
            net.cache(f"c{layer}", *shape)

    return register


def all_layers(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = net.c[layer, 0], net.c[layer, 1]
    keys[:, :, position] = k
    values.index_copy_(2, position, v)
    return keys, values


def all_layers_inside(
    net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    net.kc[:, layer, :, position] = k
    net.vc[:, layer, :, position] = v
    return net.kc[:, layer], net.vc[:, layer]


def two_inside(net: Decoder) -> None:
    net.cache("kc", B, net.spelling.layers, HK, T, D)
    net.cache("vc", B, net.spelling.layers, HK, T, D)


def as_views(net: Decoder) -> None:
    """Buffers that are views of one tensor, registered one by one."""
    whole = torch.zeros(2, B, HK, T, D)
    net.register_buffer("k0", whole[0])
    net.register_buffer("v0", whole[1])


# ---------------------------------------------------------------------------------------------------- other layouts


def bthd(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = of(net, layer)
    keys[:, position] = k.transpose(1, 2)
    values[:, position] = v.transpose(1, 2)
    return keys.transpose(1, 2), values.transpose(1, 2)


def bhdt(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = of(net, layer)
    keys[..., position] = k.transpose(2, 3)
    values.index_copy_(3, position, v.transpose(2, 3))
    return keys.transpose(2, 3), values.transpose(2, 3)


def tbhd(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = of(net, layer)
    keys[position] = k.permute(2, 0, 1, 3)
    values[position] = v.permute(2, 0, 1, 3)
    return keys.permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)


def flat_heads(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """``[B*H, T, D]``."""
    keys, values = of(net, layer)
    keys[:, position] = k.reshape(B * HK, -1, D)
    values[:, position] = v.reshape(B * HK, -1, D)
    return keys.view(B, HK, T, D), values.view(B, HK, T, D)


def merged_heads(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, T, H*D]``."""
    keys, values = of(net, layer)
    keys[:, position] = k.transpose(1, 2).reshape(B, -1, HK * D)
    values[:, position] = v.transpose(1, 2).reshape(B, -1, HK * D)
    return keys.view(B, T, HK, D).transpose(1, 2), values.view(B, T, HK, D).transpose(1, 2)


def repeated_heads(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = of(net, layer)
    keys[:, :, position] = k
    values[:, :, position] = v
    wide = (B, HK, HQ // HK, T, D)
    keys, values = (x[:, :, None].expand(wide).reshape(B, HQ, T, D) for x in (keys, values))
    return keys, values


# ------------------------------------------------------------------------------------------------- reading in part


def filled(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Read up to the last token, a number that only the data knows."""
    keys, values = of(net, layer)
    keys[:, :, position] = k
    values[:, :, position] = v
    net.end = position[-1].item() + 1
    torch._check(net.end >= 1)
    torch._check(net.end <= T)
    return keys[:, :, : net.end], values[:, :, : net.end]


def filled_mask(net: Decoder, position: Tensor) -> Tensor:
    return net.causal[position][:, : net.end]


def first_eight(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = of(net, layer)
    keys[:, :, position] = k
    values[:, :, position] = v
    return keys[:, :, :8], values[:, :, :8]


def first_eight_mask(net: Decoder, position: Tensor) -> Tensor:
    return net.causal[position][:, :8]


def some_heads(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """A wider cache of which this model uses heads 1 and 2."""
    keys, values = of(net, layer)
    keys[:, 1:3, position] = k
    values[:, 1:3].index_copy_(2, position, v)
    return keys[:, 1:3], values[:, 1:3]


def some_rows(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """A cache for a larger batch, of which the first rows are used."""
    keys, values = of(net, layer)
    keys[:B, :, position] = k
    values[:B, :, position] = v
    return keys[:B], values[:B]


# ------------------------------------------------------------------------------------------- shared, crossed


def shared(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """The second layer attends to the cache of the first and keeps none."""
    keys, values = net.k0, net.v0
    if layer == 0:
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
    return keys, values


def one_pair(net: Decoder) -> None:
    net.cache("k0", B, HK, T, D)
    net.cache("v0", B, HK, T, D)


def filled_pair(net: Decoder) -> None:
    generator = torch.Generator().manual_seed(5)
    net.register_buffer("k0", torch.randn(B, HK, T, D, generator=generator))
    net.register_buffer("v0", torch.randn(B, HK, T, D, generator=generator))


def only_read(net: Decoder, layer: int, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    return net.k0, net.v0


def no_mask(net: Decoder, position: Tensor) -> None:
    return None


SPELLINGS: dict[str, Spelling] = {
    "index_copy_": Spelling(pair, each(index_copy_), layers=2),
    "index_put_": Spelling(pair, each(index_put_), layers=2),
    "index_put_rows": Spelling(pair, each(index_put_rows)),
    "index_put_call": Spelling(pair, each(put_call)),
    "row_by_row": Spelling(pair, each(index_put_mixed)),
    "slice_copy": Spelling(pair, each(slice_copy), longest=T - 1),
    "narrow_copy": Spelling(pair, each(narrow_copy), longest=T - 1),
    "slice_scatter": Spelling(pair, each(slice_scatter)),
    "functional_index_copy": Spelling(pair, each(functional_index_copy)),
    "functional_index_put": Spelling(pair, each(functional_index_put)),
    "prefix_then_tokens": Spelling(pair, each(prefix_then_tokens), longest=0),
    "prefix_copy": Spelling(pair, each(prefix_copy), longest=T - 1, steps=((0, 5), (0, 7))),
    "ring": Spelling(lambda net: pair(net, B, HK, W, D), each(ring_write), ring_mask, 2, steps=RING_STEPS),
    "roll_and_write": Spelling(
        lambda net: pair(net, B, HK, W, D), each(roll_and_write), shift_mask, longest=W - 1, steps=RING_STEPS
    ),
    "roll_index_copy": Spelling(
        lambda net: pair(net, B, HK, W, D), each(roll_index_copy), shift_mask, longest=0, steps=SINGLE
    ),
    "cat_and_copy": Spelling(
        lambda net: pair(net, B, HK, W, D), each(cat_and_copy), shift_mask, longest=W - 2, steps=RING_STEPS
    ),
    "cat_whole_and_cut": Spelling(
        lambda net: pair(net, B, HK, W, D), each(cat_whole_and_cut), joined_mask, steps=RING_STEPS
    ),
    "kv_leading": Spelling(both(2, B, HK, T, D), kv_leading),
    "kv_middle": Spelling(both(B, 2, HK, T, D), kv_middle),
    "kv_together": Spelling(both(2, B, HK, T, D), kv_together),
    "kv_channels": Spelling(both(B, HK, T, 2 * D), kv_channels),
    "kv_channels_apart": Spelling(both(B, HK, T, 2 * D), kv_channels_apart),
    "kv_heads": Spelling(both(B, 2 * HK, T, D), kv_heads),
    "kv_rows": Spelling(both(2 * B, HK, T, D), kv_rows),
    "all_layers": Spelling(
        lambda net: net.cache("c", net.spelling.layers, 2, B, HK, T, D), all_layers, layers=2
    ),
    "all_layers_inside": Spelling(two_inside, all_layers_inside, layers=2),
    "views_of_one": Spelling(as_views, each(index_copy_)),
    "bthd": Spelling(lambda net: pair(net, B, T, HK, D), bthd),
    "bhdt": Spelling(lambda net: pair(net, B, HK, D, T), bhdt),
    "tbhd": Spelling(lambda net: pair(net, T, B, HK, D), tbhd),
    # torch 2.11's export refuses this reshape for a varying token count, with no pass at work: it merges axes whose
    # strides are symbolic, asks whether min(16n, 32n) == 16n, and cannot tell.
    "flat_heads": Spelling(lambda net: pair(net, B * HK, T, D), flat_heads, longest=0),
    "merged_heads": Spelling(lambda net: pair(net, B, T, HK * D), merged_heads),
    "repeated_heads": Spelling(pair, repeated_heads),
    "filled": Spelling(pair, filled, filled_mask),
    "first_eight": Spelling(pair, first_eight, first_eight_mask, steps=((0, 5), (5, 1), (6, 2))),
    "some_heads": Spelling(lambda net: pair(net, B, 4, T, D), some_heads),
    "some_rows": Spelling(lambda net: pair(net, 3, HK, T, D), some_rows),
    "shared": Spelling(one_pair, shared, layers=2),
    "only_read": Spelling(filled_pair, only_read, no_mask),
    "where_write": Spelling(pair, each(where_write), longest=0, steps=SINGLE),
}

# Of one spelling with one layer, two and four.
TWO = SPELLINGS["index_copy_"]
ONE = replace(TWO, layers=1)
FOUR = replace(TWO, layers=4)

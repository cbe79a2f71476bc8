"""What surrounds decode attention: prefill over a cache, appending a token, cost against the tokens that are filled."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import kvq_ops
from kvq_lab.bench_attention import Inputs, Shape, Stored, copies, sdpa_limit, serving, short, store
from kvq_lab.bench_rows import Row
from kvq_lab.bench_timing import Contender, Expected
from kvq_ops import reference
from kvq_ops.formats import KVFormat

# Rows of a prefill that are held against float64, which would take minutes for all of them.
CHECKED_ROWS = 64
# Appends of one sample: whole groups of tokens in every format that codes by groups, so that their cost counts.
APPENDS = 64


# -- prefill ------------------------------------------------------------------------------------------------------------


def _sample(queries: int) -> Tensor:
    """Queries that are checked: the first, the last, and others at random, ``[n]`` in order."""
    if queries <= CHECKED_ROWS:
        return torch.arange(queries)
    drawn = torch.randperm(queries - 2, generator=torch.Generator().manual_seed(1))[: CHECKED_ROWS - 2] + 1
    return torch.cat([torch.tensor([0]), drawn.sort().values, torch.tensor([queries - 1])])


def _causal(rows: Tensor, queries: int, tokens: int) -> Tensor:
    """Which keys the queries ``rows`` of ``queries`` may see, the last of which stands at the last token: ``[n, T]``."""
    return torch.arange(tokens) <= (tokens - queries + rows).unsqueeze(1)


def _expected(stored: Stored, query: Tensor, rows: Tensor, further: Tensor | float = 0.0) -> Expected:
    mask = _causal(rows, query.shape[2], stored.key[0].shape[2])
    return Expected.of(stored.exact(query[:, :, rows], mask=mask[None, None]), query.dtype, further)


def prefill_sdpa(shape: Shape, inputs: Inputs, dtype: torch.dtype) -> Contender:
    """PyTorch's attention of many queries over a dense cache that holds their own keys too.

    Where the cache is longer than the queries the causal mask is a tensor, made beforehand, as models make it once for all
    layers.
    """
    query, key, value = (x.to(dtype) for x in (inputs.query, inputs.key, inputs.value))
    queries, tokens = query.shape[2], key.shape[2]
    mask = None if queries == tokens else _causal(torch.arange(queries), queries, tokens)[None, None]
    rows = _sample(queries)
    row = shape.row(
        "prefill",
        f"SDPA {short(dtype)}",
        implementation="torch SDPA",
        dtype=short(dtype),
        queries=queries,
        tokens=tokens,
        allocated=tokens,
        checked=f"float64, {len(rows)} of {queries} queries",
    )
    call = functools.partial(
        F.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=shape.query_heads != shape.kv_heads,
    )
    exact = store(kvq_ops.parse_kv_format("none"), inputs, dtype=dtype)
    expected = _expected(exact, query, rows, sdpa_limit(query[:, :, rows], key, value))
    return Contender(row, [call], expected, lambda got: got[:, :, rows])


def prefill_contenders(
    shape: Shape, inputs: Inputs, pair: KVFormat, dtype: torch.dtype, notes: set[str]
) -> list[Contender]:
    """Causal attention of many queries over a cache in ``pair``, by the implementation that users get."""
    query = inputs.query.to(dtype)
    queries, tokens = query.shape[2], inputs.key.shape[2]
    stored, rows = store(pair, inputs, dtype=dtype), _sample(queries)
    expected = _expected(stored, query, rows)
    found = []
    for one in serving("attention", (pair.key, pair.value), shape.head_dim, dtype, notes)[:1]:
        row = shape.row(
            "prefill",
            f"{pair} {one.implementation.name}",
            format=str(pair),
            implementation=one.implementation.name,
            dtype=short(dtype),
            queries=queries,
            tokens=tokens,
            allocated=tokens,
            checked=f"float64, {len(rows)} of {queries} queries",
        )
        call = functools.partial(one.attention, stored, query, causal=True)
        found.append(Contender(row, [call], expected, lambda got: got[:, :, rows]))
    return found


# -- append -------------------------------------------------------------------------------------------------------------


def append_room(rounds: int) -> int:
    """Tokens that a cache needs room for so that every sample of ``rounds`` appends tokens that are new to it.

    To go back and append again would cost less: a format that codes old tokens in groups does not code them twice.
    """
    return APPENDS * (rounds + 3)


class Appending:
    """Appends one token after another to keys and values, each by one call of the operator."""

    def __init__(self, stored: Stored, inputs: Inputs, start: int) -> None:
        self.stored = stored
        tokens = inputs.key.shape[2]
        sides = (inputs.key, inputs.value)
        self.ready = [
            (torch.tensor([at]), *(x[:, :, at : at + 1].clone() for x in sides))
            for at in reversed(range(start, tokens))
        ]

    def __call__(self) -> Stored:
        position, key, value = self.ready.pop()
        kvq_ops.append_(self.stored.key, position, key, self.stored.pair.key.name)
        kvq_ops.append_(self.stored.value, position, value, self.stored.pair.value.name)
        return self.stored


def append_contenders(
    shape: Shape, inputs: Inputs, pair: KVFormat, start: int, dtype: torch.dtype, notes: set[str]
) -> list[Contender]:
    """Append of a token's keys and values, checked by the cache it leaves, and decode attention over the same cache.

    ``inputs`` hold the ``start`` tokens of the cache and those to be appended. Empty where nothing serves the format.
    """
    inputs = Inputs(inputs.query.to(dtype), inputs.key.to(dtype), inputs.value.to(dtype))
    tokens = inputs.key.shape[2]
    by = [serving("append_", (row,), shape.head_dim, dtype, notes)[:1] for row in (pair.key, pair.value)]
    decode_by = serving("attention", (pair.key, pair.value), shape.head_dim, dtype, notes)[:1]
    if not decode_by or not all(by):
        return []
    stored = store(pair, inputs, length=start, dtype=dtype)

    def row(name: str, implementation: str, **further: Any) -> Row:
        return shape.row(
            "append",
            f"{pair} {name}",
            format=str(pair),
            implementation=implementation,
            dtype=short(dtype),
            queries=1,
            tokens=start,
            allocated=tokens,
            **further,
        )

    def appended(result: Stored) -> Tensor:
        fresh = stored.clone()
        step = Appending(fresh, inputs, start)
        for _ in range(APPENDS):
            step()
        # By float64 too, so that nothing but what was stored can differ.
        return fresh.exact(inputs.query).to(dtype)

    append = Contender(
        row(
            "append",
            "/".join(dict.fromkeys(one.implementation.name for (one,) in by)),
            checked=f"float64, attention over what {APPENDS} appends leave",
        ),
        [Appending(stored.clone(), inputs, start)],
        Expected.of(_appended(stored, inputs, start).exact(inputs.query), dtype),
        appended,
        repeat=APPENDS,
    )
    used = stored.nbytes * start // tokens
    clones = [stored, *(stored.clone() for _ in range(copies(used) - 1))]
    decode = Contender(
        row("decode", decode_by[0].implementation.name, checked="float64", bytes=used),
        [functools.partial(decode_by[0].attention, clone, inputs.query) for clone in clones],
        Expected.of(stored.exact(inputs.query), dtype),
    )
    return [append, decode]


def _appended(stored: Stored, inputs: Inputs, start: int) -> Stored:
    """A copy to which the first ``APPENDS`` tokens behind ``start`` were appended one by one, in plain torch."""
    result = stored.clone()
    for at in range(start, start + APPENDS):
        position = torch.tensor([at])
        reference.append_(result.key, position, inputs.key[:, :, at : at + 1], result.pair.key)
        reference.append_(result.value, position, inputs.value[:, :, at : at + 1], result.pair.value)
    return result


# -- linearity ----------------------------------------------------------------------------------------------------------


def linearity_contenders(
    shape: Shape, inputs: Inputs, pair: KVFormat, fills: Sequence[int], dtype: torch.dtype, notes: set[str]
) -> list[Contender]:
    """Decode over caches of one size that are filled to different lengths, told by the length or by a mask."""
    query, tokens = inputs.query.to(dtype), inputs.key.shape[2]
    found = []
    for one in serving("attention", (pair.key, pair.value), shape.head_dim, dtype, notes)[:1]:
        for filled in fills:
            stored = store(pair, inputs, length=filled, dtype=dtype)
            used = stored.nbytes * filled // tokens
            clones = [stored, *(stored.clone() for _ in range(copies(used) - 1))]
            forms: dict[str, dict[str, Any]] = {
                "length": {"use_length": True},
                "mask": {"use_length": False, "mask": (torch.arange(tokens) < filled)[None, None, None]},
            }
            for form, options in forms.items():
                row = shape.row(
                    "linearity",
                    linearity_name(pair, form, filled),
                    format=str(pair),
                    implementation=one.implementation.name,
                    dtype=short(dtype),
                    queries=1,
                    tokens=filled,
                    allocated=tokens,
                    checked="float64",
                    bytes=used,
                )
                calls = [functools.partial(one.attention, clone, query, **options) for clone in clones]
                found.append(Contender(row, calls, Expected.of(stored.exact(query, **options), dtype)))
    return sorted(found, key=lambda contender: " by mask" in contender.row.name)


def linearity_name(pair: KVFormat, form: str, filled: int) -> str:
    return f"{pair} by {form}, {filled} filled"

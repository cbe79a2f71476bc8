"""Paged caches: the same codes as a contiguous cache, and attention over them, for every format that codes tokens alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import errors, registry
from kvq_ops.calibration import fit
from kvq_ops.formats import Format, get_format, names
from tests.ops import checks
from tests.ops.checks import assert_tight, exact_attention

PAGED = tuple(n for n in names() if not get_format(n).windowed)
H, D, SIZE, LENGTHS = 2, 32, 4, (11, 3, 0)
PAGES = 9
TABLE = torch.tensor([[7, 2, 5], [0, -1, -1], [-1, -1, -1]])
IMPLEMENTATIONS = [
    name
    for name in checks.implementations("paged_attention")
    if name in checks.implementations("paged_append_")
]


def pool(fmt: Format, sample: Tensor) -> list[Tensor]:
    """Empty pages; static planes are set, so that a pool and a contiguous store have the same."""
    store = fmt.empty_store(PAGES, H, SIZE, D, dtype=sample.dtype)
    for name, plane in fit(sample, fmt).items():
        store[fmt.index(name)].copy_(plane)
    return store


def filled(fmt: Format, x: Tensor, splits: tuple[int, ...] = (11,)) -> tuple[list[Tensor], list[Tensor]]:
    """Pages, and one contiguous store for each sequence, holding the first tokens of ``x [B, H, 11, D]``."""
    pages = pool(fmt, x)
    stores = []
    for b, length in enumerate(LENGTHS):
        store = fmt.empty_store(1, H, SIZE * 3, D, dtype=x.dtype)
        for i in fmt.static_planes:
            store[i].copy_(pages[i])
        kvq_ops.append_(store, torch.arange(length), x[b : b + 1, :, :length], fmt.name)
        stores.append(store)
    start = 0
    for count in splits:
        position = torch.arange(start, start + count).expand(3, -1).clone()
        position[position >= torch.tensor(LENGTHS).unsqueeze(1)] = -1
        kvq_ops.paged_append_(pages, TABLE, position, x[:, :, start : start + count], fmt.name)
        start += count
    return pages, stores


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", PAGED)
def test_pages_hold_the_codes_of_a_contiguous_cache(name: str, implementation: str) -> None:
    fmt = get_format(name)
    x = torch.randn(3, H, 11, D)
    x[1, :, 3:] = 1e3  # padding, which must enter nothing
    x[2] = 1e3
    for splits in ((11,), (1,) * 11, (7, 4)):
        with registry.use_implementation(implementation):
            pages, stores = filled(fmt, x, splits)
        for b, length in enumerate(LENGTHS):
            for plane, page_plane, plain in zip(fmt.planes[:-1], pages, stores[b], strict=False):
                if not plane.per_token:
                    assert torch.equal(page_plane, plain)
                    continue
                for t in range(length):
                    got = page_plane[TABLE[b, t // SIZE], :, t % SIZE]
                    assert torch.equal(got, plain[0, :, t]), f"{plane.name} of token {t} of sequence {b}"
        untouched = [p for p in range(PAGES) if p not in (7, 2, 5, 0)]
        assert not pages[0][untouched].any() and not pages[-1][untouched].any()
        assert pages[-1][[7, 2, 5, 0]].tolist() == [4, 4, 3, 3]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", PAGED)
def test_attention_over_pages(name: str, implementation: str) -> None:
    """Tight against float64 attention over what each sequence holds, and the faults that this would show."""
    fmt = get_format(name)
    x, y, q = torch.randn(3, H, 11, D), torch.randn(3, H, 11, D), torch.randn(3, 4, 3, D)
    (keys, key_stores), (values, value_stores) = filled(fmt, x), filled(fmt, y)
    length = torch.tensor(LENGTHS, dtype=torch.int32)
    options: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"causal": True, "window": 5, "sinks": torch.randn(4)},
        {"mask": torch.rand(3, 1, 3, 12) > 0.3, "softcap": 3.0, "scale": 0.4},
    ]
    dense = [
        [checks.array(kvq_ops.dequantize(store, name)) for store in stores]
        for stores in (key_stores, value_stores)
    ]
    for option in options:
        with registry.use_implementation(implementation):
            out = kvq_ops.paged_attention(q, keys, values, TABLE, length, name, name, **option)
        for b, n in enumerate(LENGTHS):
            own = dict(option)
            if "mask" in own:
                own["mask"] = own["mask"][b : b + 1]
            want = exact_attention(q[b : b + 1], dense[0][b], dense[1][b], lengths=[n], **own)
            assert_tight(out[b : b + 1], want)
    with registry.use_implementation(implementation):
        good = kvq_ops.paged_attention(q, keys, values, TABLE, length, name, name)
        swapped = kvq_ops.paged_attention(
            q, keys, values, TABLE[:, [1, 0, 2]].clamp_min(0), length, name, name
        )
        short = kvq_ops.paged_attention(q, keys, values, TABLE, (length - 1).clamp_min(0), name, name)
    assert not torch.allclose(short[:2], good[:2], atol=1e-4)
    assert torch.allclose(swapped[0], good[0], atol=1e-4), (
        "without a mask the order of whole pages does not matter"
    )
    causal = kvq_ops.paged_attention(q, keys, values, TABLE[:, [2, 1, 0]].clamp_min(0), length, name, name)
    assert not torch.allclose(causal[0], good[0], atol=1e-4), "the last page is not full"


@pytest.mark.parametrize("name", ["int8_per_token_head", "nvfp4", "turbo3"])
def test_opcheck_compile_and_export(name: str) -> None:
    fmt = get_format(name)
    x, q = torch.randn(3, H, 11, D), torch.randn(3, 4, 1, D)
    pages, _ = filled(fmt, x)
    length = torch.tensor(LENGTHS)
    torch.library.opcheck(
        torch.ops.kvq.paged_append_.default,
        (pages, TABLE, torch.tensor([[11], [3], [-1]]), x[:, :, :1], name),
    )
    torch.library.opcheck(
        torch.ops.kvq.paged_attention.default,
        (q, pages, pages, TABLE, length, name, name),
        {"causal": True, "mask": torch.ones(3, 1, 1, 12, dtype=torch.bool)},
    )

    class Step(torch.nn.Module):
        def forward(
            self, q: Tensor, x: Tensor, pages: list[Tensor], position: Tensor, length: Tensor
        ) -> Tensor:
            torch.ops.kvq.paged_append_(pages, TABLE, position, x, name)
            return torch.ops.kvq.paged_attention(q, pages, pages, TABLE, length, name, name)

    position, after = torch.tensor([[11], [3], [-1]]), length + torch.tensor([1, 1, 0])
    results = []
    for call in (
        Step(),
        torch.compile(Step(), fullgraph=True),
        torch.export.export(Step(), (q, x[:, :, :1], checks.copy(pages), position, after)).module(),
    ):
        own = checks.copy(pages)
        if name == "int8_per_token_head":
            position, after = torch.tensor([[11], [2], [-1]]), torch.tensor([12, 3, 0])
        else:
            position, after = torch.tensor([[10], [2], [-1]]), torch.tensor([11, 3, 0])
        results.append((call(q, x[:, :, :1], own, position, after), own))
    for out, own in results[1:]:
        assert torch.equal(out, results[0][0])
        assert all(torch.equal(a, b) for a, b in zip(own, results[0][1], strict=True))


def test_bad_input_says_what_and_writes_nothing() -> None:
    name = "int8_per_token_head"
    fmt = get_format(name)
    x = torch.randn(3, H, 2, D)
    pages = pool(fmt, x)
    before = checks.copy(pages)
    position = torch.arange(2).expand(3, -1)
    good = {"block_table": TABLE.clamp_min(0), "position": position, "x": x}
    for change, message in (
        ({"position": position + 11}, "0..11"),
        ({"block_table": TABLE}, "no page"),
        ({"block_table": TABLE + 3}, "page 10"),
        ({"block_table": TABLE[:2]}, r"\[3, N\]"),
        ({"block_table": TABLE.float()}, "int32"),
        ({"position": position[:, :1]}, r"\(3, 2\)"),
        ({"position": position.float()}, "int64"),
        ({"x": x[:, :1]}, r"\[B, 2, T, 32\]"),
        ({"x": x.double()}, "float32"),
    ):
        with pytest.raises(errors.KVQError, match=message):
            kvq_ops.paged_append_(pages, **(good | change), format=name)
    with pytest.raises(errors.FormatError, match="contiguous"):
        kvq_ops.paged_append_(pages, **good, format="kivi4_keys")
    # A table in a parameter is no less looked at: kernels trust it.
    table = torch.nn.Parameter(TABLE.clamp_min(0) + 7, requires_grad=False)
    with pytest.raises(errors.CapacityError, match="page 14"):
        kvq_ops.paged_append_(pages, table, position, x, name)
    assert all(torch.equal(a, b) for a, b in zip(pages, before, strict=True))
    q = torch.randn(3, 4, 1, D)
    for table, length, message in (
        (TABLE, torch.tensor([12, 5, 0]), "every token"),
        (TABLE, torch.tensor([13, 3, 0]), "0..12"),
        (TABLE, torch.tensor([1, 1]), r"\[3\]"),
        (TABLE + 3, torch.tensor([1, 1, 1]), "page 10"),
    ):
        with pytest.raises(errors.KVQError, match=message):
            kvq_ops.paged_attention(q, pages, pages, table, length, name, name)

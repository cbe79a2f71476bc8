"""One attention, planned as the launcher plans it and run in the PTX simulator, with every byte it may read marked."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cutlass_kernels import checks
from cutlass_kernels.attention import ATTENTION, Plan, plan
from cutlass_kernels.attention_kernel import THREADS, shared_bytes
from kvq_ops.formats import Format, get_format
from tests.cutlass.attention_bound import check
from tests.cutlass.contract import check_arguments
from tests.cutlass.ptxsim import GlobalMemory, entry_of, run
from tests.ops.attention_cases import Case
from tests.ptx.parser import Entry

KERNELS = ("stretch_kernel", "merge_kernel")


@functools.lru_cache(maxsize=256)
def ptx_of(target: str, shape: tuple[tuple[str, Any], ...]) -> str:
    compiled = ATTENTION.compiled(target, **dict(shape))
    for name, used in checks.resources(compiled).items():
        assert not used.stack, f"{name} for {target}, {dict(shape)}: {used.stack} bytes of stack"
    return compiled.ptx


@functools.lru_cache(maxsize=256)
def _entries(text: str) -> tuple[Entry, Entry]:
    return entry_of(text, KERNELS[0]), entry_of(text, KERNELS[1])


def kernel_arguments(given: dict[str, Any], places: Addresses) -> tuple[list[Any], list[Any]]:
    """The parameters of the two kernels, as ``attend.attend`` passes them on."""
    query = given["query"]
    heads = query.shape[1] // given["group"]
    rows = given["group"] * given["queries"]
    partial, stats, out = (
        places.of(given[name], writable="once", unwritten=True) for name in ("partial", "stats", "out")
    )

    def view(tensor: Tensor) -> list[int]:
        return [places.of(tensor), *tensor.stride()[:3]]

    first: list[Any] = view(query)
    for side in ("key", "value"):
        first += view(given[f"{side}_codes"])
        if (scales := given[f"{side}_scales"]) is not None:
            first += view(scales)
        if (static := given[f"{side}_static"]) is not None:
            first += [places.of(static)]
    for name in ("mask", "table"):
        if (tensor := given[name]) is not None:
            first += [places.of(tensor), *tensor.stride()]
    if given["length"] is not None:
        first += [places.of(given["length"])]
    first += [partial, stats, given["tokens"], given["queries"], given["group"], rows, given["splits"]]
    first += [given["window"], float(given["scale"]), float(given["cap"])]
    second: list[Any] = [partial, stats]
    second += [places.of(t) for t in (given["value_static"], given["sinks"]) if t is not None]
    second += [out, heads, given["queries"], given["group"], rows, given["splits"]]
    return first, second


@dataclass
class Ran:
    """What the first of two launches did, and the largest part of the allowed error that the output has used."""

    opcodes: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0
    used: float = 0.0


class Addresses:
    """The tensors of a plan in the machine's memory."""

    def __init__(self, readable: dict[int, Tensor]) -> None:
        self.memory = GlobalMemory()
        self._readable = readable
        self._known: dict[int, int] = {}

    def of(self, tensor: Tensor, *, writable: str | bool = False, unwritten: bool = False) -> int:
        """Where the first element is. The whole storage is there, as far as ``readable`` lets it be read."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            mask: np.ndarray | bool = not unwritten
            if (allowed := self._readable.get(storage.data_ptr())) is not None:
                mask = allowed.numpy()
            self._known[storage.data_ptr()] = self.memory.add(flat.numpy(), readable=mask, writable=writable)
        return self._known[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()


def allow(plane: Tensor, chosen: Callable[[Tensor], None]) -> tuple[int, Tensor]:
    """Which bytes of a plane's storage may be read: those of the elements that ``chosen`` sets in a mask."""
    storage = plane.untyped_storage()
    allowed = torch.zeros(storage.nbytes(), dtype=torch.bool)
    size = plane.element_size()
    elements = torch.zeros(storage.nbytes() // size, dtype=torch.bool)
    view = elements.as_strided(plane.shape, plane.stride(), plane.storage_offset())
    chosen(view)
    allowed.view(-1, size)[elements] = True
    return storage.data_ptr(), allowed


def simulate(
    planned: Plan,
    target: str,
    *,
    schedule: int | None = None,
    readable: dict[int, Tensor] | None = None,
    change: Callable[[str], str] | None = None,
) -> Ran:
    """Run both kernels; the output is in ``planned.out`` afterwards.

    Args:
        readable: for storages, by address, which bytes may be read.
        change: a fault to plant into the PTX.
    """
    text = ptx_of(target, tuple(sorted(planned.shape.items())))
    stand_ins = ATTENTION.make(target, **planned.shape)[1][:-2]  # without the shape class and the stream
    check_arguments(stand_ins, list(planned.arguments.values()), f"attention {planned.shape}")
    if change is not None:
        changed = change(text)
        assert changed != text, "the fault has no place in this kernel"
        text = changed
    first, second = _entries(text)
    places = Addresses(readable or {})
    arguments, merging = kernel_arguments(planned.arguments, places)
    shared = shared_bytes(planned.shape["head_dim"])
    done = run(
        first, planned.grid, (THREADS, 1, 1), arguments, places.memory, shared=shared, schedule=schedule
    )
    rows = planned.arguments["stats"].numel() // (2 * planned.arguments["splits"])
    value_dim = planned.shape["value_dim"]
    run(second, (rows, 1, 1), (value_dim, 1, 1), merging, places.memory, schedule=schedule)
    return Ran(done.opcodes, done.bytes_read, done.bytes_written)


# ------------------------------------------------------------------------------------------------------------ cases


def _tokens(store: list[Tensor], fmt: Format, chosen: Callable[[Tensor], None]) -> dict[int, Tensor]:
    """Readable bytes of the planes of a store with a token axis."""
    return dict(allow(plane, chosen) for p, plane in zip(fmt.planes, store, strict=True) if p.per_token)


def contiguous(case: Case, **changes: Any) -> tuple[Plan, dict[int, Tensor]]:
    """The plan of a case over a contiguous cache; only tokens below the length of their sequence are readable."""
    options = dict(case.options)
    length = case.key_store[-1] if options.pop("use_length", True) else None
    formats = get_format(case.key_format), get_format(case.value_format)
    planned = plan(
        case.query, case.key_store, case.value_store, *formats, length=length, **options, **changes
    )

    def chosen(view: Tensor) -> None:
        for row, end in enumerate(case.key_store[-1].tolist() if length is not None else []):
            view[row, :, :end] = True
        if length is None:
            view.fill_(True)

    readable = {}
    for store, fmt in zip((case.key_store, case.value_store), formats, strict=True):
        readable |= _tokens(store, fmt, chosen)
    return planned, readable


def paged(
    case: Case,
    page: int,
    *,
    table_type: torch.dtype = torch.int32,
    length_type: torch.dtype = torch.int64,
    **changes: Any,
) -> tuple[Plan, dict[int, Tensor]]:
    """The same tokens in pages in no order, with unused pages among them and -1 where there is no page."""
    formats = get_format(case.key_format), get_format(case.value_format)
    batch, heads, tokens, _ = formats[0].logical_shape(case.key_store)
    blocks = -(-tokens // page)
    assert blocks * page == tokens, "masks of a paged cache are as long as its table"
    lengths = case.key_store[-1].tolist()
    used = [(b, i) for b, end in enumerate(lengths) for i in range(-(-end // page))]
    count = len(used) + 2
    order = torch.randperm(count, generator=torch.Generator().manual_seed(page)).tolist()
    table = torch.full((batch, blocks), -1, dtype=table_type)
    readable: dict[int, Tensor] = {}
    pools = []
    for store, fmt in zip((case.key_store, case.value_store), formats, strict=True):
        pool = fmt.empty_store(count, heads, page, fmt.logical_shape(store)[3])
        for plane, held, whole in zip(fmt.planes, pool, store, strict=True):
            if not plane.per_token:
                if plane.static:
                    held.copy_(whole)
                continue
            for (b, i), to in zip(used, order, strict=False):
                table[b, i] = to
                held[to] = whole[b, :, i * page : (i + 1) * page]

            def chosen(view: Tensor) -> None:
                for (b, i), to in zip(used, order, strict=False):
                    view[to, :, : lengths[b] - i * page] = True

            readable |= dict([allow(held, chosen)])
        pools.append(pool)
    length = case.key_store[-1].to(length_type)
    planned = plan(case.query, *pools, *formats, table=table, length=length, **case.options, **changes)
    return planned, readable


def run_case(
    case: Case,
    target: str = "sm_100a",
    *,
    page: int = 0,
    schedule: int | None = None,
    change: Callable[[str], str] | None = None,
    **changes: Any,
) -> Ran:
    """Plan, run and check one case against the oracle; raises where anything is wrong."""
    planned, readable = paged(case, page, **changes) if page else contiguous(case, **changes)
    ran = simulate(planned, target, schedule=schedule, readable=readable, change=change)
    ran.used = check(case, planned.out, case.options)
    return ran

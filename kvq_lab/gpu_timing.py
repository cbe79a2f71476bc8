"""How fast attention over stored bytes is on a GPU, beside what there is otherwise. A kernel that is wrong gets no speed."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kvq_ops
from kvq_lab import gpu_oracle as oracle
from kvq_lab.gpu_cases import HEADLINE, KERNELS, held, unequal
from kvq_lab.gpu_peers import PEERS
from kvq_lab.gpu_rows import Case, Row, attempt
from kvq_ops import reference
from kvq_ops.formats import Format, get_format, parse_kv_format
from kvq_ops.handle import storage_bytes

QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128
BATCHES = (8, 1, 32)
CONTEXTS = (32768, 2048, 8192, 131072)
PREFILLS = ((1, 8192), (4, 2048))
BASE = "SDPA bf16"
DENSE = "dequantize+SDPA"
ROOM = 0.8
"""Of what memory is free, as much as one shape may take."""
CYCLES = 2e9
"""A GPU's clock makes about so many in a second."""


def flush_buffer() -> Tensor:
    """More than any GPU's L2 cache holds."""
    return torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Of a call: what it takes on the GPU (median), and what the CPU takes to start it (the least)."""

    seconds: float
    host: float


def timing(call: Callable[[], Any], flush: Tensor, *, rounds: int = 30, most: float = 0.25) -> Timing:
    """Time single calls by CUDA events, with L2 overwritten before each; fewer rounds where they take long.

    The GPU is kept busy until the CPU has started all of a call, or the pace of the CPU would be measured for short ones.
    """
    hosts = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        hosts.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    host = min(hosts)
    hold = int((2 * host + 1e-4) * CYCLES)
    taken: list[float] = []
    while len(taken) < rounds and (len(taken) < 5 or sum(taken) < most):
        flush.zero_()
        torch.cuda._sleep(hold)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return Timing(statistics.median(taken), host)


def copy_bandwidth(flush: Tensor) -> float:
    """Bytes read and written in a second by a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / timing(lambda: target.copy_(source), flush).seconds


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is timed."""

    batch: int
    tokens: int
    queries: int = 1

    @property
    def dense_bytes(self) -> int:
        return 2 * self.batch * KV_HEADS * self.tokens * DIM * 2

    def __str__(self) -> str:
        queries = f" N={self.queries}" if self.queries > 1 else ""
        size = f"{self.tokens // 1024}k" if self.tokens % 1024 == 0 else str(self.tokens)
        return f"B={self.batch} T={size}{queries}"


class Bench:
    """Shapes, formats and peers on this GPU.

    Args:
        flush: memory to overwrite between calls.
        bandwidth: bytes that a copy moves in a second.
    """

    def __init__(self, flush: Tensor, bandwidth: float) -> None:
        self.flush, self.bandwidth = flush, bandwidth

    @staticmethod
    def measured() -> Bench:
        flush = flush_buffer()
        return Bench(flush, copy_bandwidth(flush))

    # -- inputs -----------------------------------------------------------------------------------------------------

    def dense(self, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        made = torch.Generator("cuda").manual_seed(shape.tokens + shape.batch)
        kv = (shape.batch, KV_HEADS, shape.tokens, DIM)
        query = torch.randn(shape.batch, QUERY_HEADS, shape.queries, DIM, device="cuda", generator=made)
        parts = [torch.randn(kv, device="cuda", generator=made, dtype=torch.bfloat16) for _ in range(2)]
        return query.bfloat16(), parts[0], parts[1]

    def row(self, shape: Shape, name: str, section: str = "") -> Row:
        return Row(
            section or ("decode" if shape.queries == 1 else "prefill"),
            f"{name} {shape}",
            format=name,
            batch=shape.batch,
            tokens=shape.tokens,
            queries=shape.queries,
        )

    def timed(self, row: Row, call: Callable[[], Any], nbytes: int) -> Row:
        found = timing(call, self.flush)
        row.seconds, row.host, row.bytes, row.verdict = found.seconds, found.host, nbytes, "timed"
        if row.section == "decode":
            row.fraction = nbytes / row.seconds / self.bandwidth
        return row

    # -- contenders -------------------------------------------------------------------------------------------------

    def shape_rows(self, shape: Shape, formats: Sequence[str]) -> Iterator[Row]:
        """SDPA, each format, each format decoded first, and peers, at one shape."""
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        # At most four times: the inputs, pages in another order, and what they are copied through.
        if shape.dense_bytes * 4 > free * ROOM:
            size = f"{shape.dense_bytes / 2**30:.0f} GiB of bf16 keys and values, {free / 2**30:.0f} free"
            yield self.row(shape, "all").refuse("not run", size)
            return
        query, key, value = self.dense(shape)
        causal = shape.queries > 1
        plain = self.plain(shape, query, key, value)

        def whole(row: Row) -> Row:
            call = functools.partial(sdpa, query, key, value, causal)
            for at, expected in plain.items():
                if not held(row, expected, part(call(), *at)).ok:
                    return row
            return self.timed(row, call, shape.dense_bytes)

        base = attempt(self.row(shape, BASE), whole)
        rows = [base]
        yield compared(base, base)
        for name in formats:
            for row in self.format_rows(shape, name, query, key, value):
                rows.append(row)
                yield compared(row, base)
        for name, make in PEERS if not causal else ():
            yield compared(self.peer(shape, name, make, plain, query, key, value), base)

    def plain(
        self, shape: Shape, query: Tensor, key: Tensor, value: Tensor
    ) -> dict[tuple[int, int], oracle.Expected]:
        """What attention over the inputs themselves gives in bf16, at the heads that are looked at."""
        none, length = get_format("none"), torch.full((shape.batch,), shape.tokens, device="cuda")
        stores = [[key, length], [value, length]]
        return {
            at: expected_part(none, none, query, stores, *at, shape.queries > 1)
            for at in corners(shape.batch)
        }

    def format_rows(
        self, shape: Shape, name: str, query: Tensor, key: Tensor, value: Tensor
    ) -> Iterator[Row]:
        pair = parse_kv_format(name)
        names, causal = (pair.key.name, pair.value.name), shape.queries > 1
        stores: list[list[Tensor]] = []

        def ours(row: Row) -> Row:
            stores.extend(kvq_ops.quantize(x, side) for x, side in zip((key, value), names, strict=True))
            call = functools.partial(
                kvq_ops.attention, query, stores[0], stores[1], names[0], names[1], causal=causal
            )
            for at in corners(shape.batch):
                expected = expected_part(pair.key, pair.value, query, stores, *at, causal)
                if not held(row, expected, part(call(), *at)).ok:
                    return row
            return self.timed(row, call, storage_bytes([*stores[0], *stores[1]]))

        def decoded(row: Row) -> Row:
            def call() -> Tensor:
                parts = [
                    kvq_ops.dequantize(store, side, query.dtype)
                    for store, side in zip(stores, names, strict=True)
                ]
                return sdpa(query, parts[0], parts[1], causal)

            self.timed(row, call, shape.dense_bytes)
            row.fraction = None
            return row

        with torch.no_grad(), kvq_ops.use_implementation(KERNELS):
            row = attempt(self.row(shape, name), ours)
            if not row.ok:
                yield row
                return
            dense = attempt(self.row(shape, f"{name} {DENSE}"), decoded)
        if dense.seconds is not None and row.seconds is not None:
            row.against[DENSE] = dense.seconds / row.seconds
        yield row
        yield dense

    def peer(
        self,
        shape: Shape,
        name: str,
        make: Callable[..., Any],
        plain: dict[tuple[int, int], oracle.Expected],
        *dense: Tensor,
    ) -> Row:
        """Somebody else's kernel over the same numbers in bf16, held to the same limits."""

        def check(row: Row) -> Row:
            try:
                call = make(*dense)
            except ImportError as error:
                return row.refuse("not run", f"not installed: {error}")
            for at, expected in plain.items():
                if not held(row, expected, part(call().view(dense[0].shape), *at)).ok:
                    return row
            return self.timed(row, call, shape.dense_bytes)

        row = attempt(self.row(shape, name), check)
        # Other people's versions and kernels fail in ways of their own, which is no fault of what is checked here.
        return row if row.ok else row.refuse("not run", row.why)

    def append_rows(self, name: str) -> Iterator[Row]:
        """One token into each of 32 rows."""
        fmt: Format = parse_kv_format(name).key
        shape = Shape(32, 2048)

        def check(row: Row) -> Row:
            x = torch.randn(32, KV_HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
            store = fmt.empty_store(32, KV_HEADS, 2048, DIM, dtype=x.dtype, device="cuda")
            position = torch.zeros(1, dtype=torch.int64, device="cuda")
            want = [plane.cpu().clone() for plane in store]
            with kvq_ops.use_implementation("torch"):
                kvq_ops.append_(want, position.cpu(), x.cpu(), fmt.name)
            with kvq_ops.use_implementation(KERNELS):
                call = functools.partial(kvq_ops.append_, store, position, x, fmt.name)
                call()
                if wrong := unequal(fmt, store, want, "append_"):
                    return row.refuse("wrong", wrong)
                return self.timed(row, call, x.numel() * 2)

        with torch.no_grad():
            yield attempt(self.row(shape, name, "append"), check)


def compared(row: Row, base: Row) -> Row:
    """``row`` with what ``base`` takes over what it takes."""
    if row.seconds is not None and base.seconds is not None:
        row.against[BASE] = base.seconds / row.seconds
    return row


def corners(batch: int) -> list[tuple[int, int]]:
    """Rows and kv heads that are held against the oracle: the first and the last."""
    return list(dict.fromkeys(((0, 0), (batch - 1, KV_HEADS - 1))))


def sdpa(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """PyTorch's flash attention; grouped heads as it takes them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if causal and query.shape[2] != key.shape[2]:
        raise ValueError("flash attention aligns a causal mask to the first key")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)


def part(out: Tensor, batch: int, head: int) -> Tensor:
    group = QUERY_HEADS // KV_HEADS
    return out[batch : batch + 1, head * group : (head + 1) * group, -4:]


def expected_part(
    key: Format,
    value: Format,
    query: Tensor,
    stores: Sequence[Sequence[Tensor]],
    batch: int,
    head: int,
    causal: bool,
) -> oracle.Expected:
    """The oracle for the last queries of one kv head, on the GPU; all of it would not fit into memory."""
    exact = []
    for fmt, store in zip((key, value), stores, strict=True):
        cut = []
        for plane, tensor in zip(fmt.planes, store, strict=True):
            for at, axis in enumerate(plane.axes):
                index = {"B": batch, "H": head}.get(axis)
                tensor = tensor if index is None else tensor.narrow(at, index, 1)
            cut.append(tensor)
        exact.append(reference.decode_store(cut, fmt).float())
    some = part(query, batch, head)
    length = torch.full((1,), exact[0].shape[2], device=query.device)
    options = oracle.Options(causal=causal)
    # A prefill decodes the store into the dtype of the query first.
    rounded = key.lossless or query.shape[2] > 1
    return oracle.attention(
        some,
        exact[0],
        exact[1],
        length,
        options,
        u=oracle.unit(query.dtype, bfloat16_stored=rounded),
        dtype=query.dtype,
    )


# ----------------------------------------------------------------------------------------------------------------- list


def compile_all(name: str) -> Iterator[Row]:
    """Compile what is timed later into Triton's cache on disk, at shapes that are small enough to share the GPU."""

    def check(row: Row) -> Row:
        pair = parse_kv_format(name)
        flush = torch.empty(1, dtype=torch.uint8, device="cuda")
        bench = Bench(flush, 1.0)
        for shape in sorted(shapes(), key=lambda shape: shape.dense_bytes):
            if shape.dense_bytes > 2**31:
                continue
            query, key, value = bench.dense(shape)
            stores = [kvq_ops.quantize(x, side.name) for x, side in ((key, pair.key), (value, pair.value))]
            names = pair.key.name, pair.value.name
            kvq_ops.attention(query, stores[0], stores[1], *names, causal=shape.queries > 1)
            for store, side in zip(stores, (pair.key, pair.value), strict=True):
                kvq_ops.dequantize(store, side.name, query.dtype)
        torch.cuda.synchronize()
        return row

    with torch.no_grad(), kvq_ops.use_implementation(KERNELS):
        yield attempt(Row("compile", name, format=name), check)


def shapes() -> list[Shape]:
    """Everything that is timed, what the project is judged by first."""
    decode = [Shape(batch, tokens) for tokens in CONTEXTS for batch in BATCHES]
    return [*decode, *(Shape(batch, tokens, tokens) for batch, tokens in PREFILLS)]


def _shape_rows(bench: Callable[[], Bench], shape: Shape, formats: Sequence[str]) -> Iterator[Row]:
    yield from bench().shape_rows(shape, formats)


def _append_rows(bench: Callable[[], Bench], name: str) -> Iterator[Row]:
    yield from bench().append_rows(name)


def cases() -> list[Case]:
    """Decode at every batch and context, prefill, and appending; the shapes that the project is judged by come first."""
    bench = functools.cache(Bench.measured)
    made = []
    for at, shape in enumerate(shapes()):
        section, formats = ("decode", HEADLINE) if shape.queries == 1 else ("prefill", HEADLINE[:3])
        # Prefill after the four shapes that are worth most.
        worth = 90.0 - at if shape.queries == 1 else 86.6 - 0.1 * at
        run = functools.partial(_shape_rows, bench, shape, formats)
        expected = 1 + 0.8 * len(formats) + shape.dense_bytes / 2**31
        made.append(Case(section, str(shape), run, expected, worth, alone=True))
    made += [
        Case("append", name, functools.partial(_append_rows, bench, name), 1.0, 86.0 - at / 10, alone=True)
        for at, name in enumerate(HEADLINE)
    ]
    return made + [
        Case("compile", name, functools.partial(compile_all, name), 20, 102 - at / 10)
        for at, name in enumerate(HEADLINE)
    ]

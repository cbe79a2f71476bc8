"""How fast attention over stored bytes is on a GPU, beside what there is otherwise. A kernel that is wrong gets no speed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kvq_ops
from kvq_lab import gpu_oracle as oracle
from kvq_lab.gpu_cases import HEADLINE, KERNELS, held
from kvq_lab.gpu_rows import Case, Row
from kvq_ops import reference
from kvq_ops.formats import Format, parse_kv_format
from kvq_ops.handle import storage_bytes

QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128
BATCHES = (8, 1, 32)
CONTEXTS = (32768, 2048, 8192, 131072)
BASE = "SDPA bf16"
DENSE = "dequantize+SDPA"
# Memory that one shape may fill, of what is free.
ROOM = 0.4


def flush_buffer() -> Tensor:
    """More than any GPU's L2 cache holds."""
    return torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")


def median_seconds(call: Callable[[], Any], flush: Tensor, *, rounds: int = 30, most: float = 0.4) -> float:
    """Median of single calls by CUDA events, with L2 overwritten before each; fewer rounds where they take long."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    taken: list[float] = []
    while len(taken) < rounds and (len(taken) < 5 or sum(taken) < most):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def copy_bandwidth(flush: Tensor) -> float:
    """Bytes read and written in a second by a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), flush)


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
        return f"B={self.batch} T={self.tokens // 1024}k{queries}"


class Bench:
    """Shapes, formats and peers on this GPU."""

    def __init__(self) -> None:
        self.flush = flush_buffer()
        self.bandwidth = copy_bandwidth(self.flush)

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
        row.seconds, row.bytes, row.verdict = median_seconds(call, self.flush), nbytes, "timed"
        if row.section == "decode":
            row.fraction = nbytes / row.seconds / self.bandwidth
        return row

    # -- contenders -------------------------------------------------------------------------------------------------

    def shape_rows(self, shape: Shape, formats: Sequence[str]) -> list[Row]:
        """SDPA, each format, each format decoded first, and peers, at one shape."""
        free = torch.cuda.mem_get_info()[0]
        if shape.dense_bytes * 2.5 > free * ROOM * 2:
            return [
                self.row(shape, "all").refuse(
                    "not run", f"{shape.dense_bytes / 2**30:.0f} GiB of bf16 keys and values"
                )
            ]
        query, key, value = self.dense(shape)
        causal = shape.queries > 1
        base = self.timed(
            self.row(shape, BASE), functools.partial(sdpa, query, key, value, causal), shape.dense_bytes
        )
        rows = [base]
        if not causal:
            rows += [self.peer(shape, name, make, query, key, value) for name, make in PEERS]
        for name in formats:
            rows += self.format_rows(shape, name, query, key, value, base)
        assert base.seconds is not None
        for row in rows:
            if row.seconds is not None:
                row.against[BASE] = base.seconds / row.seconds
        return rows

    def format_rows(
        self, shape: Shape, name: str, query: Tensor, key: Tensor, value: Tensor, base: Row
    ) -> list[Row]:
        pair = parse_kv_format(name)
        row = self.row(shape, name)
        names, causal = (pair.key.name, pair.value.name), shape.queries > 1
        with torch.no_grad(), kvq_ops.use_implementation(KERNELS):
            stores = [kvq_ops.quantize(x, side) for x, side in zip((key, value), names, strict=True)]
            call = functools.partial(
                kvq_ops.attention, query, stores[0], stores[1], names[0], names[1], causal=causal
            )
            for batch, head in {(0, 0), (shape.batch - 1, KV_HEADS - 1)}:
                expected = expected_part(pair.key, pair.value, query, stores, batch, head, causal)
                if not held(row, expected, part(call(), batch, head)).ok:
                    return [row]
            self.timed(row, call, storage_bytes([*stores[0], *stores[1]]))
            dense = self.row(shape, f"{name} {DENSE}")

            def decoded() -> Tensor:
                parts = [
                    kvq_ops.dequantize(store, side, query.dtype)
                    for store, side in zip(stores, names, strict=True)
                ]
                return sdpa(query, parts[0], parts[1], causal)

            try:
                self.timed(dense, decoded, shape.dense_bytes)
                dense.fraction = None
            except torch.OutOfMemoryError:
                dense.refuse("not run", "no memory for decoded keys and values")
            if dense.seconds is not None and row.seconds is not None:
                row.against[DENSE] = dense.seconds / row.seconds
        return [row, dense]

    def peer(self, shape: Shape, name: str, make: Callable[..., Any], *dense: Tensor) -> Row:
        row = self.row(shape, name)
        try:
            call = make(*dense)
            want = sdpa(dense[0], dense[1], dense[2], False)
            difference = float((call().reshape(want.shape).float() - want.float()).abs().max())
            # Both round weights and outputs to bf16; who differs by more than its steps computes something else.
            allowed = 4 * 2.0**-8 * float(want.abs().max())
            if not difference <= allowed:
                return row.refuse("wrong", f"differs from SDPA by {difference:.3g}, allowed {allowed:.3g}")
            return self.timed(row, call, shape.dense_bytes)
        except ImportError as error:
            return row.refuse("not run", f"not installed: {error}")
        except Exception as error:  # other people's versions and kernels fail in ways of their own
            return row.refuse("not run", f"{type(error).__name__}: {error}")

    def append_rows(self, name: str) -> list[Row]:
        """One token into each of 32 rows."""
        fmt: Format = parse_kv_format(name).key
        shape = Shape(32, 2048)
        row = self.row(shape, name, "append")
        x = torch.randn(32, KV_HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad(), kvq_ops.use_implementation(KERNELS):
            store = fmt.empty_store(32, KV_HEADS, 2048, DIM, dtype=x.dtype, device="cuda")
            position = torch.zeros(1, dtype=torch.int64, device="cuda")
            call = functools.partial(kvq_ops.append_, store, position, x, fmt.name)
            return [self.timed(row, call, x.numel() * 2)]


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


# ---------------------------------------------------------------------------------------------------------------- peers


def flashinfer(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """FlashInfer's decode over pages of 16 tokens in bf16, planned outside of what is timed."""
    import flashinfer as package

    batch, heads, tokens, dim = key.shape
    size = 16
    cache = torch.stack((key, value), 0).transpose(2, 3).reshape(2, batch * tokens // size, size, heads, dim)
    cache = cache.transpose(0, 1).contiguous()
    work = torch.empty(256 * 2**20, dtype=torch.uint8, device=key.device)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(work, "NHD", use_tensor_cores=True)
    each = tokens // size
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=key.device) * each,
        torch.arange(batch * each, dtype=torch.int32, device=key.device),
        torch.full((batch,), size, dtype=torch.int32, device=key.device),
        query.shape[1],
        heads,
        dim,
        size,
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
    )
    flat = query[:, :, 0].contiguous()
    return lambda: wrapper.run(flat, cache)


def vllm(query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    """vLLM's Triton kernel over pages of 16 tokens in bf16, cut along the sequence where its version can."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError:
        from vllm.attention.ops.triton_unified_attention import unified_attention

    batch, heads, tokens, dim = key.shape
    size, query_heads = 16, query.shape[1]
    pools = [
        x.transpose(1, 2).reshape(batch * tokens // size, size, heads, dim).contiguous() for x in (key, value)
    ]
    table = torch.arange(batch * tokens // size, dtype=torch.int32, device=key.device).view(batch, -1)
    flat = query[:, :, 0].contiguous()
    out = torch.empty_like(flat)
    given: dict[str, Any] = {
        "q": flat,
        "k": pools[0],
        "v": pools[1],
        "out": out,
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=key.device),
        "max_seqlen_q": 1,
        "seqused_k": torch.full((batch,), tokens, dtype=torch.int32, device=key.device),
        "max_seqlen_k": tokens,
        "softmax_scale": dim**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": torch.ones(batch, heads, device=key.device),
        "v_descale": torch.ones(batch, heads, device=key.device),
    }
    parts, rows = 16, max(batch, 128 // heads)
    scratch = functools.partial(torch.empty, dtype=torch.float32, device=key.device)
    further = {
        "seq_threshold_3D": rows,
        "num_par_softmax_segments": parts,
        "softmax_segm_output": scratch(rows, query_heads, parts, dim),
        "softmax_segm_max": scratch(rows, query_heads, parts),
        "softmax_segm_expsum": scratch(rows, query_heads, parts),
    }
    known = inspect.signature(unified_attention).parameters
    given |= {name: value for name, value in further.items() if name in known}

    def call() -> Tensor:
        unified_attention(**given)
        return out

    return call


PEERS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("FlashInfer bf16", flashinfer),
    ("vLLM Triton bf16", vllm),
)


def _shape_rows(bench: Callable[[], Bench], shape: Shape, formats: Sequence[str]) -> list[Row]:
    return bench().shape_rows(shape, formats)


def _append_rows(bench: Callable[[], Bench], name: str) -> list[Row]:
    return bench().append_rows(name)


def cases(bench: Callable[[], Bench]) -> list[Case]:
    """Decode at every batch and context, prefill, and appending; the shapes that the project is judged by come first."""
    made = []
    for i, tokens in enumerate(CONTEXTS):
        for j, batch in enumerate(BATCHES):
            shape = Shape(batch, tokens)
            worth = 98.0 - 3 * i - 2 * j
            made.append(
                Case(
                    "decode",
                    str(shape),
                    functools.partial(_shape_rows, bench, shape, HEADLINE),
                    3 + 1.6 * len(HEADLINE) + shape.dense_bytes / 2**32,
                    worth,
                )
            )
    for at, (batch, tokens) in enumerate(((1, 8192), (4, 2048))):
        shape = Shape(batch, tokens, tokens)
        made.append(
            Case(
                "prefill",
                str(shape),
                functools.partial(_shape_rows, bench, shape, HEADLINE[:3]),
                12,
                96.5 - at,
            )
        )
    made += [
        Case("append", name, functools.partial(_append_rows, bench, name), 1.5, 90.0 - at)
        for at, name in enumerate(HEADLINE)
    ]
    return made

"""Decoding with a real model: every kind of cache, transformers' own quantized ones and llama.cpp's among them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import kvq_ops
import passes
from kvq_lab import assets, bench_llama
from kvq_lab.bench_attention import short
from kvq_lab.bench_rows import Row
from kvq_lab.bench_timing import Clock, Contender, Expected, time_contenders
from kvq_lab.calibrate import observe
from kvq_lab.decode_steps import Decoder, compiled_apart
from kvq_lab.evaluate import live_bytes, log_probabilities
from kvq_lab.progress import Stages
from kvq_ops import reference
from kvq_ops.calibration import Calibration
from kvq_ops.errors import ShapeError
from kvq_ops.hf_shapes import cache_argument

if TYPE_CHECKING:
    from kvq_lab.bench import Settings

BASE_DTYPE = torch.bfloat16
CALIBRATED = 512
_CHUNK = 512

Written = list[tuple[Tensor, Tensor]]
Load = Callable[[torch.dtype], tuple[Any, Any]]


# -- caches -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cached:
    """A way to keep a cache.

    Attributes:
        name: of the row.
        new: an empty one for a configuration, a dtype and a number of tokens.
        backend: of torch.compile; ``None`` to run as transformers does, which cannot compile these.
        format: of ours.
        implementation: what to call it.
    """

    name: str
    new: Callable[[Any, torch.dtype, int], Any]
    backend: str | None
    format: str = ""
    implementation: str = ""


def _static(config: Any, dtype: torch.dtype, room: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=config, max_cache_len=room)


def _dynamic(config: Any, dtype: torch.dtype, room: int) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=config)


def _theirs(backend: str, options: dict[str, Any]) -> Callable[[Any, torch.dtype, int], Any]:
    def new(config: Any, dtype: torch.dtype, room: int) -> Any:
        from transformers import QuantizedCache

        return QuantizedCache(backend=backend, config=config, **options)

    return new


def _ours(name: str, calibration: Calibration | None) -> Callable[[Any, torch.dtype, int], Any]:
    def new(config: Any, dtype: torch.dtype, room: int) -> Any:
        from kvq_ops.hf import QuantizedCache

        return QuantizedCache(config, name, max_cache_len=room, dtype=dtype, calibration=calibration)

    return new


# Their groups are of 64 and their newest 128 tokens exact, as they come; axis 1 is what HQQ is good at.
PEERS = (
    Cached("transformers DynamicCache", _dynamic, None, implementation="transformers, eager"),
    Cached("quanto 4 bits", _theirs("quanto", {"nbits": 4}), None, implementation="transformers, eager"),
    Cached(
        "HQQ 8 bits",
        _theirs("hqq", {"nbits": 8, "axis_key": 1, "axis_value": 1}),
        None,
        implementation="transformers, eager",
    ),
    Cached(
        "HQQ 4 bits",
        _theirs("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
        None,
        implementation="transformers, eager",
    ),
    Cached("transformers fp8", _theirs("fp8", {}), None, implementation="transformers, eager"),
)
UNQUANTIZED = Cached("unquantized compiled", _static, "inductor", implementation="torch.compile")


def prefilled(model: Any, ids: Tensor) -> Written:
    """Keys and values of every layer, ``[1, H, T, D]``, after the model has read ``ids [1, T]``."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for start in range(0, ids.shape[1], _CHUNK):
        model(ids[:, start : start + _CHUNK], **{cache_argument(model): cache, "use_cache": True})
    return [(layer.keys, layer.values) for layer in cache.layers]


def _filled(cached: Cached, model: Any, written: Written, context: int, room: int) -> Any:
    dtype = next(model.parameters()).dtype
    cache = cached.new(model.config, dtype, room)
    for layer, (key, value) in enumerate(written):
        cache.update(key[:, :, :context].to(dtype), value[:, :, :context].to(dtype), layer)
    return cache


# -- right or not -------------------------------------------------------------------------------------------------------


def check_kernels(cache: Any, query_heads: int, dtype: torch.dtype) -> tuple[str, float, float]:
    """Attention by one random query over every layer's stored keys and values, against float64.

    Returns what :meth:`Expected.compare` does, of the layer that is furthest from what is right.
    """
    handles = list(cache.handles())
    worst: tuple[str, float, float] = ("", 0.0, 0.0)
    for key, value in zip(handles[::2], handles[1::2], strict=True):
        query = torch.randn(key.shape[0], query_heads, 1, key.shape[-1]).to(dtype)
        names = (key.format.name, value.format.name)
        got = kvq_ops.attention(query, key.store, value.store, *names)
        exact = reference.attention(
            query, key.store, value.store, key.format, value.format, compute=torch.float64
        )
        wrong, found, allowed = Expected.of(exact, dtype).compare(got)
        if wrong:
            return wrong, found or 0.0, allowed or 0.0
        assert found is not None and allowed is not None
        if found >= worst[1]:
            worst = ("", found, allowed)
    return worst


# What lies at the edge of two codes falls to either side in fp32: half a step of 8 bits, for all of a model's logits.
_FP32_LIMIT = 2**-8


def check_logits(got: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype) -> tuple[str, float, float]:
    """(``""`` or what is wrong, error relative to the size of the logits, what is allowed) of a compiled step.

    In fp32 it may differ from the eager model's step over the same cache by next to nothing. In 16 bits the two round in
    different places, so each is compared with the fp32 model's step (``exact``): the compiled one must not be more than twice
    as far from it as the eager one.
    """
    if dtype is torch.float32:
        found, allowed = _relative(got, eager), _FP32_LIMIT
    else:
        found, allowed = _relative(got, exact), 2 * _relative(eager, exact)
    # Not found > allowed: what is not a number is wrong too.
    wrong = (
        "" if found <= allowed else f"wrong: logits off by {found:.3g} of their size, allowed {allowed:.3g}"
    )
    return wrong, found, allowed


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _step(forward: Callable[..., Any], argument: str, cache: Any, token: Tensor) -> Tensor:
    logits: Tensor = forward(token, **{argument: cache, "use_cache": True}).logits[:, -1].float()
    return logits


def divergence(got: Tensor, want: Tensor) -> float:
    """KL(want || got) in nats of logits ``[1, V]``."""
    exact = log_probabilities(want)
    return float((exact.exp() * (exact - log_probabilities(got))).sum())


# -- the measurement ----------------------------------------------------------------------------------------------------


def load(dtype: torch.dtype) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer."""
    return assets.load_smollm2(dtype)


def text_ids(tokenizer: Any, tokens: int, vocabulary: int) -> Tensor:
    """``[1, tokens]`` of the passage that ships with the package, from its beginning again where it ends."""
    ids: Tensor = tokenizer(assets.passage()[1], return_tensors="pt").input_ids
    if ids.shape[1] == 0 or int(ids.max()) >= vocabulary:
        raise ShapeError("text to decode after", got="no tokens of this model", allowed="a plain text")
    return ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens]


def measure(
    settings: Settings,
    stages: Stages,
    notes: set[str],
    clock: Clock = time.perf_counter,
    load: Load = load,
    peers: Sequence[Cached] = PEERS,
) -> list[Row]:
    """Rows of the part ``model``: one decode step after each of ``settings.contexts``."""
    dtypes = list(dict.fromkeys([*settings.model_dtypes, BASE_DTYPE]))
    with stages.stage("Loading SmolLM2-135M-Instruct (converted on first use)", len(dtypes) + 1) as advance:
        models: dict[torch.dtype, Any] = {}
        for dtype in [torch.float32, *(d for d in dtypes if d is not torch.float32)]:
            models[dtype], tokenizer = load(dtype)
            advance(1)
    exact = models[torch.float32]
    ids = text_ids(tokenizer, max(settings.contexts) + 1, exact.get_input_embeddings().num_embeddings)
    with stages.stage(f"Reading {max(settings.contexts)} tokens", 1) as advance, torch.no_grad():
        written = prefilled(exact, ids[:, :-1])
        advance(1)
    ours = _our_caches(settings, exact, ids, stages)
    rows: list[Row] = []
    # Kept from one context to the next: the second finds out that the size of the cache varies, and further ones compile nothing.
    forwards: dict[str, Any] = {}
    for context in settings.contexts:
        bench = _AtContext(settings, stages, notes, clock, models, forwards, written, ids, context)
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=256):
            rows += bench.measure(ours, peers)
    return rows


def _our_caches(settings: Settings, model: Any, ids: Tensor, stages: Stages) -> list[Cached]:
    names = [str(kvq_ops.parse_kv_format(name)) for name in settings.model_formats]
    wanting = [name for name in names if kvq_ops.parse_kv_format(name).needs_calibration]
    fitted: dict[str, Calibration] = {}
    if wanting:
        with stages.stage("Fitting scales and codebooks", len(wanting)) as advance:
            sample = observe(model, ids[:, :CALIBRATED])
            for name in wanting:
                fitted[name] = sample.fit(name)
                advance(1)
    return [
        Cached(f"kvq {name}", _ours(name, fitted.get(name)), "kvq", format=name, implementation="kvq")
        for name in names
    ]


@dataclasses.dataclass
class _AtContext:
    """The contenders at one number of tokens in the cache."""

    settings: Settings
    stages: Stages
    notes: set[str]
    clock: Clock
    models: dict[torch.dtype, Any]
    forwards: dict[str, Any]
    written: Written
    ids: Tensor
    context: int

    @property
    def room(self) -> int:
        # The base is timed in two groups; a few steps go before and behind.
        return self.context + 2 * self.settings.rounds + 8

    def measure(self, ours: Sequence[Cached], peers: Sequence[Cached]) -> list[Row]:
        settings, context = self.settings, self.context
        wanted = [
            (dtype, cached) for dtype in settings.model_dtypes for cached in (UNQUANTIZED, *ours, *peers)
        ]
        if (BASE_DTYPE, UNQUANTIZED) not in wanted:
            wanted.append((BASE_DTYPE, UNQUANTIZED))
        # A single token must not be a slice: its strides would differ from a decoded one's and compile once more.
        token = torch.tensor([[int(self.ids[0, context])]])
        exact = self.models[torch.float32]
        cache = _filled(Cached("", _dynamic, None), exact, self.written, context, self.room)
        truth = _step(exact, cache_argument(exact), cache, token)
        llama = bench_llama.Runs(
            settings.llama_bench, context, settings.model_dtypes, self.notes, settings.llama_caches
        )
        with self.stages.stage(f"Decode after {context} tokens: preparing", len(wanted)) as advance:
            contenders = []
            for dtype, cached in wanted:
                contenders.append(self._contender(dtype, cached, token, truth))
                advance(1)
        base = next(c for c in contenders if c.row.name == _name(UNQUANTIZED, BASE_DTYPE))
        with self.stages.stage(f"Decode after {context} tokens", len(contenders) + 2) as advance:
            # llama.cpp is a process of its own: it runs before and after what takes turns in this one.
            llama.run()
            advance(1)
            time_contenders(
                contenders, base, settings.rounds, budget=settings.budget, clock=self.clock, advance=advance
            )
            llama.run()
            advance(1)
        rows = [contender.row for contender in contenders] + llama.rows(base.row)
        for row in rows:
            if row.ok and row.seconds:
                row.tokens_per_second = 1 / row.seconds
        return rows

    def _contender(self, dtype: torch.dtype, cached: Cached, token: Tensor, truth: Tensor) -> Contender:
        model = self.models[dtype]
        argument = cache_argument(model)
        row = Row(
            "model",
            _name(cached, dtype),
            format=cached.format,
            implementation=cached.implementation,
            dtype=short(dtype),
            batch=1,
            query_heads=model.config.num_attention_heads,
            kv_heads=model.config.num_key_value_heads,
            head_dim=self.written[0][0].shape[-1],
            queries=1,
            tokens=self.context,
            allocated=self.room if cached.backend else self.context,
        )
        try:
            cache = self._filled(cached, dtype)
            forward = model
            if cached.backend is None:
                got = _step(model, argument, cache, token)
            else:
                forward = self._compiled(row.name, model, cached.backend)
                passes.clear_report()
                got = _step(forward, argument, cache, token)
                self._check(row, cached, cache, got, token, dtype)
            row.kl = divergence(got, truth)
            cache_bytes = live_bytes(cache)
            if cached.backend is not None:
                cache_bytes = cache_bytes * self.context // self.room  # what a step has to read of it
            row.bytes = live_bytes(model) + cache_bytes
        except (
            Exception
        ) as error:  # a peer that is not installed, or does not take this model, has a row that says so
            status = "wrong" if cached.backend else "not run"
            install = (
                "; pip install 'kvq-ops[peers]'"
                if status == "not run" and isinstance(error, ImportError)
                else ""
            )
            row.refuse(f"{status}: {type(error).__name__}: {' '.join(str(error).split())[:200]}{install}")
            return Contender(row, [])
        step = Decoder(forward, argument, cache, got.argmax(-1, keepdim=True))
        return Contender(row, [step], repeat=1)

    def _filled(self, cached: Cached, dtype: torch.dtype) -> Any:
        return _filled(cached, self.models[dtype], self.written, self.context, self.room)

    def _compiled(self, name: str, model: Any, backend: str) -> Any:
        if name not in self.forwards:
            self.forwards[name] = compiled_apart(model, backend=backend)
        return self.forwards[name]

    def _check(
        self, row: Row, cached: Cached, cache: Any, got: Tensor, token: Tensor, dtype: torch.dtype
    ) -> None:
        """Hold a compiled step, and for our formats every layer's attention, against what is right."""

        def eager(kind: torch.dtype) -> Tensor:
            model = self.models[kind]
            return _step(model, cache_argument(model), self._filled(cached, kind), token)

        row.checked = "eager logits over the same cache"
        wrong, row.max_error, row.allowed_error = check_logits(got, eager(dtype), eager(torch.float32), dtype)
        if cached.format:
            row.checked += "; every layer's attention against float64"
            assert row.query_heads is not None
            wrong = check_kernels(cache, row.query_heads, dtype)[0] or wrong
            report = passes.report()
            if report.rewritten != report.found:  # none are found where code for an earlier context serves
                self.notes.add(
                    f"{row.name}: {report.rewritten} of {report.found} attention sites read the codes"
                )
        if wrong:
            row.refuse(wrong)


def _name(cached: Cached, dtype: torch.dtype) -> str:
    return f"{cached.name}, {short(dtype)}"

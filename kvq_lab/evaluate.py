"""What a quantized cache costs and saves: streamed quality, real bytes, attention error, speed.

Everything works on plain callables and tensors, so it can be checked with a toy model. A *step*
is ``step(input_ids, start) -> logits``: it runs tokens ``[B, n]`` that stand at positions
``start .. start + n - 1`` through its own cache and returns logits ``[B, n, V]``.

One-shot perplexity measures nothing here, since a cache may hand back the exact keys and values
of the very call that wrote them. So the context is prefilled and the scored tokens go through
the cache in chunks, each chunk reading what the earlier ones left there.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Step = Callable[[torch.Tensor, int], torch.Tensor]


# -- streaming ---------------------------------------------------------------------------------


def stream_logits(
    step: Step, ids: torch.Tensor, context: int, chunk: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Prefill ``context`` tokens of ``ids`` [B, N], then run the rest in chunks through the cache.

    Yields (logits [B, n, V], targets [B, n]), where ``targets`` are the tokens that the logits
    predict. The last token of ``ids`` is only ever a target, so N - context - 1 tokens are scored.

    Raises:
        ValueError: if context or chunk is below 1, or no token is left to score.
    """
    length = ids.shape[1]
    if context < 1 or chunk < 1:
        raise ValueError(f"context and chunk must be at least 1, got {context} and {chunk}")
    if length < context + 2:
        raise ValueError(
            f"a context of {context} needs at least {context + 2} tokens, got {length}: "
            "give a longer text or a shorter context"
        )
    with torch.no_grad():
        step(ids[:, :context], 0)
        for start in range(context, length - 1, chunk):
            end = min(start + chunk, length - 1)
            yield step(ids[:, start:end], start), ids[:, start + 1 : end + 1]


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """log_softmax over the last axis in float64: in fp32 a small KL drowns in rounding."""
    return torch.log_softmax(logits.double(), -1)


@dataclasses.dataclass
class Quality:
    """Running sums over scored tokens, in float64. ``differences`` are per-token losses minus
    the reference's, which share most of their variance: their spread tells noise from effect."""

    tokens: int = 0
    loss_sum: float = 0.0
    kl_sum: float = 0.0
    agreements: int = 0
    differences: list[float] = dataclasses.field(default_factory=list)

    def add(self, got: torch.Tensor, want: torch.Tensor, targets: torch.Tensor) -> None:
        """Take in log-probabilities [..., V], the reference's of the same shape, targets [...].

        Both as :func:`log_probabilities` gives them.
        """
        wanted = targets[..., None]
        loss = -got.gather(-1, wanted)
        # 0 * -inf would be NaN where the reference rules a token out.
        terms = torch.where(want == -math.inf, 0.0, want.exp() * (want - got))
        self.tokens += targets.numel()
        self.loss_sum += loss.sum().item()
        self.kl_sum += terms.sum().item()
        self.agreements += int((got.argmax(-1) == want.argmax(-1)).sum().item())
        self.differences += (loss + want.gather(-1, wanted)).flatten().tolist()

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss_sum / self.tokens)

    @property
    def perplexity_change(self) -> float:
        """Relative change of perplexity against the reference: 0.01 is one percent worse."""
        return math.expm1(math.fsum(self.differences) / self.tokens)

    @property
    def perplexity_change_error(self) -> float:
        """Standard error of :attr:`perplexity_change`, tokens taken as independent; NaN for one."""
        if self.tokens < 2:
            return math.nan
        spread = statistics.stdev(self.differences) / math.sqrt(self.tokens)
        return (1 + self.perplexity_change) * spread

    @property
    def kl(self) -> float:
        """Mean over tokens of KL(reference || this), in nats."""
        return self.kl_sum / self.tokens

    @property
    def agreement(self) -> float:
        """Share of tokens on which the most likely next token is the reference's."""
        return self.agreements / self.tokens


def score(
    steps: Mapping[str, Step],
    reference: str,
    ids: torch.Tensor,
    context: int,
    chunk: int,
    on_chunk: Callable[[int], None] | None = None,
    enough: Callable[[], bool] | None = None,
) -> dict[str, Quality]:
    """Stream every step over the same ids in lockstep and compare each with ``reference``.

    Lockstep keeps one chunk of logits of each and never a whole text's, and lets all of them stop
    after the same token. ``on_chunk`` is told how many tokens each chunk scored; after it ``enough``
    may say to score no more.
    """
    if reference not in steps:
        raise ValueError(f"the reference {reference!r} is none of {', '.join(steps)}")
    names = list(steps)
    results = {name: Quality() for name in names}
    streams = [stream_logits(steps[name], ids, context, chunk) for name in names]
    for parts in zip(*streams, strict=True):
        exact = log_probabilities(parts[names.index(reference)][0])
        for name, (logits, targets) in zip(names, parts, strict=True):
            got = exact if name == reference else log_probabilities(logits)
            results[name].add(got, exact, targets)
        if on_chunk:
            on_chunk(parts[0][1].numel())
        if enough and enough():
            break
    return results


# -- bytes -------------------------------------------------------------------------------------

_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType)


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with storage behind ``tensor``: itself, or a wrapper subclass's inner ones."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def live_tensors(*objects: Any) -> Iterator[torch.Tensor]:
    """Every tensor reachable from the objects through containers, attributes and slots.

    Modules that are merely referred to are not entered, so a cache that knows its model does not
    count the weights; a module given directly counts whole.
    """
    seen: dict[int, Any] = {}  # holds the objects, so that no id is used twice
    stack: list[tuple[Any, bool]] = [(item, True) for item in reversed(objects)]
    while stack:
        item, given = stack.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            yield from _plain_tensors(item)
            # A handle may keep more than it flattens to, and that would be alive too.
            if type(item) is not torch.Tensor and getattr(item, "__dict__", None):
                stack.append((vars(item), False))
        elif isinstance(item, torch.nn.Module):
            if given:
                yield from item.parameters()
                yield from item.buffers()
        elif isinstance(item, Mapping):
            stack += [(value, given) for value in item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack += [(value, given) for value in item]
        else:
            if getattr(item, "__dict__", None):
                stack.append((vars(item), False))
            for kind in type(item).__mro__:
                slots = kind.__dict__.get("__slots__", ())
                for name in (slots,) if isinstance(slots, str) else slots:
                    if hasattr(item, name):
                        stack.append((getattr(item, name), False))


def live_bytes(*objects: Any) -> int:
    """Bytes of all distinct storages behind the tensors reachable from the objects.

    A storage is counted once and whole, however many tensors view however little of it.
    """
    storages: dict[int, int] = {}
    for tensor in live_tensors(*objects):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


# -- attention error ---------------------------------------------------------------------------


@dataclasses.dataclass
class SiteError:
    """Squared sums of one attention call: ``relative_l2`` is |changed - exact| / |exact|."""

    site: int
    error_square: float
    exact_square: float

    @property
    def relative_l2(self) -> float:
        if self.exact_square == 0.0:
            return 0.0 if self.error_square == 0.0 else math.inf
        return math.sqrt(self.error_square / self.exact_square)


RoundTrip = Callable[[torch.Tensor, int], torch.Tensor]


class AttentionError(TorchFunctionMode):
    """While entered, measures at every attention call what quantizing its K and V would change.

    ``formats`` maps a name to a pair of functions (for keys, for values), each from [B, H, T, D] and the
    number of the call to what reading back its stored form gives. Each call to ``scaled_dot_product_attention``
    returns its exact result, so later sites see exact inputs and the errors do not add up along
    the layers. ``errors[name]`` lists one :class:`SiteError` a call, in the order of the calls.

        with AttentionError({"int8": (keys, values)}) as measured, torch.no_grad():
            model(ids)
        measured.relative_l2("int8")
    """

    def __init__(self, formats: Mapping[str, tuple[RoundTrip, RoundTrip]]) -> None:
        super().__init__()
        self.formats = dict(formats)
        self.errors: dict[str, list[SiteError]] = {name: [] for name in self.formats}
        self.sites = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self._measure(result, *args, **(kwargs or {}))
        return result

    def _measure(self, exact, query, key, value, *rest, **named):
        for name, (keys, values) in self.formats.items():
            changed = F.scaled_dot_product_attention(
                query,
                keys(key, self.sites).to(key.dtype),
                values(value, self.sites).to(value.dtype),
                *rest,
                **named,
            )
            self.errors[name].append(
                SiteError(
                    self.sites,
                    (changed.double() - exact.double()).square().sum().item(),
                    exact.double().square().sum().item(),
                )
            )
        self.sites += 1

    def relative_l2(self, name: str) -> float:
        """Mean over the attention calls of the relative L2 error.

        Raises:
            ValueError: if no attention call was seen, as in a model that spells attention out.
        """
        if not self.errors[name]:
            raise ValueError(
                "no call of scaled_dot_product_attention was seen: load the model with "
                "attn_implementation='sdpa' and run it in eager mode"
            )
        return statistics.fmean(error.relative_l2 for error in self.errors[name])


# -- speed -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median seconds of one call, and how much faster than the first variant it is.

    ``ratio`` is the median over rounds of first / this within one round, which a slow minute of
    the machine touches less than the quotient of two medians: 2.0 is twice as fast.
    """

    seconds: float
    ratio: float
    samples: tuple[float, ...]


def interleaved(
    variants: Mapping[str, Callable[[], Any]],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    on_round: Callable[[int], None] | None = None,
) -> dict[str, Timing]:
    """Time the variants in turn, ``rounds`` times over, each round starting with another one.

    The first ``warmup`` rounds are not counted. The first variant is the base of the ratios.
    """
    if rounds < 1 or not variants:
        raise ValueError(f"need a round and a variant, got {rounds} and {list(variants)}")
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            begin = clock()
            variants[name]()
            taken = clock() - begin
            if number >= warmup:
                samples[name].append(taken)
        if on_round:
            on_round(number)
    base = samples[names[0]]
    return {name: _timing(samples[name], base) for name in names}


def _timing(samples: Iterable[float], base: Iterable[float]) -> Timing:
    mine = tuple(samples)
    quotients = [first / own for first, own in zip(base, mine, strict=True)]
    return Timing(statistics.median(mine), statistics.median(quotients), mine)

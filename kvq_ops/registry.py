"""Which implementation runs an operator: records with predicates, chosen by priority, explained on request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .errors import HeadDimError, ImplementationError, near_names
from .formats import Format, get_format

__all__ = ["Implementation", "Request", "explain", "register", "select", "use_implementation"]

OPS = ("quantize", "dequantize", "append_", "attention", "paged_append_", "paged_attention")


class Request(NamedTuple):
    """What an operator is about to do, as far as a choice may depend on it."""

    op: str
    device: str
    formats: tuple[Format, ...]
    head_dims: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Implementation:
    """One way to run one operator.

    Attributes:
        name: what users ask for (``torch``, ``cpu``, ``triton``, ``cutlass``).
        op: one of ``OPS``.
        run: called with the operator's arguments, formats resolved to rows.
        refuses: the reason why a request cannot be served, or ``None``. It must be cheap.
        priority: the highest that does not refuse is chosen.
        inlined: ``run`` consists of torch operators and Triton kernels only, so that a compiled graph on a GPU holds those
            instead of the operator; see ``kvq_ops.triton_kernels.inline``.
    """

    name: str
    op: str
    run: Callable[..., Any]
    refuses: Callable[[Request], str | None]
    priority: int = 0
    inlined: bool = False


_implementations: dict[str, list[Implementation]] = {op: [] for op in OPS}
_choices: dict[Request, Implementation] = {}
_forced: str | None = None


def register(implementation: Implementation) -> None:
    """Add an implementation; one of the same name and op is replaced."""
    rows = _implementations[implementation.op]
    rows[:] = [row for row in rows if row.name != implementation.name] + [implementation]
    rows.sort(key=lambda row: -row.priority)
    _choices.clear()


def implementations(op: str) -> tuple[Implementation, ...]:
    """All implementations of an operator, the preferred first."""
    return tuple(_implementations[op])


def select(request: Request) -> Implementation:
    """The implementation for a request.

    Raises:
        ImplementationError: when none can serve it, or when the one that was asked for by name cannot.
    """
    try:
        chosen = _choices.get(request)
    except TypeError:  # a symbolic size, which has no hash; kernels are made for one head_dim
        request = request._replace(head_dims=tuple(map(int, request.head_dims)))
        chosen = _choices.get(request)
    if chosen is not None:
        return chosen
    rows = _implementations[request.op]
    if _forced is not None:
        rows = [row for row in rows if row.name == _forced]
    reasons = []
    for row in rows:
        reason = row.refuses(request)
        if reason is None:
            _choices[request] = row
            return row
        reasons.append(f"{row.name}: {reason}")
    able = [row.name for row in _implementations[request.op] if row.refuses(request) is None]
    raise ImplementationError(
        f"kvq::{request.op} on {request.device} for {', '.join(map(str, request.formats))}"
        + (f" by implementation {_forced!r}" if _forced else ""),
        got="; ".join(reasons) or "no implementation of that name for this operator",
        allowed=", ".join(able) or "nothing: no implementation serves this",
        do="leave the choice open, or see kvq_ops.explain(...)" if able else "see kvq_ops.explain(...)",
    )


@contextlib.contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Run every operator by the implementation ``name``, or raise; there is no fallback."""
    known = {row.name for rows in _implementations.values() for row in rows}
    if name not in known:
        raise ImplementationError(
            "an implementation by name",
            got=repr(name),
            allowed=near_names(name, sorted(known)),
            do="kvq_ops.explain(op, *formats) lists those of an operator",
        )
    global _forced
    before, _forced = _forced, name
    _choices.clear()
    try:
        yield
    finally:
        _forced = before
        _choices.clear()


def _operator_refuses(request: Request) -> str | None:
    """Why the operator raises before anybody is chosen, as far as a request says, or ``None``."""
    for fmt, head_dim in zip(request.formats, request.head_dims, strict=True):
        if request.op.startswith("paged") and (fmt.windowed or fmt.token_group > 1):
            return f"format {fmt.name}: pages take formats that code each token by itself"
        try:
            fmt.check_head_dim(head_dim)
        except HeadDimError:
            return f"format {fmt.name} holds head_dims that are positive multiples of {fmt.pack}"
    floats: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    if request.op == "dequantize":
        floats = (*floats, torch.float64)
    if request.dtype not in floats:
        return f"the operator takes {', '.join(str(dtype).removeprefix('torch.') for dtype in floats)}"
    return None


def explain(
    op: str,
    *formats: Format | str,
    device: str | torch.device = "cpu",
    head_dim: int = 128,
    dtype: torch.dtype = torch.float32,
) -> str:
    """One line for each implementation of ``op``: chosen, or rejected and why.

    What the operator refuses whoever would run it (a head_dim that the format cannot hold, say) is rejected by all.

    Args:
        op: ``quantize``, ``dequantize``, ``append_``, ``attention``, ``paged_append_`` or ``paged_attention``.
        formats: that of the store, or those of keys and of values.
        device: need not exist here; what depends on the device itself (its compute capability) is then taken to fit.

    Raises:
        ImplementationError: when there is no such operator, or when it takes fewer formats.
    """
    if op not in _implementations:
        raise ImplementationError(
            "kvq_ops.explain of an operator",
            got=repr(op),
            allowed=near_names(op, OPS),
            do="name one of these",
        )
    rows = tuple(get_format(row) if isinstance(row, str) else row for row in formats)
    most = 2 if op in ("attention", "paged_attention") else 1
    if not 1 <= len(rows) <= most:
        raise ImplementationError(
            f"kvq_ops.explain of {op}",
            got=f"{len(rows)} formats",
            allowed="that of the store" if most == 1 else "that of keys and that of values, or one for both",
            do="name one format for each store that the operator takes",
        )
    request = Request(op, torch.device(device).type, rows, (head_dim,) * len(rows), dtype)
    lines = [f"kvq::{op} on {device}, {', '.join(map(str, rows))}, head_dim {head_dim}, {dtype}"]
    taken, refused = False, _operator_refuses(request)
    for row in _implementations[op]:
        reason = refused or row.refuses(request)
        if _forced is not None and row.name != _forced:
            reason = f"{_forced!r} was asked for"
        if reason is None:
            verdict = "lower priority" if taken else "chosen"
            taken = True
        else:
            verdict = f"rejected: {reason}"
        lines.append(f"  {row.name}: {verdict}")
    return "\n".join(lines)

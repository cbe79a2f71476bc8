"""Operators as Triton kernels in compiled graphs, so that Inductor sees the kernels and AOTInductor packages carry them.

``torch.library.triton_op`` does the same for an operator that it defines itself: where AOTAutograd makes a graph functional,
the operator gives way to what it consists of, and each kernel launch becomes a node. The operators here have other
implementations too, so the rule is added to operators that exist, and applies where a kernel of this package was chosen for
tensors on a GPU. Everywhere else, and while ``torch.export`` makes a program (whose operators are to stay whole until it is
compiled), the operator remains one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from ..config import is_checked
from ..formats import get_format
from ..registry import Request, select
from .availability import INTERPRETED
from .launching import tracing

__all__ = ["inline"]

_KNOWN_TYPES = (Tensor, FakeTensor, FunctionalTensor)


def inline(lib: torch.library.Library, op: str, body: Callable[..., Any]) -> None:
    """Let ``kvq::<op>`` give way to ``body`` in compiled graphs on GPUs, where an implementation that allows it is chosen.

    Args:
        lib: the library that defines the operator.
        body: what runs the operator on tensors with memory: checks, and the chosen implementation.
    """

    def rule(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        if not _decomposes(op, args, kwargs):
            return mode.__torch_dispatch__(func, types, args, kwargs)
        if any(not issubclass(kind, FakeTensor) and kind not in _KNOWN_TYPES for kind in types):
            return NotImplemented
        with mode, tracing():
            return body(*args, **kwargs)

    torch.library.register_torch_dispatch(f"kvq::{op}", FunctionalTensorMode, rule, lib=lib)
    _tell_caches(op)


def _decomposes(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    tensors = _tensors((*args, *kwargs.values()))
    if INTERPRETED or next(tensors).device.type != "cuda" or is_checked():
        return False  # checked mode looks at values, which only the operator itself can
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    return not custom_triton_ops_decomposition_disabled() and select(_request(op, args)).inlined


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _request(op: str, args: Sequence[Any]) -> Request:
    """What the operator itself will ask of the registry. Arguments before the keyword-only ones are always positional."""
    if op in ("attention", "paged_attention"):
        query, _, values = args[:3]
        names = args[3:5] if op == "attention" else args[5:7]
        formats = tuple(map(get_format, names))
        dims = (int(query.shape[3]), int(formats[1].logical_shape(values)[3]))
        return Request(op, query.device.type, formats, dims, query.dtype)
    if op == "dequantize":
        store, name, dtype = args
        fmt = get_format(name)
        return Request(op, store[0].device.type, (fmt,), (int(fmt.logical_shape(store)[3]),), dtype)
    x, name = (args[0], args[1]) if op == "quantize" else args[-2:]
    return Request(op, x.device.type, (get_format(name),), (int(x.shape[3]),), x.dtype)


# ------------------------------------------------------------------------------------------------------ compiled caches


class _Kernels(list[Any]):
    """The kernels that an operator may become, found when a cache of compiled graphs asks for what its key must hold."""

    def __iter__(self) -> Iterator[Any]:
        if INTERPRETED or not torch.cuda.is_available():
            return iter(())
        from .availability import without_triton

        return iter(()) if without_triton() else iter(_all_kernels())


def _all_kernels() -> list[Any]:
    import importlib
    import pkgutil

    from triton.runtime.jit import JITFunction

    from . import __name__ as package
    from . import __path__ as path

    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(path):
        for value in vars(importlib.import_module(f"{package}.{module.name}")).values():
            if isinstance(value, JITFunction):
                found[value.__name__] = value
    return [found[name] for name in sorted(found)]


def _tell_caches(op: str) -> None:
    """Make AOTAutograd's cache look at the kernels' sources, or it would serve old kernels to a new version of this package."""
    from torch._library import triton as torch_triton

    known = getattr(torch_triton, "triton_ops_to_kernels", None)
    if known is not None:
        known[f"kvq::{op}"] = _Kernels()

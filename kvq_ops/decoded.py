"""Decoded views of a cache that may be read only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from .errors import UnsupportedWriteError

__all__ = ["DecodedView", "is_view", "make_wrapper"]


def make_wrapper(cls: type[Tensor], shape: Any, **kwargs: Any) -> Any:
    """A wrapper subclass that may also be a view of an ordinary tensor under ``torch.inference_mode``."""
    # There, autograd's bookkeeping of views refuses results that were born as inference tensors.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(cls, shape, **kwargs)
    return torch.Tensor._make_wrapper_subclass(cls, shape, **kwargs)


def is_view(func: Any) -> bool:
    """Whether ``func`` returns an alias of an argument without writing to it."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


_WHOLE_WRITES = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)


class DecodedView(torch.Tensor):
    """Decoded values seen through a view that codes do not have, such as ``view(B, -1, D)``: a write into one raises.

    Attributes:
        value: what is seen.
        append: for tokens of a cache that takes new ones at its end: what ``copy_`` (or ``fill_``) into this view does.
            It returns what is seen afterwards.
    """

    value: Tensor
    append: Callable[[Tensor], Tensor] | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def wrap(value: Tensor, append: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if type(value) is not Tensor:
            return value
        view: DecodedView = make_wrapper(
            DecodedView,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=value.device,
        )
        view.value, view.append = value, append
        return view

    def numpy(self, *, force: bool = False) -> Any:
        """A copy, so that writing into it cannot look like writing into the cache."""
        return self.value.clone().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy(force=True)
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.value.clone().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.value.__dlpack_device__()

    def tolist(self) -> Any:
        return self.value.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"decoded view of a quantized cache: {self.value!r}"

    @classmethod
    @_disable_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WHOLE_WRITES and isinstance(args[0], DecodedView) and args[0].append:
            source = args[1] if len(args) > 1 else 0.0
            source = source.value if isinstance(source, DecodedView) else torch.as_tensor(source)
            args[0].value.copy_(args[0].append(source))
            return args[0]
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            leaves = pytree.tree_leaves(given.get(argument.name)) if written else []
            if any(isinstance(t, DecodedView) for t in leaves):
                raise UnsupportedWriteError(
                    f"{func} on a view of a quantized cache",
                    got="a view that mixes axes or takes tokens out of a window, of which codes have no counterpart",
                    allowed="slices, selections and permutations of the cache's axes; new tokens at the end",
                    do="write into the cache itself: index_copy_, x[:, :, pos] = k, or copy_ into a slice",
                )
        args, kwargs = pytree.tree_map_only(DecodedView, lambda t: t.value, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, cls.wrap, result) if is_view(func) else result

"""``QuantizedKV``: a tensor that stands for a dense cache and holds it quantized.

It has the shape, strides and dtype of the dense cache, so models, modules and masks need not know. Four rules:

* an in-place write of tokens encodes them into the store;
* moving tokens, rows or heads about (slice, select, roll, index_select, cat, transpose, ...) moves codes, never
  coding anything twice; slices and the like are views, and writing into one writes into the cache;
* everything else reads decoded values;
* what cannot be written into codes raises. A write is never lost.

This makes eager execution right. Compiled graphs replace the decoded reads by ``kvq::attention``, see ``passes``.

Where dtypes meet, codes come first: ``.to(dtype)`` and ``module.half()`` keep the codes, and the new handle decodes them
straight to the new dtype.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from . import ops  # noqa: F401  registers the operators
from .axes import CANONICAL, arrange, canonical_shape, check_axes, compact_strides, dense_shape, to_canonical
from .calibration import check_static
from .decoded import make_wrapper
from .errors import (
    CalibrationError,
    CorruptStoreError,
    DtypeError,
    FormatError,
    GradientError,
    ShapeError,
    UnsupportedWriteError,
)
from .formats import Format, get_format
from .window import append_window_

__all__ = ["QuantizedKV", "storage_bytes"]

Owner = tuple["QuantizedKV", Any, Any]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``; a handle counts its planes."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        planes = tensor.planes() if isinstance(tensor, QuantizedKV) else [tensor]
        for plane in planes:
            storage = plane.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


class QuantizedKV(torch.Tensor):
    """A quantized cache in the guise of the dense one.

    Make one with :meth:`empty` or :meth:`from_dense`.

    Attributes:
        format: the row of the format table.
        axes: order of the axes, ``bhtd`` unless said otherwise.
        order: letters in the order in which the memory of the dense cache would run; ``axes`` of what a view was cut from.
        store: the planes, in the order of ``format.planes``, of the canonical cache ``[B, H, T, D]``.
    """

    format: Format
    axes: str
    order: str
    # For a slice along tokens: what it was cut from, its start there and its step. Writes are passed on.
    _owner: Owner | None
    # Letters of the axes that a view holds only a part of; static scales and lengths are then shared with the rest.
    _cut: str

    # Whether it is several caches in one tensor, see kvq_ops.stacked.
    is_stack = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        store: Sequence[Tensor],
        format: str,
        axes: str,
        dtype: torch.dtype,
        *,
        order: str | None = None,
        strides: Sequence[Any] | None = None,
    ) -> QuantizedKV:
        shape = dense_shape(get_format(format).logical_shape(store), axes)
        if strides is None:
            strides = compact_strides(shape, axes, order or axes.replace("1", ""))
        handle: QuantizedKV = make_wrapper(
            cls, shape, strides=tuple(strides), dtype=dtype, device=store[0].device
        )
        return handle

    def __init__(
        self,
        store: Sequence[Tensor],
        format: str,
        axes: str,
        dtype: torch.dtype,
        *,
        order: str | None = None,
        strides: Sequence[Any] | None = None,
    ) -> None:
        self.format = get_format(format)
        self.axes = axes
        self.order = axes.replace("1", "") if order is None else order
        self._owner = None
        self._cut = ""
        for plane, tensor in zip(self.format.planes, store, strict=True):
            setattr(self, f"plane_{plane.name}", tensor)

    # ------------------------------------------------------------------------------------------------ making one

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        format: str | Format,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        axes: str = CANONICAL,
        static: Mapping[str, Tensor] | None = None,
    ) -> QuantizedKV:
        """An empty cache that reads as zeros.

        Args:
            shape: of the dense cache, in the order of ``axes``.
            dtype: dtype that reads give and writes must have.
            static: what was calibrated for it, see :meth:`calibrate_`.

        Raises:
            UnknownFormatError, HeadDimError, FormatError: before anything is allocated.
        """
        row = _one_format(format)
        check_axes(axes, len(shape))
        check_cache_dtype(dtype)
        store = row.empty_store(*canonical_shape(shape, axes), dtype=dtype, device=device)
        handle = cls(store, row.name, axes, dtype)
        return handle if static is None else handle.calibrate_(static)

    @classmethod
    def from_dense(
        cls,
        x: Tensor,
        format: str | Format,
        *,
        axes: str = CANONICAL,
        length: int | Tensor | None = None,
        static: Mapping[str, Tensor] | None = None,
    ) -> QuantizedKV:
        """A cache holding ``x``.

        Args:
            x: the dense cache, in the order of ``axes``.
            length: tokens that are filled, for all rows or ``[B]``; the rest of ``x`` is not coded. Default: all.
            static: what was calibrated for it, see :meth:`calibrate_`.
        """
        row = _one_format(format)
        check_axes(axes, x.dim())
        check_cache_dtype(x.dtype)
        handle = cls.empty(x.shape, row, dtype=x.dtype, device=x.device, axes=axes, static=static)
        x = x.dequantize() if isinstance(x, QuantizedKV) else x
        dense = to_canonical(x.detach(), axes)
        batch, _, tokens, _ = dense.shape
        lengths = torch.as_tensor(tokens if length is None else length, device=x.device)
        if lengths.dim() > 1 or (lengths.dim() == 1 and lengths.shape[0] != batch):
            raise ShapeError(
                "QuantizedKV.from_dense length",
                got=f"shape {tuple(lengths.shape)}",
                allowed=f"a number, or one for each of {batch} rows",
                do="give one length, or a tensor [B] of them",
            )
        lengths = lengths.expand(batch).long()
        if bool((lengths < 0).any()) or bool((lengths > tokens).any()):
            raise ShapeError(
                "QuantizedKV.from_dense length",
                got=str(lengths.tolist()),
                allowed=f"0..{tokens} for each row",
                do="count the filled tokens of x, or give a longer x",
            )
        if row.windowed:
            # Rows of unequal length: what is coded depends on where a row ends.
            append_window_(handle.store, torch.zeros_like(lengths), dense, row, lengths)
            return handle
        filled = torch.arange(tokens, device=x.device) < lengths.unsqueeze(1)
        dense = dense.masked_fill(~filled[:, None, :, None], 0.0)
        torch.ops.kvq.append_(handle.store, torch.arange(tokens, device=x.device), dense, row.name)
        handle.length.copy_(lengths)
        if length is not None:
            # A slot without a token is as it was in the empty cache, not a coded zero.
            for plane, tensor in zip(row.planes, handle.planes(), strict=True):
                if plane.per_token:
                    tensor.masked_fill_(~filled.view(batch, 1, tokens, *[1] * (tensor.dim() - 3)), 0)
        return handle

    def calibrate_(self, static: Mapping[str, Tensor]) -> QuantizedKV:
        """Set the planes that span tokens (scales, codebooks) of a cache that holds no tokens yet.

        In a format with ``+static``, and one with a codebook, they stay when the cache is emptied; in others they are fitted
        again to the first tokens after that.

        Args:
            static: planes by name, as ``kvq_ops.calibration.fit`` gives them.

        Raises:
            CalibrationError: planes are missing, left over, of another shape, or no usable scale; or the cache holds tokens,
                whose codes would change their meaning. Nothing is changed then.
        """
        planes = check_static(static, self.format, self.format.logical_shape(self.planes()))
        if self._owner is not None or self._cut:
            raise CalibrationError(
                f"calibrating {self!r}",
                got="a slice",
                allowed="a whole cache",
                do="calibrate the cache that it was cut from",
            )
        if bool((self.length != 0).any()):
            raise CalibrationError(
                f"calibrating {self!r}",
                got=f"a cache that holds {self.length.tolist()} tokens",
                allowed="an empty one: codes that are stored would change their meaning",
                do="empty it first (zero_(), or reset() of a Hugging Face cache)",
            )
        for name, plane in planes.items():
            getattr(self, f"plane_{name}").copy_(plane)
        return self

    # ------------------------------------------------------------------------------------------------ looking at it

    def planes(self) -> list[Tensor]:
        """The tensors that this handle holds, in the order of ``format.planes``."""
        return [getattr(self, f"plane_{plane.name}") for plane in self.format.planes]

    @property
    def store(self) -> list[Tensor]:
        return [*self.planes()[:-1], self.length]

    @property
    def length(self) -> Tensor:
        """Tokens that each row holds, int64 ``[B]``: the largest position written, plus one."""
        if self._owner is None:
            own: Tensor = self.plane_length
            return own
        # Whatever the cache holds by now; a slice keeps no count of its own.
        base, start, step = self._owner
        reached = torch.div(base.length - start + (step - 1), step, rounding_mode="floor")
        return reached.clamp(0, self.planes()[0].shape[2])

    @staticmethod
    def dispatch(func: Any, args: Any, kwargs: Any, *, guard_views: bool) -> Any:
        """Run ``func`` on arguments with handles among them, by the rules of this kind of handle."""
        from .handle_ops import dispatch

        return dispatch(func, args, kwargs, guard_views=guard_views)

    def caches(self) -> list[QuantizedKV]:
        """The single caches that this handle holds: itself, unless it is a stack."""
        return [self]

    def plane_names(self) -> list[str]:
        """Names of the tensors in ``store``."""
        return [plane.name for plane in self.format.planes]

    @property
    def format_name(self) -> str:
        return self.format.name

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the storages behind the planes, scales and all."""
        return storage_bytes([self])

    def dequantize(self) -> Tensor:
        """The decoded cache, dense, in this cache's dtype and axes, laid out in memory as the dense cache would be."""
        return arrange(self.dequantize_canonical(), self.axes, self.order)

    def dequantize_canonical(self) -> Tensor:
        """The decoded cache as ``[B, H, T, D]``."""
        result: Tensor = torch.ops.kvq.dequantize(self.store, self.format.name, self.dtype)
        return result

    def numpy(self, *, force: bool = False) -> Any:
        """Decoded values as a numpy array, a copy."""
        return self.dequantize().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy(force=True)
        return array if dtype is None else array.astype(dtype)

    def share_memory_(self) -> QuantizedKV:
        for plane in self.planes():
            plane.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(plane.is_shared() for plane in self.planes())

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Decoded values, a copy; without this the exchange would hand out memory that a handle does not have."""
        return self.dequantize().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.planes()[0].__dlpack_device__()

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    def repeat_interleave(  # type: ignore[override]
        self, repeats: Any, dim: int | None = None, *, output_size: int | None = None
    ) -> Any:
        """As ``Tensor.repeat_interleave``; rows stay quantized."""
        if dim is None or self.axes[dim] != "b":
            return self.dequantize().repeat_interleave(repeats, dim, output_size=output_size)
        rows = torch.arange(self.shape[dim], device=self.device)
        return self.index_select(dim, rows.repeat_interleave(repeats, output_size=output_size))

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"QuantizedKV({self.format.name}, shape={tuple(self.shape)}, axes={self.axes!r}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    # ------------------------------------------------------------------------------------------- what it refuses

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise UnsupportedWriteError(
            f"assigning .data of {self!r}",
            got=type(value).__name__,
            allowed="reading it: the result is a view of the cache",
            do="use copy_ to change the contents, or put another tensor in its place",
        )

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedKV:
        if requires_grad:
            raise GradientError(
                f"a gradient for {self!r}",
                got="requires_grad=True",
                allowed="inference only: rounding has no useful derivative",
                do="register it as a buffer rather than a parameter",
            )
        return self

    # ------------------------------------------------------------------------------------------------ protocols

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, str, torch.dtype, str]]:
        if self._owner is not None:
            self.plane_length = self.length
        names = [f"plane_{plane.name}" for plane in self.format.planes]
        return names, (self.format.name, self.axes, self.dtype, self.order)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[str, str, torch.dtype, str], size: Any, stride: Any
    ) -> QuantizedKV:
        name, axes, dtype, order = context
        planes = [inner[f"plane_{plane.name}"] for plane in get_format(name).planes]
        return QuantizedKV(planes, name, axes, dtype, order=order, strides=stride)

    def like(
        self, store: Sequence[Tensor], axes: str | None = None, *, order: str | None = None
    ) -> QuantizedKV:
        """A new cache of this format and dtype over planes of its own."""
        return QuantizedKV(
            store, self.format.name, self.axes if axes is None else axes, self.dtype, order=order
        )

    def view_over(
        self, store: Sequence[Tensor], axes: str, strides: Sequence[Any], owner: Owner | None, cut: str
    ) -> QuantizedKV:
        """A view of this cache over views of its planes.

        Args:
            owner: for a slice along tokens, the handle it was cut from, its start there and its step.
            cut: letters of the axes of which the view holds a part.
        """
        view = QuantizedKV(store, self.format.name, axes, self.dtype, order=self.order, strides=strides)
        view._owner, view._cut = owner, cut
        return view

    def __copy__(self) -> QuantizedKV:
        return self.view_over(self.planes(), self.axes, self.stride(), self._owner, self._cut)

    def with_store(self, store: Sequence[Tensor]) -> QuantizedKV:
        """A handle like this one over planes given in the order of ``store``."""
        return self.like(store, order=self.order)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedKV:
        if id(self) not in memo:
            # Deep copies of planes that share a storage share one again, so views stay views of the copied cache.
            planes = [copy.deepcopy(plane, memo) for plane in self.planes()]
            owner = self._owner
            if owner is not None:
                owner = (copy.deepcopy(owner[0], memo), *owner[1:])
            memo[id(self)] = self.view_over(planes, self.axes, self.stride(), owner, self._cut)
        result: QuantizedKV = memo[id(self)]
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A view is stored as a cache of its own, without what it was cut from.
        store = [plane.clone() for plane in self.store] if self._cut else self.store
        return _rebuild, (store, self.format.name, self.axes, self.dtype, self.order)

    # Between the pieces of a broken graph handles work eagerly, where Dynamo would compile this very function.
    @classmethod
    @_disable_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        guard_views = not torch.compiler.is_compiling()
        return QuantizedKV.dispatch(func, args, kwargs or {}, guard_views=guard_views)


def _one_format(format: str | Format) -> Format:
    if isinstance(format, Format):
        return format
    if not isinstance(format, str):
        raise FormatError(
            "a format",
            got=f"{format!r}",
            allowed="a name or a row of the format table",
            do="of a pair, give .key for keys and .value for values",
        )
    return get_format(format)


def check_cache_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise DtypeError(
            "the dtype of a cache",
            got=str(dtype),
            allowed="float32, float16, bfloat16",
            do="call dequantize() first to convert decoded values",
        )


def _rebuild(
    store: list[Tensor], name: str, axes: str, dtype: torch.dtype, order: str | None = None
) -> QuantizedKV:
    row = get_format(name)
    row.check_store(store)
    check_axes(axes, len(axes))
    if order is not None and not set(axes.replace("1", "")) <= set(order) <= set(CANONICAL):
        raise CorruptStoreError(
            "the memory order of a stored cache",
            got=repr(order),
            allowed=f"the letters of {axes!r} and of what it was cut from",
            do="save the cache again: this one is damaged",
        )
    check_cache_dtype(dtype)
    return QuantizedKV(store, name, axes, dtype, order=order)


torch.serialization.add_safe_globals([_rebuild, QuantizedKV])


def dense_bytes(handle: Tensor) -> int:
    """Bytes of the dense cache that ``handle`` stands for."""
    return math.prod(handle.shape) * handle.dtype.itemsize

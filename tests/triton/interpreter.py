"""Triton's interpreter made right: what it computes falsely is replaced, and every access is held inside its tensors.

What the stock interpreter (3.6 to 3.8) does otherwise than the compiled code, and what is done about it here:

* bfloat16 is held as 16-bit integers, and arithmetic, comparisons, reductions, dot products and conversions from integers work on
  those integers. Here they widen to fp32 and round back, each operation by itself, as hardware does.
* conversions between floats truncate or round ties away, and lose carries and subnormals. Here torch converts, ties to even.
* casts to float8 wrap around beyond the largest number. Here they saturate and NaN stays NaN, as with ``cvt.rn.satfinite``.
  Compiled code is *not* right everywhere: for sm_89 Triton before 3.9 rounds twice, sm_80 has no such cast at all, and gfx942 has
  other float8 types. So kernels of this project make float8 codes by integer operations, which are the same everywhere, and the
  offline tests look into the assembly for conversions to float8, which must not be there.
* ``tl.dot`` of 8-bit integers accumulates in 8 bits, and that of float8 goes through the conversions above.
* bounds of a loop that a kernel computes are arrays of one element, of which Triton 3.6 makes an ``int`` as numpy before 2.4
  allowed. Here the element is taken, as Triton 3.8 does.
* an access outside of a tensor goes unseen. Here each unmasked lane must lie in the storage of one of the arguments.
* a product and a sum stay two operations. Compiled code may make one ``fma`` of them, which rounds once; :func:`fused` shows what
  a kernel would give then, and codes must not depend on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["OutOfBounds", "fused", "install"]

_FLOATS = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_FLOAT8 = tuple(t for t, kind in _FLOATS.items() if kind.itemsize == 1)
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle


class OutOfBounds(IndexError):
    """A kernel read or wrote outside of its arguments."""


def _to_torch(data: np.ndarray, kind: Any) -> torch.Tensor:
    data = np.ascontiguousarray(data)
    raw = _RAW[data.dtype.itemsize]
    return torch.from_numpy(data.view(getattr(np, str(raw).removeprefix("torch."))).copy()).view(
        _FLOATS[kind]
    )


def convert(data: np.ndarray, source: Any, target: Any, rounding: Any = None) -> np.ndarray:
    """The numbers of ``data`` (as the interpreter holds type ``source``) in type ``target``, ties to even."""
    if source not in _FLOATS or target not in _FLOATS:
        return _stock_convert(data, source, target, rounding)
    narrows = target.primitive_bitwidth < source.primitive_bitwidth
    if narrows and rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        return _stock_convert(data, source, target, rounding)
    values = _to_torch(data, source)
    if target in _FLOAT8 and source not in _FLOAT8:
        largest = torch.finfo(_FLOATS[target]).max
        values = torch.where(
            values.isnan(), values, values.double().clamp(-largest, largest).to(values.dtype)
        )
    out = values.to(_FLOATS[target])
    held = interpreter._get_np_dtype(target)
    return out.view(_RAW[out.element_size()]).numpy().view(held).reshape(np.shape(data))


def _wide(handle: Handle) -> np.ndarray:
    return convert(handle.data, tl.bfloat16, tl.float32)


def _narrow(data: np.ndarray) -> np.ndarray:
    return convert(np.asarray(data, np.float32), tl.float32, tl.bfloat16)


def _is_bf16(handle: Handle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


# ------------------------------------------------------------------------------------------------------- arithmetic


def _binary(self: Builder, lhs: Handle, rhs: Handle, op: Callable[..., np.ndarray]) -> Handle:
    if not _is_bf16(lhs) or op in _BITWISE:
        return _fusing(lhs, rhs, op) if _fuse else _stock_binary(self, lhs, rhs, op)
    out = op(_wide(lhs), _wide(rhs))
    if op in _COMPARISONS:
        return Handle(out, tl.bfloat16)  # its dtype is corrected by the caller, as for other floats
    return Handle(_narrow(out), tl.bfloat16)


def _unary(self: Builder, arg: Handle, op: Callable[..., np.ndarray]) -> Handle:
    return Handle(_narrow(op(_wide(arg))), tl.bfloat16) if _is_bf16(arg) else _stock_unary(self, arg, op)


def _fma(self: Builder, x: Handle, y: Handle, z: Handle) -> Handle:
    if x.dtype.scalar not in (tl.float16, tl.bfloat16, tl.float32):
        return Handle(x.data * y.data + z.data, z.dtype.scalar)
    kind = x.dtype.scalar
    a, b, c = (convert(handle.data, kind, tl.float64) for handle in (x, y, z))
    return Handle(convert(_once(a * b, c), tl.float64, kind), kind)


def _once(product: np.ndarray, addend: np.ndarray) -> np.ndarray:
    """The sum in float64, rounded to odd, so that rounding it to fp32 or less rounds the exact sum once."""
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    exact = (error == 0) | (bits & 1 == 1) | ~np.isfinite(total)
    outward = (error > 0) == (total > 0)
    return np.where(exact, bits, np.where(outward, bits | 1, bits - 1)).view(np.float64)


def _cast(self: Builder, source: Handle, target: Any) -> Handle:
    kind, wanted = source.dtype.scalar, target.scalar
    if kind in _FLOATS and wanted in _FLOATS:
        return Handle(convert(source.data, kind, wanted), wanted)
    if kind == tl.bfloat16:
        return _stock_cast(self, Handle(_wide(source), tl.float32), target)
    if wanted == tl.bfloat16:
        return Handle(_narrow(source.data), wanted)
    return _stock_cast(self, source, target)


def _dot(self: Builder, a: Handle, b: Handle, d: Handle, precision: Any, imprecise: Any) -> Handle:
    def widened(handle: Handle) -> np.ndarray:
        kind = handle.dtype.scalar
        if kind in (tl.int8, tl.uint8):
            return handle.data.astype(np.int32)
        return (
            convert(handle.data, kind, tl.float32) if kind in _FLOATS and kind != tl.float64 else handle.data
        )

    # fp16 and bf16 products are exact in fp32, in which hardware adds them up.
    total = np.matmul(widened(a), widened(b))
    return Handle((total + d.data).astype(d.data.dtype), d.dtype.scalar)


def _reduce(self: Any, inputs: tuple[Any, ...]) -> Any:
    if not any(arg.dtype.scalar == tl.bfloat16 for arg in inputs):
        return _stock_reduce(self, inputs)
    widened = tuple(self.to_tensor(_wide(arg.handle), tl.float32) for arg in inputs)
    out = _stock_reduce(self, widened)
    out = out if isinstance(out, list | tuple) else (out,)
    return tuple(self.to_tensor(_narrow(part.handle.data), tl.bfloat16) for part in out)


# ----------------------------------------------------------------------------------------- products that become fmas

_fuse = False


@contextlib.contextmanager
def fused() -> Iterator[None]:
    """Add up fp32 products without rounding them, wherever a compiler may (``a * b + c`` and ``a * b - c``)."""
    global _fuse
    before, _fuse = _fuse, True
    try:
        yield
    finally:
        _fuse = before


def _fusing(lhs: Handle, rhs: Handle, op: Callable[..., np.ndarray]) -> Handle:
    kind = lhs.dtype.scalar
    if kind != tl.float32 or op not in (np.add, np.subtract, np.multiply):
        return _stock_binary(interpreter.interpreter_builder, lhs, rhs, op)
    if op is np.multiply:
        out = Handle(lhs.data * rhs.data, kind)
        out.attr["exact"] = lhs.data.astype(np.float64) * rhs.data.astype(np.float64)
        return out
    for one, other, sign in ((lhs, rhs, 1), (rhs, lhs, -1)):
        exact = one.attr.get("exact")
        if exact is not None:
            addend = other.data.astype(np.float64)
            if op is np.subtract:
                addend, exact = (-addend, exact) if sign > 0 else (addend, -exact)
            return Handle(_once(*np.broadcast_arrays(exact, addend)).astype(np.float32), kind)
    return _stock_binary(interpreter.interpreter_builder, lhs, rhs, op)


def _run(self: Any, *args: Any, **kwargs: Any) -> Any:
    _patched.clear()
    # Lanes that a kernel leaves out may hold anything; hardware does not warn either.
    with np.errstate(all="ignore"):
        return _stock_run(self, *args, **kwargs)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _stock_patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


# ------------------------------------------------------------------------------------------------------------ speed

# The stock interpreter spends most of its time on the following, at every call of a helper and at every operation. What is
# computed and what is checked is the same here.

_patched: set[int] = set()
"""Modules of the language that are in the interpreter's hands during the launch that runs."""


@functools.cache
def _languages(fn: Any) -> frozenset[int]:
    return frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)


def _patch(fn: Any) -> Any:
    """Once for each launch instead of at each call of a helper: what the kernel's launch patched stays so until it ends."""
    modules = _languages(fn)
    if modules and modules <= _patched:
        return None
    _patched.update(modules)
    return _stock_patch(fn)


_numpy_types: dict[str, np.dtype] = {}


def _numpy_type(kind: Any) -> np.dtype:
    name = kind.scalar.name
    found = _numpy_types.get(name)
    if found is None:
        found = _numpy_types[name] = _stock_numpy_type(kind)
    return found


def _overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """The stock check is six operations more, for ``device_assert``, which looks at the answer in debug mode only."""
    if self.builder.options.debug:
        _stock_overflow(self, lhs, rhs, operation)


_shapes: dict[tuple[int, ...], tuple[Any, int, str]] = {}
_sizes: dict[int, tuple[Any, Any, Any]] = {}
"""By the identity of a type's shape, which is kept here and so stays its own; types of one shape share it."""


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = tuple(shape) if isinstance(shape, list | tl.tuple) else ()
    found = _shapes.get(key) if all(type(size) is int for size in key) else None
    if found is None:
        _stock_block_type(self, element_ty, shape)
        key = tuple(self.shape.values)
        self.shape, self.numel, _ = _shapes.setdefault(key, (self.shape, self.numel, str(self.shape)))
        return
    self.element_ty = element_ty
    self.shape, self.numel, text = found
    self.name = f"<{text}, {element_ty.name}>"


_SCALAR = ()


def _tensor(self: Any, handle: Any, type: Any) -> None:
    shape = type.shape if type.is_block() else _SCALAR
    found = _sizes.get(id(shape))
    if found is None:
        _stock_tensor(self, handle, type)
        _sizes[id(shape)] = (shape, self.shape, self.numel)
        return
    self.handle, self.type, self.dtype = handle, type, type.scalar
    _, self.shape, self.numel = found


def _handle(self: Handle, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if type(dtype) is not tl.dtype or data.itemsize * 8 > max(8, dtype.primitive_bitwidth):
        self.__post_init__()


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind in _PLAIN else _stock_unwrap(value)


def _same(self: Any, other: Any) -> bool:
    return self is other or _stock_same(self, other)


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Two tensors of one shape, or two scalars, stay what they are."""
    one, other = (side.type.shape if side.type.is_block() else None for side in (lhs, rhs))
    return (lhs, rhs) if one is other else _stock_broadcast(self, lhs, rhs)


def _checked(
    self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: Any = False, allow_rhs_ptr: Any = False,
    arithmetic_check: Any = True, div_or_mod: Any = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Numbers of one type are promoted to it, except by divisions, where halves are not."""
    if type(lhs) is tl.tensor and type(rhs) is tl.tensor and not div_or_mod:
        kind = lhs.dtype
        if kind is rhs.dtype and type(kind) is tl.dtype:
            return _broadcast(self, lhs, rhs)
    return _stock_checked(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _bind(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As the stock one; it makes a copy of the keywords at each call, and what it wraps looks for what it has given."""
    inner = getattr(member, "__wrapped__", member)

    def bound(*args: Any, member: Any = inner, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, bound)


# ----------------------------------------------------------------------------------------------------------- bounds

_ranges: list[tuple[int, int]] = []


def _arguments(self: Any, args: Any, kwargs: Any) -> Any:
    made = _stock_arguments(self, args, kwargs)
    _ranges.clear()
    for arg in (*made[0], *made[1].values()):
        if hasattr(arg, "data_ptr"):
            storage = interpreter._unwrap_tensor(arg).untyped_storage()
            _ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return made


def _check(what: str, pointers: Handle, mask: Handle | None) -> None:
    address = pointers.data
    if mask is not None:
        address, open_ = np.broadcast_arrays(address, mask.data)
        address = address[open_]
    size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
    inside = np.zeros(address.shape, bool)
    for low, high in _ranges:
        inside |= (address >= np.uint64(low)) & (address + size <= np.uint64(high))
    if not inside.all():
        at = interpreter.interpreter_builder.grid_idx
        raise OutOfBounds(f"{what} of {int((~inside).sum())} of {inside.size} lanes in program {at}")


def _load(self: Builder, pointers: Handle, mask: Handle, *args: Any, **kwargs: Any) -> Handle:
    _check("load", pointers, mask)
    return _stock_load(self, pointers, mask, *args, **kwargs)


def _store(self: Builder, pointers: Handle, value: Handle, mask: Handle, *args: Any, **kwargs: Any) -> Any:
    _check("store", pointers, mask)
    return _stock_store(self, pointers, value, mask, *args, **kwargs)


def _atomic(self: Builder, op: Any, pointers: Handle, value: Handle, mask: Handle, *args: Any) -> Handle:
    _check("atomic operation", pointers, mask)
    return _stock_atomic(self, op, pointers, value, mask, *args)


# ---------------------------------------------------------------------------------------------------------- install

_stock_convert = interpreter._convert_float
_stock_binary, _stock_unary, _stock_cast = Builder.binary_op, Builder.unary_op, Builder.cast_impl
_stock_load, _stock_store = Builder.create_masked_load, Builder.create_masked_store
_stock_atomic = Builder.create_atomic_rmw
_stock_reduce = interpreter.ReduceOps.apply_impl
_stock_run = interpreter.GridExecutor.__call__
_stock_arguments = interpreter.GridExecutor._init_args_hst
_stock_patch_tensor = interpreter._patch_lang_tensor
_stock_patch, _stock_numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
_stock_block_type, _stock_tensor = tl.block_type.__init__, tl.tensor.__init__
_stock_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
_stock_unwrap, _stock_same = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
_stock_broadcast = TritonSemantic.broadcast_impl_value
_stock_checked = TritonSemantic.binary_op_type_checking_impl
_PLAIN = frozenset({tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None)})

_CASTS = ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc")
_OURS: tuple[tuple[Any, str, Any], ...] = (
    (interpreter, "_convert_float", convert),
    (Builder, "binary_op", _binary),
    (Builder, "unary_op", _unary),
    (Builder, "cast_impl", _cast),
    (Builder, "create_fma", _fma),
    (Builder, "create_dot", _dot),
    (Builder, "get_bf16", lambda self, value: Handle(_narrow(np.array([value])), tl.bfloat16)),
    (Builder, "create_masked_load", _load),
    (Builder, "create_masked_store", _store),
    (Builder, "create_atomic_rmw", _atomic),
    (interpreter.ReduceOps, "apply_impl", _reduce),
    (interpreter.GridExecutor, "_init_args_hst", _arguments),
    (interpreter.GridExecutor, "__call__", _run),
    (interpreter, "_patch_lang", _patch),
    (interpreter, "_patch_lang_tensor", _patch_tensor),
    (interpreter, "_get_np_dtype", _numpy_type),
    (TritonSemantic, "binary_op_sanitize_overflow_impl", _overflow),
    (tl.block_type, "__init__", _block_type),
    (tl.tensor, "__init__", _tensor),
    (tl.dtype, "__eq__", _same),
    (tl.core, "_unwrap_if_constexpr", _unwrap),
    (Handle, "__init__", _handle),
    (TritonSemantic, "broadcast_impl_value", _broadcast),
    (TritonSemantic, "binary_op_type_checking_impl", _checked),
    (interpreter, "_patch_attr", _bind),
    # The stock class bound these to its own cast when it was made.
    *(
        (Builder, f"create_{name}", lambda self, source, target: self.cast_impl(source, target))
        for name in _CASTS
    ),
)


def install() -> None:
    """Replace what is wrong, for the whole process. Triton must have been imported under ``TRITON_INTERPRET=1``."""
    for owner, name, ours in _OURS:
        setattr(owner, name, ours)

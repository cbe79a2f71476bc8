"""Arithmetic, comparisons and conversions: each opcode a function of numpy arrays, chosen once per instruction.

``operation(op)`` gives ``(types of the operands, type of the result, function)``. Approximate instructions compute exactly, then
move by a pseudo-random amount within the error that the PTX ISA allows them, so that no test rests on exactness.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from .convert import (
    E2M1,
    E4M3,
    E5M2,
    bf16_bits,
    bf16_values,
    f16_bits,
    f16_values,
    flush,
    fma32,
    fma64,
    small_bits,
)

__all__ = ["SIGNED", "UNSIGNED", "Operation", "dtype_of", "operation"]

Operation = tuple[tuple[str, ...], str, Callable[..., np.ndarray]]

SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""numpy's integers by their bytes."""
_FLOAT = {2: np.float16, 4: np.float32, 8: np.float64}


@functools.cache
def dtype_of(kind: str) -> type:
    """numpy's type of a PTX type; packed and small floats are bits."""
    if kind == "pred":
        return np.bool_
    match = re.fullmatch(r"([subf])(\d+)", kind)
    if match:
        return {"s": SIGNED, "f": _FLOAT}.get(match.group(1), UNSIGNED)[int(match.group(2)) // 8]
    return {
        "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32, "f32x2": np.uint64,
        "e2m1x2": np.uint8, "e4m3x2": np.uint16, "e5m2x2": np.uint16,
    }[kind]  # fmt: skip


def _pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def _split(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (word & np.uint32(0xFFFF)).astype(np.uint16), (word >> np.uint32(16)).astype(np.uint16)


def _packed(function: Callable[..., np.ndarray], kind: str) -> Callable[..., np.ndarray]:
    """A function of fp32 numbers, half by half on packed halves. One rounding to fp32 and one to 16 bits are one to 16 bits:

    sums and products of two 11-bit numbers, rounded to 24 >= 2 * 11 + 2 bits first, round as if done once.
    """
    values, bits = (f16_values, f16_bits) if kind == "f16x2" else (bf16_values, bf16_bits)

    def run(*words: np.ndarray) -> np.ndarray:
        halves = [_split(np.asarray(word)) for word in words]
        return _pair(*(bits(function(*(values(half[i]) for half in halves))) for i in (0, 1)))

    return run


def _noise(x: np.ndarray) -> np.ndarray:
    """-1, 0 or 1 by the bits of a number: the same error every time, and none that averages out."""
    bits = x.view(np.uint32)
    return (((bits * np.uint32(2654435761)) >> np.uint32(20)) % np.uint32(3)).astype(np.float64) - 1


def _approximate(function: Callable[[np.ndarray], np.ndarray], relative: float, absolute: float = 0.0):
    def run(x: np.ndarray) -> np.ndarray:
        exact = function(x.astype(np.float64))
        noise = _noise(x)
        return (exact * (1 + noise * relative) + noise * absolute).astype(np.float32)

    return run


# Errors by the PTX ISA: ex2 2^-22.5 relative (2 ulp), lg2 2^-22 absolute near 1 and relative elsewhere, rcp and rsqrt 1 ulp and
# 2^-22.9, tanh 2^-11.
_APPROXIMATE = {
    "ex2": _approximate(np.exp2, 2.0**-22.5),
    "lg2": _approximate(np.log2, 0.0, 2.0**-22),
    "rcp": _approximate(lambda x: 1 / x, 2.0**-23),
    "rsqrt": _approximate(lambda x: 1 / np.sqrt(x), 2.0**-22.9),
    "tanh": _approximate(np.tanh, 2.0**-11),
    "sin": _approximate(np.sin, 0.0, 2.0**-20.5),
    "cos": _approximate(np.cos, 0.0, 2.0**-20.5),
    "sqrt": _approximate(np.sqrt, 2.0**-23),
}
_UNIVERSAL = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "fma": lambda a, b, c: a * b + c,
}
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@functools.cache
def operation(op: tuple[str, ...]) -> Operation | None:
    """What ``op`` does, or None for what the machine itself has to do (memory, control, lanes)."""
    name, kind = op[0], op[-1]
    if name == "cvt":
        return _conversion(op)
    if name in (
        "add",
        "sub",
        "mul",
        "fma",
        "neg",
        "abs",
        "min",
        "max",
        "mad",
        "div",
        "rem",
        "mul24",
        "mad24",
    ):
        return _arithmetic(op)
    if name in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos"):
        return _special(op)
    if name == "setp":
        return _comparison(op)
    if name == "selp":
        return (kind, kind, "pred"), kind, lambda a, b, p: np.where(p, a, b)
    if name in _LOGIC:
        return (kind, kind), kind, _LOGIC[name]
    if name == "not":
        return (kind,), kind, np.logical_not if kind == "pred" else np.invert
    if name == "cvta":
        return (kind,), kind, lambda a: a
    if name in ("shl", "shr"):
        return (kind, "u32"), kind, lambda a, n: _shift(a, n, name, kind)
    return _bits(op)


def _shift(a: np.ndarray, n: np.ndarray, name: str, kind: str) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    step = np.minimum(n, width - 1).astype(a.dtype)
    if name == "shl":
        return np.where(n >= width, a.dtype.type(0), np.left_shift(a, step))
    moved = np.right_shift(a, step)
    return moved if kind[0] == "s" else np.where(n >= width, a.dtype.type(0), moved)


def _bits(op: tuple[str, ...]) -> Operation | None:
    name, kind = op[0], op[-1]
    if name == "lop3":
        return ("b32", "b32", "b32", "u32"), "b32", _lop3
    if name == "prmt":
        return ("b32", "b32", "b32"), "b32", _prmt
    if name == "shf":
        return ("b32", "b32", "u32"), "b32", lambda lo, hi, n: _funnel(lo, hi, n, op[1] == "l", "clamp" in op)
    if name == "bfe":
        return (kind, "u32", "u32"), kind, lambda a, at, n: _extract(a, at, n, kind)
    if name == "bfi":
        return ("b32", "b32", "u32", "u32"), "b32", _insert
    if name == "popc":
        return (kind,), "u32", lambda a: np.bitwise_count(a).astype(np.uint32)
    if name == "clz":
        return (kind,), "u32", _leading_zeros
    if name in ("dp2a", "dp4a") and op[-2:] == ("u32", "u32"):
        return ("u32", "u32", "u32"), "u32", lambda a, b, c: _dot(a, b, c, name, "hi" in op)
    if name == "copysign":
        return (kind, kind), kind, lambda sign, a: np.copysign(a, sign)
    if name == "testp" and op[1] in ("finite", "infinite", "notanumber"):
        test = {"finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan}[op[1]]
        return (kind,), "pred", test
    return None


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    out = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for i in range(8):
        if int(np.asarray(table).reshape(-1)[0]) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four of eight bytes, little-endian, chosen by nibbles; with bit 3 of a nibble only the sign of the byte, eight times."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    eight = np.stack([a, b], -1).view(np.uint8)
    nibble = (selector[..., None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
    byte = np.take_along_axis(eight, (nibble & np.uint32(7)).astype(np.int64), -1)
    if (nibble > 7).any():
        byte = np.where(nibble > 7, (byte >> np.uint8(7)) * np.uint8(255), byte)
    return np.ascontiguousarray(byte).view(np.uint32)[..., 0]


def _funnel(lo: np.ndarray, hi: np.ndarray, n: np.ndarray, left: bool, clamp: bool) -> np.ndarray:
    n = np.minimum(n, 32) if clamp else n & np.uint32(31)
    both = lo.astype(np.uint64) | (hi.astype(np.uint64) << np.uint64(32))
    n = n.astype(np.uint64)
    return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)


def _extract(a: np.ndarray, at: np.ndarray, n: np.ndarray, kind: str) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    at, n = (at & np.uint32(0xFF)).astype(np.int64), (n & np.uint32(0xFF)).astype(np.int64)
    wide = a.view(UNSIGNED[width // 8]).astype(np.uint64)
    got = np.where(at < width, wide >> np.minimum(at, 63).astype(np.uint64), 0)
    got = (
        got & ((np.uint64(1) << np.minimum(n, 63).astype(np.uint64)) - np.uint64(1))
        if (n < 64).all()
        else got
    )
    if kind[0] == "s":
        top = np.minimum(at + n - 1, width - 1)
        sign = (wide >> np.maximum(top, 0).astype(np.uint64)) & np.uint64(1)
        fill = ~((np.uint64(1) << np.minimum(n, 63).astype(np.uint64)) - np.uint64(1))
        got = np.where((sign == 1) & (n > 0), got | fill, got)
    return got.astype(UNSIGNED[width // 8]).view(a.dtype)


def _dot(a: np.ndarray, b: np.ndarray, c: np.ndarray, name: str, high: bool) -> np.ndarray:
    """``c`` plus a product of vectors in words: two halves of ``a`` and two bytes of ``b``, or four bytes of each."""
    out = c.astype(np.uint32)
    for i in range(2 if name == "dp2a" else 4):
        width = 16 if name == "dp2a" else 8
        left = (a >> np.uint32(width * i)) & np.uint32((1 << width) - 1)
        right = (b >> np.uint32(8 * (i + (2 if high else 0)))) & np.uint32(0xFF)
        out = out + left * right
    return out


def _insert(a: np.ndarray, b: np.ndarray, at: np.ndarray, n: np.ndarray) -> np.ndarray:
    at, n = (at & np.uint32(0xFF)).astype(np.uint64), (n & np.uint32(0xFF)).astype(np.uint64)
    mask = (((np.uint64(1) << n) - np.uint64(1)) << at).astype(np.uint32)
    return ((a.astype(np.uint64) << at).astype(np.uint32) & mask) | (b & ~mask)


def _leading_zeros(a: np.ndarray) -> np.ndarray:
    width = 8 * a.dtype.itemsize
    out = np.full(a.shape, width, np.uint32)
    for i in range(width):
        out = np.where((a >> a.dtype.type(i)) & a.dtype.type(1), np.uint32(width - 1 - i), out)
    return out


def _arithmetic(op: tuple[str, ...]) -> Operation:
    name, kind = op[0], op[-1]
    count = {"neg": 1, "abs": 1, "fma": 3, "mad": 3, "mad24": 3}.get(name, 2)
    kinds = (kind,) * count
    if kind in ("f16x2", "bf16x2", "f16", "bf16"):
        return _halves(op, kinds)
    if kind == "f32x2":
        return kinds, kind, _two_floats(_float((*op[:-1], "f32")))
    if kind[0] == "f":
        function = _float(op)
        if "ftz" in op:
            return kinds, kind, lambda *a: flush(function(*(flush(np.asarray(x)) for x in a)))
        return kinds, kind, function
    if "wide" in op or "hi" in op:
        return _wide(op)
    if name in ("div", "rem"):
        return kinds, kind, lambda a, b: _divide(a, b, name)
    if name in ("min", "max"):
        return kinds, kind, np.minimum if name == "min" else np.maximum
    if name.startswith("mad"):
        return kinds, kind, lambda a, b, c: a * b + c
    return kinds, kind, _UNIVERSAL[name]


def _float(op: tuple[str, ...]) -> Callable[..., np.ndarray]:
    name, kind = op[0], op[-1]
    if name == "fma" and "rn" in op and kind in ("f32", "f64"):
        return fma32 if kind == "f32" else fma64
    if name in ("fma", "mad"):
        raise NotImplementedError(".".join(op))
    if name in ("min", "max"):
        if "NaN" in op:
            return np.minimum if name == "min" else np.maximum
        return np.fmin if name == "min" else np.fmax
    if name == "div":
        if "rn" in op:
            return np.divide
        exact = lambda a, b: (a.astype(np.float64) / b).astype(np.float32)  # noqa: E731
        return lambda a, b: (exact(a, b) * (1 + _noise(b) * 2.0**-22)).astype(np.float32)
    if any(mode in op for mode in ("rz", "rm", "rp")):
        raise NotImplementedError(".".join(op))
    return _UNIVERSAL[name]


def _two_floats(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """A function of fp32 numbers on two of them in 64 bits."""

    def run(*words: np.ndarray) -> np.ndarray:
        numbers = (np.ascontiguousarray(word).view(np.float32).reshape(-1, 2) for word in words)
        return np.ascontiguousarray(function(*numbers)).view(np.uint64)[:, 0]

    return run


def _halves(op: tuple[str, ...], kinds: tuple[str, ...]) -> Operation:
    name, kind = op[0], op[-1]
    packed = kind if kind.endswith("x2") else f"{kind}x2"
    if name == "fma":
        # Not one of two roundings: the float64 sum of a product of 11-bit numbers is exact unless exponents are far apart.
        function = lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32)  # noqa: E731
    else:
        function = _float((name, *op[1:-1], "f32"))
    run = _packed(function, packed)
    if kind == packed:
        return kinds, kind, run
    return (
        ("b16",) * len(kinds),
        "b16",
        lambda *a: (run(*(x.astype(np.uint32) for x in a)) & 0xFFFF).astype(np.uint16),
    )


def _wide(op: tuple[str, ...]) -> Operation:
    name, kind = op[0], op[-1]
    width = int(kind[1:])
    if width == 64:
        if name != "mul" or "hi" not in op:
            raise NotImplementedError(".".join(op))
        return (kind, kind), kind, lambda a, b: _upper_half(a, b, kind)
    double = f"{kind[0]}{2 * width}"
    big = dtype_of(double)
    if "hi" in op:
        high = lambda a, b: ((a.astype(big) * b.astype(big)) >> big(width)).astype(dtype_of(kind))  # noqa: E731
        if name == "mad":
            return (kind, kind, kind), kind, lambda a, b, c: high(a, b) + c
        return (kind, kind), kind, high
    if name == "mad":
        return (kind, kind, double), double, lambda a, b, c: a.astype(big) * b.astype(big) + c
    return (kind, kind), double, lambda a, b: a.astype(big) * b.astype(big)


def _upper_half(a: np.ndarray, b: np.ndarray, kind: str) -> np.ndarray:
    """The upper 64 bits of a product of 64-bit integers, by halves of 32 bits."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    a0, a1, b0, b1 = x & low, x >> half, y & low, y >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    upper = a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half)
    if kind == "s64":  # a negative number was read as 2**64 more
        upper = upper - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return upper.view(a.dtype)


def _divide(a: np.ndarray, b: np.ndarray, name: str) -> np.ndarray:
    """Truncating, as in C; by zero whatever."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = np.floor_divide(a, safe)
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0)))
        quotient = quotient.astype(a.dtype)
    return quotient if name == "div" else (a - quotient * safe).astype(a.dtype)


def _special(op: tuple[str, ...]) -> Operation:
    name, kind = op[0], op[-1]
    if kind != "f32" and not (kind == "f64" and "rn" in op):
        raise NotImplementedError(".".join(op))
    if "rn" in op:
        exact = {"sqrt": np.sqrt, "rcp": lambda x: x.dtype.type(1) / x}[name]
        return (kind,), kind, exact
    function = _APPROXIMATE[name]
    if "ftz" in op:
        return (kind,), kind, lambda x: flush(function(flush(x)))
    return (kind,), kind, function


def _comparison(op: tuple[str, ...]) -> Operation:
    test, kind = op[1], op[-1]
    join = next((part for part in op[2:-1] if part in _LOGIC), None)

    def compare(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if kind[0] != "f":
            return _COMPARE[test](a, b)
        unordered = np.isnan(a) | np.isnan(b)
        if test in ("nan", "num"):
            return unordered if test == "nan" else ~unordered
        if test.endswith("u") and test[:-1] in _COMPARE:
            return _COMPARE[test[:-1]](a, b) | unordered
        return _COMPARE[test](a, b) & ~unordered

    if join:
        return (kind, kind, "pred"), "pred", lambda a, b, p: _LOGIC[join](compare(a, b), p)
    return (kind, kind), "pred", compare


_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _conversion(op: tuple[str, ...]) -> Operation:
    to, kind = op[-2], op[-1]
    if any(part in ("rz", "rm", "rp", "rs", "rna", "relu", "ftz", "sat") for part in op):
        raise NotImplementedError(".".join(op))
    small = {"e2m1x2": "e2m1", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}
    if to in small and kind == "f32":  # the first operand goes to the upper half
        if "satfinite" not in op or "rn" not in op:
            raise NotImplementedError(".".join(op))
        shift = 4 if to == "e2m1x2" else 8
        as_type = dtype_of(to)

        def narrow(high: np.ndarray, low: np.ndarray) -> np.ndarray:
            return small_bits(low, small[to]).astype(as_type) | (
                small_bits(high, small[to]).astype(as_type) << as_type(shift)
            )

        return ("f32", "f32"), "b8" if to == "e2m1x2" else "b16", narrow
    if kind in small and to == "f16x2":
        table = {"e2m1x2": E2M1, "e4m3x2": E4M3, "e5m2x2": E5M2}[kind]
        halves = f16_bits(table)
        bits = 4 if kind == "e2m1x2" else 8
        mask = (1 << bits) - 1
        return (
            ("b8" if bits == 4 else "b16",),
            "b32",
            lambda v: _pair(halves[v & mask], halves[(v >> bits) & mask]),
        )
    if to in ("bf16x2", "f16x2") and kind == "f32":
        if "rn" not in op:
            raise NotImplementedError(".".join(op))
        bits16 = bf16_bits if to == "bf16x2" else f16_bits
        return ("f32", "f32"), "b32", lambda high, low: _pair(bits16(low), bits16(high))
    values = {"bf16": bf16_values, "f16": f16_values, "f32": lambda x: x, "f64": lambda x: x}
    if kind in values and to in ("bf16", "f16", "f32", "f64"):
        source = "b16" if kind in ("bf16", "f16") else kind
        target = "b16" if to in ("bf16", "f16") else to
        if to == kind and any(part in _ROUND for part in op):  # to a whole number
            whole = _ROUND[next(part for part in op if part in _ROUND)]
            if to in ("f16", "bf16") or "sat" in op:
                raise NotImplementedError(".".join(op))
            return (source,), target, whole
        pack = {
            "bf16": bf16_bits,
            "f16": f16_bits,
            "f32": lambda x: x.astype(np.float32),
            "f64": lambda x: x.astype(np.float64),
        }
        return (source,), target, lambda x: pack[to](values[kind](x))
    if kind in values and to[0] in "su":
        source = "b16" if kind in ("bf16", "f16") else kind
        rounding = _ROUND[next(part for part in op if part in _ROUND)]
        limits = np.iinfo(dtype_of(to))

        def integer(x: np.ndarray) -> np.ndarray:
            whole = rounding(np.nan_to_num(values[kind](x).astype(np.float64), nan=0.0))
            if limits.bits == 64:
                whole = np.clip(whole, float(limits.min), np.nextafter(float(limits.max), 0))
            return np.clip(whole, limits.min, limits.max).astype(dtype_of(to))

        return (source,), to, integer
    if to in ("f16", "bf16"):
        pack16 = f16_bits if to == "f16" else bf16_bits
        return (kind,), "b16", lambda x: pack16(x.astype(np.float32))
    if kind[0] in "sub" and (to[0] in "sub" or to in ("f32", "f64")):
        if "sat" in op:
            raise NotImplementedError(".".join(op))
        target = dtype_of(to)
        return (kind,), to, lambda x: x.astype(target)
    raise NotImplementedError(".".join(op))

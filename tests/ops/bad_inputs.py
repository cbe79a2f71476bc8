"""Inputs that every operator must refuse, with the class of the error, and a store to try them on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kvq_ops
from kvq_ops import errors, registry
from kvq_ops.formats import get_format

B, HQ, HKV, T, D = 2, 4, 2, 8, 16
NAME = "int8_per_token_head"


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape or (B, HKV, 1, D), device=device).to(dtype)


def at(*positions: int) -> Tensor:
    return torch.tensor(positions)


def append(store: list[Tensor], position: Tensor, new: Tensor, name: str = NAME) -> None:
    kvq_ops.append_(store, position, new, name)


def attend(store: list[Tensor], query: Tensor | None = None, **options: Any) -> Tensor:
    query = x(B, HQ, 1, D) if query is None else query
    values = options.pop("values", store)
    value_name = options.pop("value_name", NAME)
    return kvq_ops.attention(query, store, values, NAME, value_name, **options)


def replaced(store: list[Tensor], plane: int, tensor: Tensor) -> list[Tensor]:
    return [tensor if i == plane else p for i, p in enumerate(store)]


Call = Callable[[list[Tensor]], Any]

# What is wrong: the class, and a call on a store of NAME that holds 5 of 8 tokens.
BAD: dict[str, tuple[type[errors.KVQError], Call]] = {
    # values
    "quantize integers": (
        errors.DtypeError,
        lambda s: kvq_ops.quantize(torch.ones(B, HKV, 1, D, dtype=torch.int32), NAME),
    ),
    "quantize float64": (errors.DtypeError, lambda s: kvq_ops.quantize(x().double(), NAME)),
    "quantize complex": (errors.DtypeError, lambda s: kvq_ops.quantize(x().to(torch.complex64), NAME)),
    "quantize three axes": (errors.ShapeError, lambda s: kvq_ops.quantize(x()[0], NAME)),
    "quantize no channels": (errors.HeadDimError, lambda s: kvq_ops.quantize(x()[..., :0], NAME)),
    "quantize odd head_dim, int4": (
        errors.HeadDimError,
        lambda s: kvq_ops.quantize(x(B, HKV, 1, 15), "int4_group32"),
    ),
    "quantize odd head_dim, nvfp4": (
        errors.HeadDimError,
        lambda s: kvq_ops.quantize(x(B, HKV, 1, 15), "nvfp4"),
    ),
    "plan odd head_dim": (errors.HeadDimError, lambda s: get_format("nvfp4").nbytes(1, 1, 1, 33)),
    "allocate odd head_dim": (
        errors.HeadDimError,
        lambda s: get_format("int4_group64").empty_store(1, 1, 1, 33),
    ),
    "dequantize to integers": (errors.DtypeError, lambda s: kvq_ops.dequantize(s, NAME, torch.int32)),
    "dequantize to float8": (errors.DtypeError, lambda s: kvq_ops.dequantize(s, NAME, torch.float8_e4m3fn)),
    "dequantize to bool": (errors.DtypeError, lambda s: kvq_ops.dequantize(s, NAME, torch.bool)),
    # formats
    "unknown format": (errors.UnknownFormatError, lambda s: kvq_ops.quantize(x(), "int8_per_tokn")),
    "unknown format of attention": (errors.UnknownFormatError, lambda s: attend(s, value_name="int9")),
    "a pair where one is wanted": (
        errors.FormatError,
        lambda s: append(s, at(5), x(), f"key={NAME},value={NAME}"),
    ),
    "a group that is no multiple of 8": (errors.UnknownFormatError, lambda s: get_format("int4_group12")),
    "a group beyond 1024": (errors.UnknownFormatError, lambda s: get_format("int4_group2048")),
    "a padded group": (errors.UnknownFormatError, lambda s: get_format("int4_group032")),
    "pair without value": (errors.FormatError, lambda s: kvq_ops.parse_kv_format("key=none")),
    "pair with a side twice": (errors.FormatError, lambda s: kvq_ops.parse_kv_format("key=none,key=none")),
    "pair with three sides": (
        errors.FormatError,
        lambda s: kvq_ops.parse_kv_format("key=none,value=none,value=none"),
    ),
    "pair with other sides": (errors.FormatError, lambda s: kvq_ops.parse_kv_format("k=none,v=none")),
    "pair without comma": (errors.FormatError, lambda s: kvq_ops.parse_kv_format("key=none value=none")),
    "pair with an empty side": (
        errors.UnknownFormatError,
        lambda s: kvq_ops.parse_kv_format("key=none,value="),
    ),
    "pair with a bad name": (
        errors.UnknownFormatError,
        lambda s: kvq_ops.parse_kv_format("key=none,value=nvfp5"),
    ),
    "two names": (errors.FormatError, lambda s: kvq_ops.parse_kv_format("none,none")),
    "no name": (errors.UnknownFormatError, lambda s: kvq_ops.parse_kv_format("")),
    "a format that is a number": (errors.FormatError, lambda s: kvq_ops.parse_kv_format(8)),  # type: ignore[arg-type]
    "a name that is taken": (
        errors.FormatError,
        lambda s: kvq_ops.register_format(kvq_ops.Format("nvfp4", "exact", 0, get_format("none").planes)),
    ),
    "a codec that is taken": (
        errors.FormatError,
        lambda s: kvq_ops.codecs.register_codec("exact", kvq_ops.codecs.integer),
    ),
    # positions
    "full cache": (errors.CapacityError, lambda s: append(s, at(T), x())),
    "last token beyond the end": (errors.CapacityError, lambda s: append(s, at(6, 7, 8), x(B, HKV, 3, D))),
    "negative position": (errors.CapacityError, lambda s: append(s, at(-1), x())),
    "one row beyond the end": (errors.CapacityError, lambda s: append(s, at(3, 8).view(2, 1), x())),
    "positions in float": (errors.DtypeError, lambda s: append(s, torch.tensor([5.0]), x())),
    "too many positions": (errors.ShapeError, lambda s: append(s, at(5, 6), x())),
    "positions for too many rows": (errors.ShapeError, lambda s: append(s, at(5, 5, 5).view(3, 1), x())),
    "position without axes": (errors.ShapeError, lambda s: append(s, torch.tensor(5), x())),
    # what is appended
    "append other batch": (errors.ShapeError, lambda s: append(s, at(5), x(1, HKV, 1, D))),
    "append other heads": (errors.ShapeError, lambda s: append(s, at(5), x(B, HQ, 1, D))),
    "append other head_dim": (errors.ShapeError, lambda s: append(s, at(5), x(B, HKV, 1, 2 * D))),
    "append float64": (errors.DtypeError, lambda s: append(s, at(5), x().double())),
    "append three axes": (errors.ShapeError, lambda s: append(s, at(5), x()[:, 0])),
    "append from another device": (errors.DeviceError, lambda s: append(s, at(5), x(device="meta"))),
    "position on another device": (errors.DeviceError, lambda s: append(s, at(5).to("meta"), x())),
    "append half to an exact float cache": (
        errors.DtypeError,
        lambda s: append(get_format("none").empty_store(B, HKV, T, D), at(5), x(dtype=torch.float16), "none"),
    ),
    # stores
    "a plane is missing": (errors.CorruptStoreError, lambda s: kvq_ops.dequantize(s[:-1], NAME)),
    "a plane too many": (errors.CorruptStoreError, lambda s: append([*s, s[0]], at(5), x())),
    "no planes": (errors.CorruptStoreError, lambda s: kvq_ops.dequantize([], NAME)),
    "planes swapped": (errors.CorruptStoreError, lambda s: append([s[1], s[0], s[2]], at(5), x())),
    "codes without an axis": (
        errors.CorruptStoreError,
        lambda s: kvq_ops.dequantize(replaced(s, 0, s[0][0]), NAME),
    ),
    "scale of other tokens": (
        errors.CorruptStoreError,
        lambda s: append(replaced(s, 1, s[1][:, :, :-1]), at(5), x()),
    ),
    "scale of other dtype": (
        errors.CorruptStoreError,
        lambda s: append(replaced(s, 1, s[1].half()), at(5), x()),
    ),
    "codes of other dtype": (errors.CorruptStoreError, lambda s: attend(replaced(s, 0, s[0].int()))),
    "length of other batch": (errors.CorruptStoreError, lambda s: attend(replaced(s, 2, s[2][:1]))),
    "length in int32": (errors.CorruptStoreError, lambda s: attend(replaced(s, 2, s[2].int()))),
    "a store of another format": (errors.CorruptStoreError, lambda s: append(s, at(5), x(), "int4_group32")),
    "values of another format": (errors.CorruptStoreError, lambda s: attend(s, value_name="fp8_e4m3")),
    "scale of a plane on another device": (
        errors.DeviceError,
        lambda s: attend(replaced(s, 1, s[1].to("meta"))),
    ),
    # attention
    "query float64": (errors.DtypeError, lambda s: attend(s, x(B, HQ, 1, D).double())),
    "query three axes": (errors.ShapeError, lambda s: attend(s, x(HQ, 1, D))),
    "query of other batch": (errors.ShapeError, lambda s: attend(s, x(1, HQ, 1, D))),
    "query of other head_dim": (errors.ShapeError, lambda s: attend(s, x(B, HQ, 1, 2 * D))),
    "query heads no multiple": (errors.ShapeError, lambda s: attend(s, x(B, 3, 1, D))),
    "query heads without kv heads": (
        errors.ShapeError,
        lambda s: attend(get_format(NAME).empty_store(B, 0, T, D)),
    ),
    "query on another device": (errors.DeviceError, lambda s: attend(s, x(B, HQ, 1, D, device="meta"))),
    "values of other length": (
        errors.ShapeError,
        lambda s: attend(s, values=kvq_ops.quantize(x(B, HKV, T - 1, D), NAME)),
    ),
    "values of other heads": (
        errors.ShapeError,
        lambda s: attend(s, values=kvq_ops.quantize(x(B, 1, T, D), NAME)),
    ),
    "integer mask": (errors.DtypeError, lambda s: attend(s, mask=torch.ones(T, dtype=torch.int64))),
    "mask of other tokens": (errors.ShapeError, lambda s: attend(s, mask=torch.ones(5, dtype=torch.bool))),
    "mask of other batch": (errors.ShapeError, lambda s: attend(s, mask=torch.zeros(3, 1, 1, T))),
    "mask of five axes": (errors.ShapeError, lambda s: attend(s, mask=torch.zeros(1, 1, 1, 1, T))),
    "mask on another device": (errors.DeviceError, lambda s: attend(s, mask=torch.zeros(T, device="meta"))),
    "sinks for kv heads": (errors.ShapeError, lambda s: attend(s, sinks=torch.zeros(HKV))),
    "sinks with another axis": (errors.ShapeError, lambda s: attend(s, sinks=torch.zeros(HQ, 1))),
    "integer sinks": (errors.DtypeError, lambda s: attend(s, sinks=torch.zeros(HQ, dtype=torch.int64))),
    "negative window": (errors.ShapeError, lambda s: attend(s, window=-1)),
    "negative softcap": (errors.ShapeError, lambda s: attend(s, softcap=-1.0)),
    "softcap NaN": (errors.ShapeError, lambda s: attend(s, softcap=math.nan)),
    "softcap infinite": (errors.ShapeError, lambda s: attend(s, softcap=math.inf)),
}


def with_grad(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def grads(name: str = "none") -> dict[str, Call]:
    return {
        "quantize": lambda s: kvq_ops.quantize(with_grad(x()), NAME),
        "quantize exactly": lambda s: kvq_ops.quantize(with_grad(x()), "none"),
        "append": lambda s: append(s, at(5), with_grad(x())),
        "query": lambda s: attend(s, with_grad(x(B, HQ, 1, D))),
        "mask": lambda s: attend(s, mask=with_grad(torch.zeros(T))),
        "sinks": lambda s: attend(s, sinks=with_grad(torch.zeros(HQ))),
        "scale of the keys": lambda s: attend(replaced(s, 1, with_grad(s[1])), values=s),
        "scale of the values": lambda s: attend(s, values=replaced(s, 1, with_grad(s[1]))),
        "dequantize": lambda s: kvq_ops.dequantize(replaced(s, 1, with_grad(s[1])), NAME),
    }


BAD.update({f"gradient through {k}": (errors.GradientError, call) for k, call in grads().items()})


def _checked(value: float) -> Call:
    def call(s: list[Tensor]) -> None:
        bad = x()
        bad[0, 0, 0, 0] = value
        with kvq_ops.checked():
            append(s, at(5), bad)

    return call


def _checked_quantize(s: list[Tensor]) -> None:
    with kvq_ops.checked():
        kvq_ops.quantize(torch.full((1, 1, 1, D), math.nan), NAME)


def _forced(name: str, call: Call) -> Call:
    def run(s: list[Tensor]) -> None:
        with registry.use_implementation(name):
            call(s)

    return run


BAD.update(
    {
        "checked mode, NaN": (errors.NonFiniteError, _checked(math.nan)),
        "checked mode, infinity": (errors.NonFiniteError, _checked(math.inf)),
        "checked mode, negative infinity": (errors.NonFiniteError, _checked(-math.inf)),
        "checked mode, quantize": (errors.NonFiniteError, _checked_quantize),
        "an implementation that does not exist": (
            errors.ImplementationError,
            _forced("trition", lambda s: None),
        ),
    }
)


def new_store() -> list[Tensor]:
    store = get_format(NAME).empty_store(B, HKV, T, D)
    append(store, torch.arange(5), x(B, HKV, 5, D))
    return store

"""Every bad input: the class from the catalogue, a message of four parts, and a store that lost nothing."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import errors, registry
from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.checks import LISTED

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


def _with_grad(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_()


def _grads(name: str = "none") -> dict[str, Call]:
    return {
        "quantize": lambda s: kvq_ops.quantize(_with_grad(x()), NAME),
        "quantize exactly": lambda s: kvq_ops.quantize(_with_grad(x()), "none"),
        "append": lambda s: append(s, at(5), _with_grad(x())),
        "query": lambda s: attend(s, _with_grad(x(B, HQ, 1, D))),
        "mask": lambda s: attend(s, mask=_with_grad(torch.zeros(T))),
        "sinks": lambda s: attend(s, sinks=_with_grad(torch.zeros(HQ))),
        "scale of the keys": lambda s: attend(replaced(s, 1, _with_grad(s[1])), values=s),
        "scale of the values": lambda s: attend(s, values=replaced(s, 1, _with_grad(s[1]))),
        "dequantize": lambda s: kvq_ops.dequantize(replaced(s, 1, _with_grad(s[1])), NAME),
    }


BAD.update({f"gradient through {k}": (errors.GradientError, call) for k, call in _grads().items()})


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


def assert_good_message(error: errors.KVQError) -> None:
    for part in ("asked", "got", "allowed", "do"):
        assert getattr(error, part), f"{type(error).__name__} says nothing under {part!r}: {error}"
    lines = str(error).split("\n")
    assert lines[0] == error.asked
    assert [line[:11] for line in lines[1:]] == ["  got:     ", "  allowed: ", "  do:      "]
    for text in (error.got, error.allowed, error.do):
        assert text in str(error)


def assert_survives_pickling(error: errors.KVQError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error) and str(again) == str(error)
        assert (again.asked, again.got, again.allowed, again.do) == (
            error.asked,
            error.got,
            error.allowed,
            error.do,
        )


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    kind, call = BAD[what]
    store = new_store()
    before, versions = checks.copy(store), [p._version for p in store]
    with pytest.raises(kind) as caught:
        call(store)
    assert type(caught.value) is kind
    assert_good_message(caught.value)
    assert_survives_pickling(caught.value)
    checks.assert_same_planes(store, before, get_format(NAME), "lost something")
    assert [p._version for p in store] == versions
    # The store goes on working.
    append(store, at(5), x())
    assert store[-1].tolist() == [6, 6]


BUILTINS = {
    "ShapeError": ValueError,
    "DtypeError": TypeError,
    "CapacityError": IndexError,
    "GradientError": RuntimeError,
    "FormatError": ValueError,
    "UnsupportedWriteError": NotImplementedError,
}


def test_the_catalogue() -> None:
    classes = [getattr(errors, n) for n in errors.__all__ if n != "near_names"]
    assert all(issubclass(c, errors.KVQError) for c in classes)
    for name, builtin in BUILTINS.items():
        assert issubclass(getattr(errors, name), builtin)
    for c in classes:
        assert_survives_pickling(c("asked", got="got", allowed="allowed", do="do"))
        assert str(c("asked")) == "asked", "an empty part leaves no line"


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("int8_per_tokn", "int8_per_token_head"),
        ("int8", "int8_per_token_head"),
        ("fp8_e4m3fn", "fp8_e4m3"),
        ("nvpf4", "nvfp4"),
        ("int4_group12", "int4_group32"),
        ("FP8_E4M3", "fp8_e4m3"),
    ],
)
def test_unknown_formats_name_the_near_ones(asked: str, near: str) -> None:
    with pytest.raises(errors.UnknownFormatError) as caught:
        kvq_ops.get_format(asked)
    assert repr(asked) in str(caught.value) and near in caught.value.allowed


def test_a_name_far_from_all_lists_all() -> None:
    with pytest.raises(errors.UnknownFormatError) as caught:
        kvq_ops.get_format("zzz")
    assert all(name in caught.value.allowed for name in LISTED)


def test_messages_hold_the_numbers() -> None:
    store = new_store()
    with pytest.raises(errors.CapacityError, match=r"(?s)3 token.*6\.\.8.*0\.\.7.*holds 8"):
        append(store, at(6, 7, 8), x(B, HKV, 3, D))
    with pytest.raises(errors.NonFiniteError, match="1 NaN and 2 infinite"), kvq_ops.checked():
        kvq_ops.quantize(torch.tensor([math.nan, math.inf, -math.inf, 1.0]).view(1, 1, 1, 4), NAME)
    with pytest.raises(errors.CorruptStoreError, match="plane 'scale'"):
        kvq_ops.dequantize(replaced(store, 1, store[1].half()), NAME)
    with pytest.raises(errors.CorruptStoreError, match=r"2 planes.*\n.*3: codes, scale, length"):
        kvq_ops.dequantize(store[:2], NAME)


@pytest.mark.parametrize("name", LISTED)
def test_every_plane_is_checked(name: str) -> None:
    """A missing, narrowed or retyped plane is refused by every operator that reads it, whichever it is."""
    fmt = get_format(name)
    store = kvq_ops.quantize(x(B, HKV, T, D), name)
    for i, plane in enumerate(fmt.planes):
        retyped = store[i].to(torch.float64 if plane.dtype is None else torch.complex64)
        if plane.dtype is None:
            retyped = retyped.to(torch.int64)
        narrowed = store[i][..., :-1] if i else store[i][:-1]  # fewer rows than lengths
        for broken in (
            [p for j, p in enumerate(store) if j != i],
            replaced(store, i, retyped),
            replaced(store, i, narrowed),
        ):
            for call in (
                lambda s: kvq_ops.dequantize(s, name),
                lambda s: append(s, at(0), x(), name),
                lambda s: kvq_ops.attention(x(B, HQ, 1, D), s, store, name, name),
                lambda s: kvq_ops.attention(x(B, HQ, 1, D), store, s, name, name),
            ):
                with pytest.raises(errors.CorruptStoreError):
                    call(broken)


def test_checked_mode_is_off_by_default_and_comes_back() -> None:
    bad = torch.full((1, 1, 1, D), math.nan)
    kvq_ops.quantize(bad, NAME)
    with pytest.raises(errors.NonFiniteError), kvq_ops.checked():
        kvq_ops.quantize(bad, NAME)
    with kvq_ops.checked():
        with kvq_ops.checked(False):
            kvq_ops.quantize(bad, NAME)
        with pytest.raises(errors.NonFiniteError):
            kvq_ops.quantize(bad, NAME)
        kvq_ops.quantize(x(), NAME)
    kvq_ops.quantize(bad, NAME)


def test_no_grad_and_inference_mode_are_enough() -> None:
    store = new_store()
    for mode in (torch.no_grad, torch.inference_mode):
        for what, call in _grads().items():
            with mode():
                out = call(new_store() if mode is torch.no_grad else [p.clone() for p in store])
            for tensor in [out] if isinstance(out, Tensor) else out or []:
                assert not tensor.requires_grad, what


def test_gradients_are_refused_under_compile() -> None:
    """B5: never a gradient of None or zero in silence."""
    torch._dynamo.reset()
    store = new_store()
    compiled = torch.compile(lambda q: attend(store, q), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="requires a gradient"):
        compiled(_with_grad(x(B, HQ, 1, D))).sum().backward()
    with torch.no_grad():
        assert not compiled(_with_grad(x(B, HQ, 1, D))).requires_grad


def test_an_implementation_that_cannot_serve_says_why() -> None:
    row = registry.Implementation(
        "elsewhere", "attention", lambda *a, **k: None, lambda r: f"not for {r.formats[0]}", -5
    )
    registry.register(row)
    try:
        store = new_store()
        with registry.use_implementation("elsewhere"):
            with pytest.raises(errors.ImplementationError, match=f"elsewhere: not for {NAME}") as caught:
                attend(store)
            assert_good_message(caught.value)
            assert_survives_pickling(caught.value)
            # What is allowed is what would serve this, not every name there is.
            allowed = (
                str(caught.value).partition("allowed:")[2].partition("\n")[0].replace(" ", "").split(",")
            )
            assert "torch" in allowed and not {"elsewhere", "cutlass"} & set(allowed)
            with pytest.raises(
                errors.ImplementationError, match="no implementation of that name for this operator"
            ):
                append(store, at(5), x())
        assert attend(store).shape == (B, HQ, 1, D), "outside, the choice is open again"
    finally:
        registry._implementations["attention"].remove(row)
        registry._choices.clear()


@pytest.mark.parametrize(
    ("op", "formats", "options", "reason"),
    [
        ("paged_attention", ("kivi4_keys", "kivi4_values"), {}, "code each token by itself"),
        ("paged_append_", ("int8_per_token_head+recent4",), {}, "code each token by itself"),
        ("attention", ("int4_group32", "fp8_e4m3"), {"head_dim": 33}, "positive multiples of 2"),
        ("quantize", ("mxfp8",), {"head_dim": 0}, "positive multiples of 1"),
        ("attention", ("none", "none"), {"dtype": torch.float64}, "takes float32, float16, bfloat16"),
        ("dequantize", ("none",), {"dtype": torch.int32}, "takes float32, float16, bfloat16"),
        ("dequantize", ("none",), {"dtype": torch.float64}, None),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_explain_chooses_nobody_for_what_the_operator_refuses(
    device: str, op: str, formats: tuple[str, ...], options: dict[str, Any], reason: str | None
) -> None:
    _, *lines = registry.explain(op, *formats, device=device, **options).splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        row.name for row in registry.implementations(op)
    ]
    if reason is None:
        assert sum("chosen" in line for line in lines) == 1
    else:
        assert all("rejected" in line and reason in line for line in lines)


def test_explain_wants_a_format_for_each_store() -> None:
    for op, formats in (("quantize", (NAME, NAME)), ("attention", ()), ("attention", (NAME,) * 3)):
        with pytest.raises(errors.ImplementationError) as caught:
            registry.explain(op, *formats)
        assert_good_message(caught.value)


@pytest.mark.parametrize("name", LISTED)
def test_a_refused_append_loses_nothing(name: str) -> None:
    """For each format, also where a static scale is unset and could have been fitted by the refused write."""
    fmt = get_format(name)
    for filled in (True, False):
        store = fmt.empty_store(B, HKV, T, D)
        if filled:
            append(store, at(0, 1), x(B, HKV, 2, D), name)
        before = checks.copy(store)
        for position, new in (
            (at(T), x()),
            (at(-1), x()),
            (at(0, 1), x()),
            (at(2), x(B, HKV, 1, D + 2)),
            (at(2), x().double()),
        ):
            with pytest.raises(errors.KVQError):
                append(store, position, new, name)
        bad = x()
        bad[0, 0, 0, 3] = math.inf
        with pytest.raises(errors.NonFiniteError), kvq_ops.checked():
            append(store, at(2), bad, name)
        checks.assert_same_planes(store, before, fmt)


def test_meta_tensors_plan_without_memory() -> None:
    for name in LISTED:
        fmt = get_format(name)
        big = (64, 64, 1 << 20, 128)
        store = kvq_ops.quantize(torch.empty(big, device="meta"), name)
        assert sum(p.numel() * p.itemsize for p in store) == fmt.nbytes(*big)
        assert kvq_ops.dequantize(store, name).shape == big

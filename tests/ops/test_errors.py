"""Every bad input: the class from the catalogue, a message of four parts, and a store that lost nothing."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import errors, registry
from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.bad_inputs import (
    BAD,
    HKV,
    HQ,
    NAME,
    B,
    D,
    T,
    append,
    at,
    attend,
    grads,
    new_store,
    replaced,
    with_grad,
    x,
)
from tests.ops.checks import LISTED


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
        for what, call in grads().items():
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
        compiled(with_grad(x(B, HQ, 1, D))).sum().backward()
    with torch.no_grad():
        assert not compiled(with_grad(x(B, HQ, 1, D))).requires_grad


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

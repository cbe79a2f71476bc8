"""Operators in graphs on a GPU become Triton kernels, and nowhere else. Each case is a process without ``TRITON_INTERPRET``."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from expecttest import assert_expected_inline

pytest.importorskip("triton", reason="the triton extra is not installed")

from tests.triton.traces import traced as tracing

traced = functools.partial(tracing, "trace_graphs")


OPERATORS = ["kvq.append_.default", "kvq.append_.default", "kvq.attention.default", "aten.mul.Tensor"]


def test_on_a_gpu_the_graph_holds_kernels_and_no_operator() -> None:
    """Each launch is a node; planes that a kernel writes come out of it, are what the next one reads, and are copied back."""
    found = traced("standin", "cuda")
    assert found["before"] == OPERATORS
    assert_expected_inline(
        found["after"],
        """\
triton_kernel_wrapper_functional_proxy: standin_write writes Codes, Length, Scale, grid [(2, 1, 1)]
triton_kernel_wrapper_functional_proxy_1: standin_write writes Codes, Length, Scale, grid [(2, 1, 1)]
new_empty: aten.new_empty.default(arg0_1, [1, 4, 1, 32])
triton_kernel_wrapper_functional_proxy_2: standin_read writes Out, grid [(4, 1, 1)]
mul: aten.mul.Tensor(getitem_6, 2)
copy_: aten.copy_.default(arg3_1, getitem)
copy__1: aten.copy_.default(arg4_1, getitem_1)
copy__2: aten.copy_.default(arg5_1, getitem_2)
copy__3: aten.copy_.default(arg6_1, getitem_3)
copy__4: aten.copy_.default(arg7_1, getitem_4)
copy__5: aten.copy_.default(arg8_1, getitem_5)
return (mul,)""",
    )


def test_on_the_cpu_the_graph_is_what_it_was() -> None:
    found = traced("standin", "cpu")
    assert found["before"] == OPERATORS
    assert_expected_inline(
        found["after"],
        """\
auto_functionalized_v2: auto_functionalized_v2(kvq.append_.default)
auto_functionalized_v2_1: auto_functionalized_v2(kvq.append_.default)
attention: kvq.attention.default(arg0_1, [getitem_1, getitem_2, getitem_3], [getitem_5, getitem_6, getitem_7], F, F)
mul: aten.mul.Tensor(attention, 2)
copy_: aten.copy_.default(arg3_1, getitem_1)
copy__1: aten.copy_.default(arg4_1, getitem_2)
copy__2: aten.copy_.default(arg5_1, getitem_3)
copy__3: aten.copy_.default(arg6_1, getitem_5)
copy__4: aten.copy_.default(arg7_1, getitem_6)
copy__5: aten.copy_.default(arg8_1, getitem_7)
return (mul,)""",
    )


def test_checked_mode_keeps_operators_whole() -> None:
    assert traced("checked") == traced("standin", "cpu")


def test_an_exported_program_keeps_its_operators() -> None:
    """Also after ``run_decompositions``: what is saved must load where there is no Triton."""
    found = traced("export")
    assert found["exported"] == OPERATORS
    left = [target for target in found["decomposed"] if "getitem" not in target]
    assert left == ["auto_functionalized_v2"] * 2 + ["kvq.attention.default", "aten.mul.Tensor"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_launches_kernels_on_the_planes_themselves(mode: str) -> None:
    """Dynamo, this package's passes, AOTAutograd and Inductor, down to its code and to a cubin for each kernel in it."""
    found = traced("model", mode)
    assert found["rewritten"] == [1]
    calls = [
        line.replace(", stream=raw_stream0", "") for line in found["call"].splitlines() if "standin" in line
    ]
    assert_expected_inline(
        "\n".join(calls),
        """\
standin_write_0.run(arg5_1, arg6_1, arg7_1, buf2, arg2_1, 2, 64, 4, 1, 1)
standin_write_0.run(arg8_1, arg9_1, arg10_1, buf6, arg2_1, 2, 64, 4, 1, 1)
standin_read_1.run(buf10, arg5_1, arg6_1, arg8_1, arg9_1, arg7_1, buf11, 2, 64, 8, 1, 1)""",
    )
    assert "kvq" not in found["call"]
    assert found["compiled"]["standin_write"] == found["compiled"]["standin_read"] == 1
    # CUDA graphs: whatever is written stays in its place, and there are six planes.
    assert len(found["mutated"]) == 6 and set(found["mutated"]) <= set(found["static"])
    assert found["skips"] == 0
    # What is missing is the GPU.
    assert "without CUDA" in found["error"] or "not linked with support for cuda" in found["error"], found[
        "error"
    ]


@pytest.mark.slow
def test_an_aotinductor_package_carries_the_kernels() -> None:
    found = traced("package")
    launched = ["standin_write", "standin_write", "standin_read"]
    assert [name for name in found["launches"] if "standin" in name] == launched
    assert set(launched) <= set(found["cubins"])
    assert found["operators"] == []


# ------------------------------------------------------------------------------------------------- this package's kernels

FORMATS = (
    *(
        "int8_per_token_head",
        "nvfp4",
        "kivi4",
        "int4_group32+outlier2%",
        "nuq4",
        "turbo3",
        "none",
        "fp8_per_head",
    ),
    *("kivi2+recent8+sink2", "mxfp8"),
)


@pytest.mark.slow
@pytest.mark.parametrize("pair", FORMATS)
def test_graphs_see_what_kernels_write(pair: str) -> None:
    """No operator is left; reading writes into new tensors alone, writing into planes of the store and nothing else."""
    found = traced("every", *FORMATS)[pair]
    for what, one in found.items():
        assert one["kernels"] or (what != "decode" and pair == "none"), what
        assert not one["operators"], what
        assert not one["taken_twice"], what
        if "write" in what:
            assert not one["others"], what
            assert {"codes", "length"} <= set(one["planes"]), what
        else:
            assert one["copied_back"] == 0, what
            assert all(written for _, written in one["kernels"]), what


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["int8_per_token_head", "kivi4"])
def test_inductor_writes_and_compiles_our_kernels(pair: str) -> None:
    """Its file holds a kernel's helpers too, and each of them compiles from there."""
    found = traced("model", "reduce-overhead", "ours", pair)
    assert found["rewritten"] == [1] and "kvq" not in found["call"]
    assert found["compiled"]["attend_kernel"] >= 1
    assert {"append_rows", "keep_exact"} & set(found["compiled"])
    assert found["mutated"] and set(found["mutated"]) <= set(found["static"])
    assert found["skips"] == 0
    # Planes are updated where they lie.
    assert "clone" not in "".join(line for line in found["call"].splitlines() if ".run(" not in line)


@pytest.mark.slow
def test_an_aotinductor_package_carries_our_kernels() -> None:
    found = traced("package", "ours")
    assert found["operators"] == []
    launched = [name for name in found["launches"] if not name.startswith("triton_")]
    assert launched.count("append_rows") == 2 and launched.count("attend_kernel") == 1
    assert set(launched) <= set(found["cubins"])


def test_names_of_helpers_are_unique() -> None:
    """Inductor puts a kernel and all that it calls, by name, into one file: two of one name would be one there."""
    import importlib
    import pkgutil

    from triton.runtime.jit import KernelInterface

    import kvq_ops.triton_kernels as package

    seen: dict[str, Any] = {}
    for module in pkgutil.iter_modules(package.__path__):
        for name, value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).items():
            if isinstance(value, KernelInterface):
                assert name == value.__name__, f"{module.name} calls {value.__name__} {name}"
                assert seen.setdefault(name, value) is value, f"two kernels are called {name}"
    assert len(seen) > 20

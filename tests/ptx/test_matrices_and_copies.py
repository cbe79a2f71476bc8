"""What kernels compiled by Triton need of the machine beyond ``test_machine``: copies that run on, matrices, wide arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx.alu import operation
from tests.ptx.simulator import Fault, GlobalMemory, run

HEAD = """
.version 8.7
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 box[];
.visible .entry kernel(.param .u64 p_in, .param .u64 p_out)
.reqntid 64
{
 .reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %rd<16>; .reg .b16 %rs<8>;
 ld.param.u64 %rd1, [p_in]; ld.param.u64 %rd2, [p_out];
 .loc 1 20 0 // a line without a semicolon
 mov.u32 %r1, %tid.x;
 and.b32 %r3, %r1, 31; and.b32 %r4, %r1, 32; shl.b32 %r5, %r1, 2;
 mul.wide.u32 %rd3, %r1, 16; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
 mov.b32 %r6, box; shl.b32 %r7, %r1, 4; add.s32 %r8, %r6, %r7;
"""
GIVEN = np.arange(256, dtype=np.uint32).reshape(64, 4) * 3 + 1


def _run(body: str, *, schedule: int | None = None, **options: bool) -> np.ndarray:
    """16 bytes for each of 64 threads in and out; the last one is at the end of its memory."""
    memory, out = GlobalMemory(), np.zeros((64, 4), np.uint32)
    arguments = [memory.add(GIVEN.copy()), memory.add(out)]
    run(
        HEAD + body + "\nret; }",
        (1, 1, 1),
        (64, 1, 1),
        arguments,
        memory,
        shared=2048,
        schedule=schedule,
        **options,
    )
    return out


COPY = "cp.async.cg.shared.global [ %r8 + 0 ], [ %rd4 + 0 ], 0x10, 16;"
SECOND = (
    "cp.async.ca.shared.global [%r8+1024], [%rd4], 8, 0; cp.async.ca.shared.global [%r8+1032], [%rd4+8], 8;"
)
READ = "xor.b32 %r9, %r7, 528; add.s32 %r9, %r6, %r9; ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r9+AT];"
WRITE = "st.global.v4.b32 [%rd5], {%r10, %r11, %r12, %r13};"
OTHERS = np.arange(64) ^ 33


@pytest.mark.parametrize("schedule", [None, 0, 1])
def test_copies_arrive_behind_a_wait_and_a_barrier(schedule: int | None) -> None:
    out = _run(
        f"{COPY} cp.async.commit_group; {SECOND} cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;"
        + READ.replace("AT", "0") + WRITE,
        schedule=schedule,
    )  # fmt: skip
    assert np.array_equal(out, GIVEN[OTHERS])
    out = _run(f"{COPY} {SECOND} cp.async.wait_all; bar.sync 0;" + READ.replace("AT", "1024") + WRITE)
    # What does not read its source writes zeros.
    assert not out[:, :2].any() and np.array_equal(out[:, 2:], GIVEN[OTHERS][:, 2:])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{COPY} cp.async.commit_group; bar.sync 0;" + READ, "not been waited for"),
        (f"{COPY} cp.async.wait_group 0; bar.sync 0;" + READ, "not been waited for"),  # no group has it
        (f"{COPY} cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;" + READ, "not been waited for"),
        (
            f"{COPY} cp.async.commit_group; cp.async.wait_group 0;" + READ,
            "race|not been waited for|nobody wrote",
        ),
        (f"{COPY} cp.async.commit_group; st.shared.b32 [%r8], %r1;", "not been waited for"),
        (f"{COPY} {COPY}", "not been waited for"),
        (
            "st.shared.v4.b32 [%r8], {%r1, %r1, %r1, %r1}; bar.sync 0;" + READ + COPY,
            "overwritten with no barrier|not been waited for",
        ),
        ("cp.async.cg.shared.global [%r8], [%rd4+16], 16;", "byte 1040 of a buffer of 1024"),
        ("cp.async.cg.shared.global [%r8], [%rd4+8], 16;", "misaligned"),
        ("cp.async.cg.shared.global [%r8+8], [%rd4], 16;", "misaligned"),
    ],
)
@pytest.mark.parametrize("schedule", [None, 2, 3])
def test_faulty_copies_are_seen(body: str, message: str, schedule: int | None) -> None:
    with pytest.raises(Fault, match=message):
        _run(body.replace("AT", "0") + WRITE, schedule=schedule)


def test_a_copy_that_reads_nothing_may_point_anywhere() -> None:
    copy = "cp.async.cg.shared.global [%r8], [%rd4+4096], 16, 0; cp.async.wait_all; bar.sync 0;"
    out = _run(copy + READ.replace("AT", "0") + WRITE)
    assert not out.any()


# Each lane names the row of its own 16 bytes: 32 rows of 8 halves for each warp, four 8 x 8 matrices.
OWN = "ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd4]; st.shared.v4.b32 [%r8], {%r10, %r11, %r12, %r13}; bar.sync 0;"


def _matrices() -> np.ndarray:
    return GIVEN.view(np.uint16).reshape(2, 4, 8, 8)  # warp, matrix, row, column


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_by_the_isa(count: int, trans: bool) -> None:
    """Thread ``t`` gets of each matrix row ``t / 4``, columns ``2 (t % 4)`` and the next; of its transpose with ``.trans``."""
    registers = ", ".join(f"%r{20 + i}" for i in range(count))
    moves = "".join(f"mov.b32 %r{10 + i}, {f'%r{20 + i}' if i < count else 0};" for i in range(4))
    name = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    out = _run(f"{OWN} {name} {{{registers}}}, [%r8]; {moves} {WRITE}")
    matrices = _matrices().swapaxes(-1, -2) if trans else _matrices()
    for thread in range(64):
        for i in range(count):
            low, high = (matrices[thread // 32, i, thread % 32 // 4, 2 * (thread % 4) + e] for e in (0, 1))
            assert out[thread, i] == int(low) | int(high) << 16


@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix_is_the_inverse(trans: bool) -> None:
    kind = ".trans" if trans else ""
    out = _run(
        f"{OWN} ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r8]; add.s32 %r14, %r8, 1024;"
        f"stmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 [%r14], {{%r20, %r21, %r22, %r23}}; bar.sync 0;"
        f"ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r14]; {WRITE}"
    )
    assert np.array_equal(out, GIVEN)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (OWN.replace("bar.sync 0;", "") + "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r8];", "race"),
        (OWN + "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r8+8];", "aligned to 16"),
        (OWN + "setp.lt.u32 %p1, %r3, 16; @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r8];", "not here"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r8];", "nobody wrote"),
    ],
)  # fmt: skip
def test_faulty_matrices_are_seen(body: str, message: str) -> None:
    with pytest.raises(Fault, match=message):
        _run(body)


def test_replicated_stores_are_harmless_where_they_are_said_to_be() -> None:
    same = "mov.b32 %r10, 7; st.shared.b32 [%r6], %r10;"
    _run(same, replicated=True)
    with pytest.raises(Fault, match="two threads write"):
        _run(same)
    with pytest.raises(Fault, match="two threads write"):
        _run("st.shared.b32 [%r6], %r4;", replicated=True)
    with pytest.raises(Fault, match="two threads write"):
        _run(same + "setp.eq.s32 %p1, %r1, 9; @%p1 st.shared.b32 [%r6], %r1;", replicated=True)


@pytest.mark.parametrize(("op", "join"), [("add.s32", sum), ("max.s32", max), ("min.u32", min)])
def test_reductions_over_a_warp(op: str, join: Callable[[list[int]], int]) -> None:
    out = _run(f"sub.s32 %r9, %r1, 40; redux.sync.{op} %r10, %r9, -1; {WRITE}")
    for warp in range(2):
        given = np.arange(32) + 32 * warp - 40
        want = join((given if op.endswith("s32") else given.astype(np.int64) % 2**32).tolist())
        assert (out[32 * warp : 32 * warp + 32, 0] == want % 2**32).all()
    with pytest.raises(Fault, match="not here"):
        _run("setp.lt.u32 %p1, %r3, 16; @%p1 redux.sync.add.s32 %r9, %r1, -1;")


def test_reductions_of_floats_pass_over_nan() -> None:
    nan = "setp.eq.s32 %p1, %r3, 5; cvt.rn.f32.s32 %r9, %r1; @%p1 mov.b32 %r9, 0f7FC00000;"
    largest = _run(f"{nan} redux.sync.max.f32 %r10, %r9, -1; {WRITE}")[:, 0].view(np.float32)
    assert np.array_equal(largest, np.repeat(np.float32([31, 63]), 32))
    assert np.isnan(_run(f"{nan} redux.sync.max.NaN.f32 %r10, %r9, -1; {WRITE}")[:, 0].view(np.float32)).all()


def test_parameters_keep_their_sign() -> None:
    memory, out = GlobalMemory(), np.zeros(64, np.int64)
    body = """.visible .entry kernel(.param .u32 p_number, .param .u64 p_out) .reqntid 32 {
 .reg .b64 %rd<4>; ld.param.s32 %rd1, [p_number]; ld.param.u64 %rd2, [p_out]; st.global.b64 [%rd2], %rd1; ret; }"""
    run(body, (1, 1, 1), (32, 1, 1), [-5, memory.add(out)], memory)
    assert out[0] == -5


def _evaluate(op: str, *operands: np.ndarray) -> np.ndarray:
    found = operation(tuple(op.split(".")))
    assert found is not None
    return found[2](*operands)


def test_upper_halves_of_64_bit_products() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 1 << 64, 512, dtype=np.uint64) for _ in range(2))
    a[:4], b[:4] = [0, 1, 1 << 63, (1 << 64) - 1], [5, (1 << 64) - 1, 1 << 63, (1 << 64) - 1]
    want = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
    assert _evaluate("mul.hi.u64", a, b).tolist() == want
    x, y = a.view(np.int64), b.view(np.int64)
    assert _evaluate("mul.hi.s64", x, y).tolist() == [
        int(i) * int(j) >> 64 for i, j in zip(x, y, strict=True)
    ]


def test_fma_of_doubles_rounds_once() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(2, 400))
    c = -a * b * (1 + rng.integers(-3, 4, 400) * 2.0 ** -rng.integers(20, 60, 400))
    c[::3] = rng.normal(size=c[::3].shape)
    a[:2], b[:2], c[:2] = 1 + 2.0**-52, 1 - 2.0**-53, [2.0**-108, -(2.0**-108)]
    got = _evaluate("fma.rn.f64", a, b, c)
    for x, y, z, v in zip(a, b, c, got, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        # Python's own quotient of integers rounds once, to nearest even.
        assert v == exact.numerator / exact.denominator


def test_rounding_to_whole_numbers() -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.7, -3.7])
    for kind in (np.float32, np.float64):
        name = "f32" if kind is np.float32 else "f64"
        for mode, want in (("rmi", np.floor), ("rpi", np.ceil), ("rzi", np.trunc), ("rni", np.round)):
            assert np.array_equal(_evaluate(f"cvt.{mode}.{name}.{name}", x.astype(kind)), want(x))
    assert np.array_equal(_evaluate("sqrt.rn.f64", x[3:7]), np.sqrt(x[3:7]))
    with pytest.raises(NotImplementedError):
        operation(("cvt", "rz", "f16", "f32"))


def test_pairs_of_floats() -> None:
    rng = np.random.default_rng(6)
    a, b, c = (rng.normal(size=64).astype(np.float32) for _ in range(3))
    words = [x.view(np.uint64) for x in (a, b, c)]
    assert np.array_equal(_evaluate("mul.rn.f32x2", *words[:2]).view(np.float32), a * b)
    assert np.array_equal(_evaluate("add.rn.f32x2", *words[:2]).view(np.float32), a + b)
    assert np.array_equal(
        _evaluate("fma.rn.f32x2", *words).view(np.float32), _evaluate("fma.rn.f32", a, b, c)
    )

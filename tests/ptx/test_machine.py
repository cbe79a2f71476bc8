"""The PTX machine itself: formats against torch, lanes and barriers against what the ISA says, and what it must refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ptx import convert
from tests.ptx.alu import operation
from tests.ptx.mma import multiply
from tests.ptx.simulator import Fault, GlobalMemory, entry_of, run

EVERY_16_BITS = np.arange(1 << 16, dtype=np.uint32)
# Every bf16 number, and numbers just beside them in fp32: ties and their neighbours for all narrower formats.
AROUND = np.concatenate([(EVERY_16_BITS << 16), (EVERY_16_BITS << 16) + 1, (EVERY_16_BITS << 16) - 1]).astype(
    np.uint32
)
FLOATS = AROUND.view(np.float32)


def _same(got: np.ndarray, want: np.ndarray, nan: np.ndarray) -> None:
    assert np.array_equal(got[~nan], want[~nan])


@pytest.mark.parametrize(
    ("kind", "dtype", "largest"), [("e4m3", torch.float8_e4m3fn, 448.0), ("e5m2", torch.float8_e5m2, 57344.0)]
)
def test_float8_rounds_as_torch_does(kind: str, dtype: torch.dtype, largest: float) -> None:
    nan = np.isnan(FLOATS)
    clamped = torch.from_numpy(FLOATS.copy()).clamp(-largest, largest)
    want = clamped.to(dtype).view(torch.uint8).numpy()
    _same(convert.small_bits(FLOATS, kind), want, nan)
    assert (convert.small_bits(FLOATS[nan], kind) == 0x7F).all()


@pytest.mark.parametrize(
    ("table", "dtype"), [(convert.E4M3, torch.float8_e4m3fn), (convert.E5M2, torch.float8_e5m2)]
)
def test_float8_values_are_those_of_torch(table: np.ndarray, dtype: torch.dtype) -> None:
    want = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    assert np.array_equal(table, want, equal_nan=True)


def test_e2m1_rounds_to_the_nearest_of_its_numbers() -> None:
    number = FLOATS[~np.isnan(FLOATS)].astype(np.float64)
    code = convert.small_bits(number, "e2m1")
    assert np.array_equal(code >> 3, np.signbit(number))
    assert (code[np.abs(number) >= 6] & 7 == 7).all()
    number, code = number[np.abs(number) < 6], code[np.abs(number) < 6]
    distance = np.abs(np.abs(number)[:, None] - convert.E2M1[:8].astype(np.float64))
    chosen = np.take_along_axis(distance, (code & 7).astype(np.int64)[:, None], 1)[:, 0]
    assert (chosen == distance.min(1)).all()
    tie = (distance == distance.min(1, keepdims=True)).sum(1) > 1
    assert tie.sum() >= 14 and (code[tie] % 2 == 0).all()
    assert (convert.small_bits(np.array([np.nan]), "e2m1") == 7).all()


def test_half_precision_rounds_as_torch_does() -> None:
    nan = np.isnan(FLOATS)
    source = torch.from_numpy(FLOATS.copy())
    _same(convert.f16_bits(FLOATS), source.half().view(torch.uint16).numpy(), nan)
    _same(convert.bf16_bits(FLOATS), source.bfloat16().view(torch.uint16).numpy(), nan)
    bits = EVERY_16_BITS.astype(np.uint16)
    for dtype, values in ((torch.float16, convert.f16_values), (torch.bfloat16, convert.bf16_values)):
        want = torch.from_numpy(bits.copy()).view(dtype).float().numpy()
        assert np.array_equal(values(bits), want, equal_nan=True)


def test_fma_rounds_once() -> None:
    """Cases where a product and sum in float64, then fp32, are wrong; the exact value by integers."""
    one = np.float32(1)
    a = np.array([1 + 2.0**-23, 1 + 2.0**-12, 3.0, 0.1], np.float32)
    b = np.array([1 + 2.0**-23, 1 - 2.0**-12, 5.0, 0.2], np.float32)
    c = np.array([2.0**-60, 2.0**-70, -15.0, 0.3], np.float32)
    from fractions import Fraction

    for x, y, z in zip(a, b, c, strict=True):
        for sign in (one, -one):
            got = convert.fma32(np.array([x]), np.array([y]), np.array([sign * z]))[0]
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(sign * z))
            around = [np.nextafter(got, np.float32(-np.inf)), got, np.nextafter(got, np.float32(np.inf))]
            error = [abs(Fraction(float(v)) - exact) for v in around]
            assert error[1] == min(error)
    # 2^24 + 1 is a tie in fp32; what is added to it decides, however small.
    big, tie = np.array([24929.0], np.float32), np.array([673.0], np.float32)
    assert convert.fma32(big, tie, np.array([2.0**-40], np.float32))[0] == 2.0**24 + 2
    assert convert.fma32(big, tie, np.array([-(2.0**-40)], np.float32))[0] == 2.0**24
    assert convert.fma32(big, tie, np.array([0.0], np.float32))[0] == 2.0**24


def _evaluate(op: str, *operands: np.ndarray) -> np.ndarray:
    found = operation(tuple(op.split(".")))
    assert found is not None
    return found[2](*operands)


def test_integer_instructions() -> None:
    rng = np.random.default_rng(3)
    a, b, c = (rng.integers(0, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32) for _ in range(3))
    signed = a.view(np.int32), b.view(np.int32)
    wide = [x.astype(object) for x in signed]
    assert np.array_equal(_evaluate("mul.wide.s32", *signed).astype(object), wide[0] * wide[1])
    assert np.array_equal(
        _evaluate("mul.hi.u32", a, b).astype(object), (a.astype(object) * b.astype(object)) >> 32
    )
    quotient = np.array(
        [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(*wide, strict=True)]
    )
    assert np.array_equal(_evaluate("div.s32", *signed), quotient)
    assert np.array_equal(
        _evaluate("rem.s32", *signed).astype(object), wide[0] - quotient.astype(object) * wide[1]
    )
    assert np.array_equal(_evaluate("lop3.b32", a, b, c, np.array([0xE8])), (a & b) | (a & c) | (b & c))
    assert np.array_equal(_evaluate("shr.s32", signed[0], np.full(4096, 40, np.uint32)), signed[0] >> 31)
    assert (_evaluate("shl.b32", a, np.full(4096, 32, np.uint32)) == 0).all()
    number = a.astype(object) | (b.astype(object) << 32)
    shift = c & np.uint32(31)
    assert np.array_equal(
        _evaluate("shf.r.wrap.b32", a, b, c).astype(object), (number >> shift.astype(object)) & 0xFFFFFFFF
    )
    picked = _evaluate("prmt.b32", a, b, np.full(4096, 0x6240, np.uint32))
    assert np.array_equal(
        picked, (a & 0xFF) | ((b & 0xFF) << 8) | ((a >> 16 & 0xFF) << 16) | ((b >> 16 & 0xFF) << 24)
    )
    assert np.array_equal(
        _evaluate("bfe.u32", a, np.full(4096, 5, np.uint32), np.full(4096, 9, np.uint32)), a >> 5 & 511
    )


def test_packed_halves() -> None:
    rng = np.random.default_rng(5)
    x, y = (torch.from_numpy(rng.normal(size=4096).astype(np.float32)).half() for _ in range(2))
    words = [t.view(torch.int32).numpy().view(np.uint32) for t in (x, y)]
    for name, want in (("mul.rn.f16x2", x * y), ("add.rn.f16x2", x + y)):
        assert np.array_equal(_evaluate(name, *words), want.view(torch.int32).numpy().view(np.uint32))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mma_by_the_fragments_of_the_isa(kind: str) -> None:
    """Matrices laid into fragments element by element, as the ISA's formulas say, for two warps."""
    rng = np.random.default_rng(7)
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    a, b = (torch.from_numpy(rng.normal(size=(2, 16, n)).astype(np.float32)).to(dtype) for n in (16, 8))
    c = rng.normal(size=(2, 16, 8)).astype(np.float32)
    bits = [t.view(torch.uint16).numpy().astype(np.uint32) for t in (a, b)]
    registers_a = [np.zeros(64, np.uint32) for _ in range(4)]
    registers_b = [np.zeros(64, np.uint32) for _ in range(2)]
    registers_c = [np.zeros(64, np.float32) for _ in range(4)]
    for warp in range(2):
        for lane in range(32):
            group, in_group = lane >> 2, lane % 4
            for i in range(8):
                row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
                column = in_group * 2 + (i & 1) + (0 if i < 4 else 8)
                registers_a[i // 2][warp * 32 + lane] |= bits[0][warp, row, column] << 16 * (i % 2)
            for i in range(4):
                row = in_group * 2 + (i & 1) + (0 if i < 2 else 8)
                registers_b[i // 2][warp * 32 + lane] |= bits[1][warp, row, group] << 16 * (i % 2)
            for i in range(4):
                registers_c[i][warp * 32 + lane] = c[warp, group + 8 * (i >= 2), in_group * 2 + (i & 1)]
    want = (a.double() @ b.double()).numpy() + c
    out = multiply(registers_a, registers_b, registers_c, kind)
    for warp in range(2):
        for lane in range(32):
            for i in range(4):
                got = out[i][warp * 32 + lane]
                assert got == np.float32(want[warp, (lane >> 2) + 8 * (i >= 2), (lane % 4) * 2 + (i & 1)])


HEAD = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 p_in, .param .u64 p_out)
.reqntid 64, 1, 1
{
 .reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %rd<16>; .reg .b16 %rs<8>;
 .shared .align 16 .b8 box[256];
 ld.param.u64 %rd1, [p_in]; ld.param.u64 %rd2, [p_out];
 mov.u32 %r1, %tid.x;
 mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
 ld.global.b32 %r2, [%rd4];
"""


def _run(body: str, *, schedule: int | None = None, size: int = 64, **kinds: object) -> np.ndarray:
    memory = GlobalMemory()
    given = np.arange(size, dtype=np.uint32) * 3
    out = np.zeros(64, np.uint32)
    arguments = [
        memory.add(given, readable=kinds.get("readable", True)),
        memory.add(out, writable=kinds.get("writable", True)),
    ]
    run(HEAD + body + "\n}", (1, 1, 1), (64, 1, 1), arguments, memory, schedule=schedule)
    return out


@pytest.mark.parametrize("schedule", [None, 0, 1, 2, 3])
def test_divergent_threads_meet_again(schedule: int | None) -> None:
    out = _run(
        """
 and.b32 %r3, %r1, 3; mov.b32 %r4, 0;
$loop: setp.ge.s32 %p1, %r4, %r3; @%p1 bra $after;
 add.s32 %r2, %r2, 100; add.s32 %r4, %r4, 1; bra $loop;
$after: shfl.sync.bfly.b32 %r5, %r2, 1, 31, -1;
 st.global.b32 [%rd5], %r5; ret;""",
        schedule=schedule,
    )
    thread = np.arange(64) ^ 1
    assert np.array_equal(out, thread * 3 + 100 * (thread & 3))


@pytest.mark.parametrize(
    ("mode", "step", "control", "source"),
    [
        ("bfly", 4, 31, lambda lane: lane ^ 4),
        ("idx", 7, 31, lambda lane: np.full(32, 7)),
        ("up", 2, 0, lambda lane: np.where(lane >= 2, lane - 2, lane)),
        ("down", 3, 31, lambda lane: np.where(lane + 3 < 32, lane + 3, lane)),
        ("down", 1, 0x1C03, lambda lane: np.where(lane % 4 < 3, lane + 1, lane)),
    ],
)
def test_shuffles(mode: str, step: int, control: int, source) -> None:
    out = _run(f"shfl.sync.{mode}.b32 %r5, %r2, {step}, {control}, -1; st.global.b32 [%rd5], %r5; ret;")
    lane = np.arange(32)
    want = np.concatenate([source(lane), 32 + source(lane)]) * 3
    assert np.array_equal(out, want)


SWAP = """
 mov.b32 %r6, box; shl.b32 %r7, %r1, 2; add.s32 %r8, %r6, %r7; st.shared.b32 [%r8], %r2;
 {barrier}
 xor.b32 %r9, %r1, {distance}; shl.b32 %r9, %r9, 2; add.s32 %r10, %r6, %r9; ld.shared.b32 %r5, [%r10];
 st.global.b32 [%rd5], %r5; ret;"""


@pytest.mark.parametrize("schedule", [None, 0, 1])
def test_shared_memory_behind_a_barrier(schedule: int | None) -> None:
    out = _run(SWAP.format(barrier="bar.sync 0;", distance=33), schedule=schedule)
    assert np.array_equal(out, (np.arange(64) ^ 33) * 3)
    out = _run(SWAP.format(barrier="bar.warp.sync -1;", distance=1), schedule=schedule)
    assert np.array_equal(out, (np.arange(64) ^ 1) * 3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (SWAP.format(barrier="", distance=33), "race|nobody wrote"),
        (SWAP.format(barrier="bar.warp.sync -1;", distance=33), "race|nobody wrote"),
        (SWAP.format(barrier="", distance=1), "race"),
        ("ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%rd4]; ret;", "misaligned"),
        ("ld.global.b32 %r3, [%rd4+4]; ret;", "byte 260 of a buffer of 256"),
        ("st.global.b32 [%rd5+-4], %r2; ret;", "in no buffer|byte"),
        ("st.global.b32 [%rd2], %r2; ret;", "two threads|another thread"),
        ("mov.b32 %r6, box; ld.shared.b32 %r5, [%r6]; ret;", "nobody wrote"),
        ("mov.b32 %r6, box; st.shared.b32 [%r6+4096], %r2; ret;", "shared address"),
        (
            "setp.eq.s32 %p1, %r1, 5; @%p1 bra $x; shfl.sync.bfly.b32 %r5, %r2, 1, 31, -1; $x: ret;",
            "not here",
        ),
        (
            "setp.lt.s32 %p1, %r1, 32; @%p1 bra $x; bar.sync 0; ret; $x: bar.sync 1; ret;",
            "different barriers",
        ),
    ],
)
@pytest.mark.parametrize("schedule", [None, 4, 5])
def test_faults_are_seen(body: str, message: str, schedule: int | None) -> None:
    with pytest.raises(Fault, match=message):
        _run(body, schedule=schedule, writable="once")


def test_forbidden_bytes() -> None:
    allowed = np.ones(256, bool)
    _run("ret;", readable=allowed)
    allowed[255] = False
    with pytest.raises(Fault, match="forbidden"):
        _run("ret;", readable=allowed)


def test_atomics_count_every_thread() -> None:
    out = _run("atom.global.add.u32 %r5, [%rd2], 2; red.global.max.u32 [%rd2+4], %r2; ret;")
    assert out[0] == 128 and out[1] == 63 * 3


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="tcgen05"):
        _run("tcgen05.wait.ld.sync.aligned; ret;")
    with pytest.raises(LookupError):
        entry_of(HEAD + "ret; }", "another")

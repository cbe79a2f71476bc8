"""The kernels for ARM on an emulated processor: what tests of one capability leave out, and what notices a wrong instruction.

Every test with the fixture ``capability`` runs there too.
"""

from __future__ import annotations

import pytest
import torch

from kvq_ops.cpu import kernels
from kvq_ops.formats import get_format
from tests.cpu import clang, emulator, test_attention, test_codes, test_paged
from tests.cpu.emulator import Emulated, Fault, installed
from tests.cpu.stores import NAMES, empty, fits, implementation
from tests.ops.codec_data import KINDS

FEW = ("int8_per_token_head", "int3_group32", "kivi2_keys+recent8+outlier3%", "nvfp4")

# An instruction by its bits, and what it becomes: the half, the sum or the sign that a path for NEON would get wrong.
DAMAGES = {
    "the upper half of bytes": (0xFFFFFC00, 0x4F08A400, 0x4000_0000),  # sshll2 to sshll
    "the upper half of halves": (0xFFFFFC00, 0x4E217800, 0x4000_0000),  # fcvtl2 to fcvtl
    "the upper half of a zip": (0xFFE0FC00, 0x4E407800, 0x0000_4000),  # zip2 to zip1
    "sums of pairs": (0xFFE0FC00, 0x6E20D400, 0x2000_0000),  # faddp to fadd
    "the sign of products": (0xFFE0FC00, 0x4E20CC00, 0x0080_0000),  # fmla to fmls
}


@pytest.mark.parametrize("name", NAMES)
def test_odd_head_dims(aarch64: Emulated, name: str) -> None:
    fmt = get_format(name)
    # Sines are found one by one in Python.
    for dim in (24, 66) if "position" in fmt._index else (2, 7, 24, 33, 66, 100, 130):
        if fits(fmt, dim):
            test_codes.test_odd_head_dims(name, dim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FEW)
def test_awkward_values(aarch64: Emulated, name: str, kind: str) -> None:
    test_codes.test_awkward_values(name, kind)


def test_order_windows_and_layouts(aarch64: Emulated) -> None:
    test_codes.test_positions_in_any_order_and_rows_of_their_own("int4_group32")
    test_codes.test_windows_roll_back_and_grow_in_steps("kivi2_keys+recent8+outlier3%")
    for name in ("int4_group32", "mxfp8", "nuq4_keys+outlier3%"):
        test_codes.test_layouts(name)


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("name", FEW)
def test_ragged_histories(aarch64: Emulated, name: str, queries: int) -> None:
    test_attention.test_every_format(name, queries)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (6, 2), (9, 1)])
def test_group_sizes(aarch64: Emulated, heads: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        test_attention.test_group_sizes(heads, dtype)


def test_head_dims_masks_and_what_is_no_number(aarch64: Emulated) -> None:
    for dims in ((66, 34), (2, 6), (320, 256)):
        test_attention.test_head_dims_of_keys_and_values_differ(dims)
    test_attention.test_masks_of_any_layout()
    for how in ("length", "bool", "float", "window"):
        test_attention.test_what_is_not_filled_is_not_read(how)
    for name in ("none", "int8_per_token_head"):
        for queries in (1, 40):
            for tokens in (1, 3, 300):
                test_attention.test_what_is_not_a_number_is_not_hidden(name, queries, tokens)


def test_cuts_are_merged_and_long_prefills_have_blocks(aarch64: Emulated) -> None:
    name = "int8_per_token_head"
    key, value = (test_attention.filled(name, 2, 1, 700, 64, [700, 300]) for _ in range(2))
    for sharpness in (0.1, 1.0, 30.0):
        query = torch.randn(2, 4, 1, 64) * sharpness
        test_attention.check(query, key, value, (name, name), causal=True, sinks=torch.randn(4))
    query = torch.randn(2, 4, 70, 64)
    test_attention.check(query, key, value, (name, name), causal=True, window=90)


@pytest.mark.parametrize("name", ["int4_group32", "turbo3", "nuq4_keys"])
def test_pages(aarch64: Emulated, name: str) -> None:
    test_paged.test_append_writes_the_bytes_of_plain_torch(name, 5)
    test_paged.test_attention_is_that_over_a_contiguous_cache(name, 7)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_wrong_instruction_is_noticed(processor: Emulated, damage: str) -> None:
    """The same checks fail once all instructions of one kind are another one."""

    def check() -> None:
        torch.manual_seed(0)
        for name in ("int8_per_token_head", "fp8_e4m3", "int4_group32"):
            store = empty(name, 1, 1, 30, 64)
            implementation("append_", "torch").run(
                store, torch.arange(30), torch.randn(1, 1, 30, 64), get_format(name)
            )
            if damage not in ("sums of pairs", "the sign of products"):  # those are in attention only
                test_codes.both_read(store, name, torch.float32)
                continue
            for queries in (1, 9):
                test_attention.check(torch.randn(1, 4, queries, 64), store, store, (name, name))

    with installed(processor):
        check()
    broken = Emulated(clang.aarch64(), damage=DAMAGES[damage])
    assert broken.damaged
    with installed(broken), pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_is_read_or_written_out_of_bounds(processor: Emulated, at_end: bool) -> None:
    """Every tensor of every call ends or begins at memory that is not there; and one that is too short ends a call."""
    run = Emulated(clang.aarch64(), at_end=at_end)
    with installed(run):
        for name in NAMES:
            fmt = get_format(name)
            for dim in (7, 24, 64) if at_end else (24,):
                if not fits(fmt, dim):
                    continue
                store = empty(name, 1, 2, 19, dim)
                for start, stop in ((0, 17), (17, 18), (18, 19)):
                    x = torch.randn(1, 2, stop - start, dim)
                    implementation("append_", "cpu").run(store, torch.arange(start, stop), x, fmt)
                implementation("dequantize", "cpu").run(store, fmt, torch.float16)
                for queries, mask in ((1, None), (9, torch.rand(9, 19) < 0.8)):
                    query = torch.randn(1, 4, queries, dim)
                    out = implementation("attention", "cpu").run(query, store, store, fmt, fmt, mask=mask)
                    assert out.isfinite().all(), name
        fmt, out = get_format("int8_per_token_head"), torch.empty(64, 64)
        store = empty(fmt.name, 1, 1, 64, 64)
        numbers = kernels.side_numbers(kernels._layout(fmt), fmt, store)
        codes = numbers.index(store[0].data_ptr())
        assert numbers[codes + 4] == 64
        if at_end:
            numbers[15] += 1  # one token more than there are
        else:
            numbers[codes + 4] = -64  # tokens before the first
        numbers += (out.data_ptr(), 1, 1)
        with pytest.raises(Fault, match="READ_UNMAPPED"):
            kernels._call("kvq_dequantize", kernels._packer(len(numbers)).pack(*numbers))


def test_a_library_for_something_else_is_refused() -> None:
    with pytest.raises(Fault, match="no shared object for aarch64"):
        emulator.Reader(b"\x7fELF" + bytes(60))

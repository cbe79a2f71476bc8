"""llama.cpp's own benchmark program on the same weights, with its unquantized and its quantized caches."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from kvq_lab import assets
from kvq_lab.bench_parts import LLAMA_CACHES
from kvq_lab.bench_rows import Row

VARIABLE = "LLAMA_BENCH"
GENERATED = 16
REPETITIONS = 2
HOW = (
    "llama.cpp was not run: give --llama-bench PATH or set LLAMA_BENCH. To build it from its sources: "
    "cmake -B build -DGGML_NATIVE=ON -DLLAMA_CURL=OFF && cmake --build build --target llama-bench"
)
_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_TIMEOUT = 1800


class LlamaError(RuntimeError):
    """The program did not run, or said something that is no measurement."""


def find(path: str | None) -> Path | None:
    """The program: what was asked for, else ``$LLAMA_BENCH``, else none.

    Raises:
        AssetError: there is no such program.
    """
    given = path or os.environ.get(VARIABLE)
    if not given:
        return None
    found = Path(given)
    if not (found.is_file() and os.access(found, os.X_OK)):
        raise assets.AssetError(
            f"llama.cpp's benchmark {given}",
            got="no program of that name",
            allowed="the path of llama-bench",
            do=HOW.partition(": ")[2],
        )
    return found


# -- weights ------------------------------------------------------------------------------------------------------------


def dense_gguf(dtype: torch.dtype) -> Path:
    """SmolLM2's weights as a GGUF file in ``dtype``, dequantized from the one in the weights package; made once."""
    kind = _TYPES[dtype]
    name = f"smollm2-135m-instruct-{assets.GGUF_SHA256[:8]}-{kind}-gguf-v{assets.MODEL_REVISION}"
    folder = assets.build_once(name, lambda directory: _convert(assets.smollm2_gguf(), directory, kind))
    return folder / f"{kind}.gguf"


def _convert(source: Path, directory: Path, kind: str) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    types = {
        "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
        "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
        "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    }
    number, file_type = types[kind]
    reader = GGUFReader(source)
    writer = GGUFWriter(directory / f"{kind}.gguf", reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue  # the writer adds these by itself
        if key == "general.file_type":
            writer.add_file_type(file_type)
            continue
        array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(
            key, field.contents(), field.types[0], sub_type=field.types[-1] if array else None
        )
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        dense = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if dense.ndim > 1 and kind != "f32":  # norms stay in fp32 in every file of llama.cpp
            writer.add_tensor(tensor.name, quantize(dense, number), raw_dtype=number)
        else:
            writer.add_tensor(tensor.name, dense)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- running ------------------------------------------------------------------------------------------------------------


@functools.cache
def _help(program: Path) -> str:
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def command(program: Path, weights: Path, cache: str, context: int, threads: int, known: str) -> list[str]:
    """The command line; ``known`` is what the program prints as its help, since options come and go."""
    options = ["-m", weights, "-t", threads, "-p", 0, "-n", GENERATED, "-d", context, "-r", REPETITIONS]
    # Quantized values need flash attention, which is spelled either way.
    options += ["-fa", "on" if "on|off" in known else 1, "-ctk", cache, "-ctv", cache, "-o", "json"]
    if "--repack" in known:
        # Weights that are not quantized are never repacked; some releases crash when they try.
        options += ["--repack", 0]
    return [str(part) for part in (program, *options)]


def parse(output: str) -> tuple[list[float], str]:
    """(seconds a token of each repetition, llama.cpp's build) from the JSON that the program printed.

    Raises:
        LlamaError: it is no such JSON.
    """
    try:
        found = json.loads(output[output.index("[") :])
        (test,) = (entry for entry in found if entry["n_gen"] > 0)
        seconds = [ns / 1e9 / test["n_gen"] for ns in test["samples_ns"]]
        if not seconds or min(seconds) <= 0:
            raise ValueError("no samples")
        return seconds, f"{test['build_number']} ({test['build_commit']})"
    except (ValueError, KeyError, TypeError) as error:
        raise LlamaError(f"unreadable output of llama-bench: {type(error).__name__}: {error}") from error


def run(program: Path, weights: Path, cache: str, context: int, threads: int) -> tuple[list[float], str]:
    """Seconds a token after ``context`` tokens with keys and values in ``cache``, and the program's build.

    Raises:
        LlamaError: it failed.
    """
    try:
        words = command(program, weights, cache, context, threads, _help(program))
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LlamaError(str(error)) from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise LlamaError(f"llama-bench ended with status {done.returncode}: {' '.join(last)[:160]}")
    return parse(done.stdout)


@dataclasses.dataclass
class Runs:
    """llama.cpp after ``context`` tokens, with each kind of cache, as often as :meth:`run` is called."""

    program: Path | None
    context: int
    dtypes: Sequence[torch.dtype]
    notes: set[str]
    caches: Sequence[str] = LLAMA_CACHES
    samples: dict[tuple[torch.dtype, str], list[float]] = dataclasses.field(default_factory=dict)
    errors: dict[tuple[torch.dtype, str], str] = dataclasses.field(default_factory=dict)

    def run(self) -> None:
        if self.program is None:
            self.notes.add(HOW)
            return
        for dtype in self.dtypes:
            for cache in self.caches:
                try:
                    weights = dense_gguf(dtype)
                    found, build = run(self.program, weights, cache, self.context, torch.get_num_threads())
                    self.samples.setdefault((dtype, cache), []).extend(found)
                    self.notes.add(f"llama.cpp build {build}")
                except (LlamaError, assets.AssetError, ImportError) as error:
                    self.errors[dtype, cache] = " ".join(str(error).split())[:200]

    def rows(self, base: Row) -> list[Row]:
        """One for each cache; the ratio is that of medians, since the runs do not take turns."""
        if self.program is None:
            return []
        found = []
        for dtype in self.dtypes:
            for cache in self.caches:
                kind = str(dtype).removeprefix("torch.")
                row = Row(
                    "model",
                    f"llama.cpp {cache}, {kind}",
                    format=cache,
                    implementation="llama.cpp",
                    dtype=kind,
                    batch=1,
                    queries=1,
                    tokens=self.context,
                )
                samples = self.samples.get((dtype, cache))
                if (dtype, cache) in self.errors or not samples:
                    row.refuse(f"not run: {self.errors.get((dtype, cache), 'no samples')}")
                else:
                    _fill(row, samples, base)
                found.append(row)
        return found


def _fill(row: Row, samples: Sequence[float], base: Row) -> None:
    row.seconds, row.seconds_best, row.rounds = statistics.median(samples), min(samples), len(samples)
    if len(samples) > 1:
        row.seconds_low, _, row.seconds_high = statistics.quantiles(samples, n=4, method="inclusive")
    if base.seconds is not None:
        row.base, row.ratio = base.name, base.seconds / row.seconds

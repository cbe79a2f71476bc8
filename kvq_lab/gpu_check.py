"""Everything about the GPU kernels that needs a GPU: right or wrong, under every way of running them, and how fast.

python -m kvq_lab.gpu_check                      # at most six minutes; one table, and JSON in kvq_lab/results
python -m kvq_lab.gpu_check --tune               # first look for better launch parameters, and write them down
python -m kvq_lab.gpu_check --interpret          # only right or wrong, on the CPU in Triton's interpreter, at tiny sizes

It needs torch 2.11, triton 3.6 and numpy, or newer ones. Cases run in the order of what they are worth until the time is over;
what was not run is listed as such. A kernel that is wrong gets no speed. Exit code: 0 where everything that ran is right, 1
where something is wrong or failed, 2 where nothing could run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

from kvq_lab.gpu_rows import Budget, Case, Row, run_cases, table

SECONDS = 345.0
"""Six minutes, less what it takes to start and to end."""


def environment() -> dict[str, Any]:
    """What this ran on."""
    import torch
    import triton

    import kvq_ops

    found: dict[str, Any] = {
        "kvq": kvq_ops.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": device.name,
            "capability": f"{device.major}.{device.minor}",
            "processors": device.multi_processor_count,
            "memory": device.total_memory,
        }
    return found


def why_not() -> str:
    """What is missing to run on a GPU, or ``""``."""
    try:
        import torch
        import triton
    except ImportError as error:
        return f"{error}; pip install 'torch>=2.11' 'triton>=3.6' numpy"
    if not torch.cuda.is_available():
        built = (
            ""
            if torch.version.cuda or torch.version.hip
            else f"; torch {torch.__version__} is built for CPUs only"
        )
        return f"no GPU that torch can use{built}"
    from kvq_ops.triton_kernels import availability

    reason = availability.without_triton() or availability.gpu_refusal()
    return reason or ("" if triton else "")


def all_cases(interpret: bool) -> list[Case]:
    from kvq_lab import gpu_cases, gpu_cutlass, gpu_graphs, gpu_timing

    if interpret:
        return gpu_cases.correctness(gpu_cases.Machine.interpreter())
    machine = gpu_cases.Machine("cuda")
    cutlass = Case("codes", "CUTLASS", functools.partial(gpu_cutlass.check, machine), 30, 97.2)
    bench = functools.cache(gpu_timing.Bench)
    return [*gpu_cases.correctness(machine), *gpu_graphs.cases(machine), *gpu_timing.cases(bench), cutlass]


def default_path(found: dict[str, Any]) -> Path:
    name = re.sub(r"[^a-z0-9]+", "_", str(found.get("gpu", "interpreter")).lower()).strip("_")
    return Path(__file__).parent / "results" / f"gpu_{name}.json"


def summary(rows: list[Row]) -> str:
    counts = {
        verdict: sum(row.verdict == verdict for row in rows)
        for verdict in ("right", "timed", "wrong", "failed", "not run")
    }
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m kvq_lab.gpu_check", description=(__doc__ or "").split("\n\n")[0]
    )
    made.add_argument(
        "--interpret", action="store_true", help="correctness only, on the CPU, in Triton's interpreter"
    )
    made.add_argument(
        "--seconds", type=float, default=SECONDS, help="time that all of it may take (default %(default)s)"
    )
    made.add_argument(
        "--only", default="", metavar="TEXT", help="only cases whose section and name contain TEXT"
    )
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="where results go (default kvq_lab/results/gpu_<name>.json)"
    )
    made.add_argument(
        "--tune", action="store_true", help="look for launch parameters first, for half of the time"
    )
    return made


def main(arguments: list[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    begin = time.monotonic()
    if asked.interpret:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            print(
                "--interpret: triton was imported already, to compile; start a process of its own",
                file=sys.stderr,
            )
            return 2
        os.environ["TRITON_INTERPRET"] = "1"
    if "TRITON_INTERPRET" in os.environ and not asked.interpret:
        print(
            "TRITON_INTERPRET is set, so that nothing would be compiled: unset it, or pass --interpret",
            file=sys.stderr,
        )
        return 2
    reason = "" if asked.interpret else why_not()
    if reason:
        print(
            f"gpu_check cannot run here: {reason}.\n"
            "It needs an NVIDIA GPU of sm_80 or later, or AMD gfx94x, with torch>=2.11, triton>=3.6 and numpy.\n"
            "Without one, python -m kvq_lab.gpu_check --interpret checks the kernels' numbers on the CPU.",
            file=sys.stderr,
        )
        return 2
    try:
        found = environment()
    except ImportError as error:
        print(f"gpu_check cannot run here: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{key} {value}" for key, value in found.items() if value), flush=True)
    if asked.tune and not asked.interpret:
        from kvq_lab import gpu_tune

        gpu_tune.tune(Budget(asked.seconds / 2), print)
    cases = [case for case in all_cases(asked.interpret) if asked.only in f"{case.section} {case.name}"]
    rows = run_cases(cases, Budget(asked.seconds - (time.monotonic() - begin)), _tell)
    print("\n" + table(rows))
    took = time.monotonic() - begin
    print(f"\n{summary(rows)}; {took:.0f} s")
    path = asked.json or default_path(found)
    if asked.json is not None or not asked.interpret:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report(found, rows, took), indent=1) + "\n")
        print(f"written to {path}")
    if not any(row.verdict in ("right", "timed", "wrong", "failed") for row in rows):
        return 2
    return 1 if any(row.verdict in ("wrong", "failed") for row in rows) else 0


def report(found: dict[str, Any], rows: list[Row], took: float) -> dict[str, Any]:
    """The JSON: environment, how long it took, and every row without what it does not have."""
    kept = [{key: value for key, value in vars(row).items() if value not in (None, "", {})} for row in rows]
    return {"environment": found, "seconds": round(took, 1), "rows": kept}


def _tell(row: Row) -> None:
    said = f"{row.seconds * 1e3:.3f} ms" if row.seconds is not None else row.why
    print(f"[{row.section}] {row.name}: {row.verdict} {said}".rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())

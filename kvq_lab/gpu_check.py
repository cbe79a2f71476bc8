"""Everything about the GPU kernels that needs a GPU: right or wrong, under every way of running them, and how fast.

python -m kvq_lab.gpu_check                      # at most six minutes; one table, and JSON in kvq_lab/results
python -m kvq_lab.gpu_check --tune               # first look for better launch parameters, and write them down
python -m kvq_lab.gpu_check --interpret          # only right or wrong, on the CPU in Triton's interpreter, at tiny sizes

It needs torch 2.11, triton 3.6 and numpy, or newer ones. Cases run in the order of what they are worth until the time is over;
what was not run is listed as such. A kernel that is wrong gets no speed. Results are written as they come, so that what was
found is kept if the script is stopped. Exit code: 0 where everything that ran is right, 1 where something is wrong or failed,
2 where nothing could run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kvq_lab import gpu_plan
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
        "cores": os.cpu_count(),
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


def file_name(found: dict[str, Any]) -> str:
    name = re.sub(r"[^a-z0-9]+", "_", str(found.get("gpu", "interpreter")).lower()).strip("_")
    return f"gpu_{name}.json"


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
        "--only", default="", metavar="REGEX", help="only cases in whose section and name this is found"
    )
    made.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where results, and launch parameters that were found, go as well (default: kvq_lab/results)",
    )
    made.add_argument(
        "--tune", action="store_true", help="look for launch parameters first, for half of the time"
    )
    made.add_argument(
        "--workers", type=int, default=gpu_plan.workers(), help="processes at a time (default %(default)s)"
    )
    return made


@dataclasses.dataclass
class Record:
    """Rows as they come: told, and written to a file that is whole at any time."""

    found: dict[str, Any]
    path: Path | None
    begin: float
    rows: list[Row] = dataclasses.field(default_factory=list)
    written: float = 0.0

    def tell(self, row: Row) -> None:
        self.rows.append(row)
        said = f"{row.seconds * 1e3:.3f} ms" if row.seconds is not None else row.why
        print(f"[{row.section}] {row.name}: {row.verdict} {said}".rstrip(), flush=True)
        if time.monotonic() - self.written > 1:
            self.write(complete=False)

    def write(self, *, complete: bool) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".part")
        took = time.monotonic() - self.begin
        half.write_text(json.dumps(report(self.found, self.rows, took, complete), indent=1) + "\n")
        half.replace(self.path)
        self.written = time.monotonic()

    @property
    def code(self) -> int:
        """Of the process."""
        if not any(row.verdict in ("right", "timed", "wrong", "failed") for row in self.rows):
            return 2
        return 1 if any(row.verdict in ("wrong", "failed") for row in self.rows) else 0


def main(arguments: list[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    begin = time.monotonic()
    if reason := prepare(asked.interpret):
        print(reason, file=sys.stderr)
        return 2
    try:
        found = environment()
    except ImportError as error:
        print(f"gpu_check cannot run here: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{key} {value}" for key, value in found.items() if value), flush=True)
    folder = asked.out or (None if asked.interpret else Path(__file__).parent / "results")
    record = Record(found, folder and folder / file_name(found), begin)

    def left() -> float:
        return asked.seconds - (time.monotonic() - begin)

    complete = False
    try:
        if asked.tune and not asked.interpret:
            tune(left() / 2, record, asked)
        cases = chosen(gpu_plan.check_cases(asked.interpret), asked.only)
        if asked.interpret:
            run_cases(cases, Budget(left()), record.tell)
        else:
            gpu_plan.run(cases, gpu_plan.check_cases, left, record.tell, asked.workers)
        complete = True
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        record.write(complete=complete)
    print("\n" + table(record.rows))
    print(f"\n{summary(record.rows)}; {time.monotonic() - begin:.0f} s")
    if record.path is not None:
        print(f"written to {record.path}")
    return record.code


def chosen(cases: list[Case], only: str) -> list[Case]:
    """The cases in whose section and name ``only`` is found."""
    return [case for case in cases if re.search(only, case.key)]


def prepare(interpret: bool) -> str:
    """Set this process up for a GPU or for Triton's interpreter; why that cannot be, or ``""``."""
    if interpret:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            return "--interpret: triton was imported already, to compile; start a process of its own"
        os.environ["TRITON_INTERPRET"] = "1"
        return ""
    if "TRITON_INTERPRET" in os.environ:
        return "TRITON_INTERPRET is set, so that nothing would be compiled: unset it, or pass --interpret"
    if reason := why_not():
        return (
            f"gpu_check cannot run here: {reason}.\n"
            "It needs an NVIDIA GPU of sm_80 or later, or AMD gfx94x, with torch>=2.11, triton>=3.6 and numpy.\n"
            "Without one, python -m kvq_lab.gpu_check --interpret checks the kernels' numbers on the CPU."
        )
    return ""


def tune(seconds: float, record: Record, asked: argparse.Namespace) -> None:
    """Look for launch parameters for so long; they are in the package's table afterwards, and in ``--out``."""
    from kvq_ops.triton_kernels.configs import TABLE_FILE

    end = time.monotonic() + seconds
    print(f"tuning for {seconds:.0f} s; what is found goes to {TABLE_FILE}", flush=True)
    cases = chosen(gpu_plan.tune_cases(), asked.only)
    gpu_plan.run(cases, gpu_plan.tune_cases, lambda: end - time.monotonic(), record.tell, asked.workers)
    if asked.out is not None:
        shutil.copy(TABLE_FILE, asked.out / TABLE_FILE.name)


def report(found: dict[str, Any], rows: list[Row], took: float, complete: bool = True) -> dict[str, Any]:
    """The JSON: environment, how long it took, whether it came to its end, and every row without what it does not have."""
    kept = [{key: value for key, value in vars(row).items() if value not in (None, "", {})} for row in rows]
    return {"environment": found, "seconds": round(took, 1), "complete": complete, "rows": kept}


if __name__ == "__main__":
    # Stopped from outside, it ends its workers and says what it has.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())

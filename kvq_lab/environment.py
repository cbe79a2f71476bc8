"""What a measurement ran on, for the head of a table and for JSON. Never raises."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


def version_of(distribution: str) -> str | None:
    """Installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Name of the processor as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Versions, processor, cores and threads, as plain JSON values."""
    import torch

    import kvq_ops

    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "kvq": kvq_ops.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "triton": version_of("triton"),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(usable),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def one_line(found: dict[str, Any]) -> str:
    """The environment in one line for people."""
    parts = [
        f"kvq {found['kvq']}",
        f"torch {found['torch']}",
        f"transformers {found['transformers']}",
        f"{found['cpu']} ({found['cpu_capability']})",
        f"{found['threads']} threads",
    ]
    return ", ".join(parts)

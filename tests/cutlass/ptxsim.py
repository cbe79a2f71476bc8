"""The PTX machine (``tests/ptx``) for kernels of CuTe DSL, and the version for which it is known how those take parameters."""

from __future__ import annotations

from tests.ptx.simulator import Fault, GlobalMemory, entry_of, run

__all__ = ["DSL_VERSION", "Fault", "GlobalMemory", "entry_of", "run", "why_not"]

DSL_VERSION = "4.8.1"
"""The version whose kernel parameters the simulator knows."""


def why_not() -> str | None:
    """Why the compiled kernels cannot be simulated here, or None: the reason of a skip."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        return "nvidia-cutlass-dsl is not installed"
    if installed != DSL_VERSION:
        return f"kernel parameters are known for nvidia-cutlass-dsl {DSL_VERSION}, not {installed}"
    return None

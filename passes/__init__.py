"""Graph passes: find attention over caches, and let it read the quantized store. One pipeline for compile and export."""

from __future__ import annotations

from .export import quantize_exported
from .model import explain, quantize_kv_cache_
from .packaging import package_for_cpp
from .report import Report, clear_report, report

__all__ = [
    "Report",
    "clear_report",
    "explain",
    "package_for_cpp",
    "quantize_exported",
    "quantize_kv_cache_",
    "report",
]

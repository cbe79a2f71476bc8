"""Kernels compiled here leave their dumps in a directory of the test run."""

from __future__ import annotations

import os
import tempfile

# Read when cutlass is imported; without it the DSL writes into the working directory.
os.environ.setdefault("CUTE_DSL_DUMP_DIR", tempfile.mkdtemp(prefix="cute_dump_"))

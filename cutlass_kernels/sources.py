"""Which files a kernel's code comes from: where its ``make`` is, and whatever that imports, and so on.

Imports are read off the text, those inside functions too, so that nothing is run. Followed are modules of this package, of
the package that the first file is in, and, if it is in none, files beside it; other packages go into a key by their versions.
What is imported by a name made at run time is not seen, and has to be named.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["digest_of", "sources_of"]

_HERE = Path(__file__).resolve().parent


def _root(path: Path) -> Path:
    """The folder that absolute names of a file's own package start from; the file's own, where it is in none."""
    folder = path.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def _package(path: Path, root: Path) -> tuple[str, ...]:
    return path.parent.relative_to(root).parts


def _names(path: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """Dotted names, taken apart, that a file imports; of ``from a import b`` both ``a`` and ``a.b``, which may be a module."""
    package = _package(path, root)
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            inner = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                inner = package[: len(package) - node.level + 1] + inner
            yield inner
            for alias in node.names:
                yield (*inner, alias.name)


def _files(name: tuple[str, ...], root: Path) -> Iterator[Path]:
    """The files that are run when a module is imported: its own and those of the packages it is in."""
    for count in range(1, len(name) + 1):
        place = root.joinpath(*name[:count])
        if (place / "__init__.py").is_file():
            yield place / "__init__.py"
        elif place.with_suffix(".py").is_file():
            yield place.with_suffix(".py")
            return


def sources_of(start: str | Path) -> tuple[Path, ...]:
    """The files behind a kernel, in an order of their own, ``start`` among them.

    Raises:
        OSError: there is no such file.
        SyntaxError: one of them is not Python.
    """
    start = Path(start).resolve()
    root = _root(start)
    own = _package(start, root)[:1]
    # What may be followed, and where it is: modules of two packages, or of a script's folder.
    roots = {_HERE.name: _HERE.parent}
    roots |= {own[0]: root} if own else {path.stem: root for path in root.glob("*.py")}
    found: dict[Path, None] = {start: None}
    waiting = [start]
    while waiting:
        path = waiting.pop()
        for name in _names(path, _root(path)):
            if not name or (base := roots.get(name[0])) is None:
                continue
            for file in _files(name, base):
                if file not in found:
                    found[file] = None
                    waiting.append(file)
    return tuple(sorted(found))


@functools.cache
def digest_of(start: str, more: Sequence[str] = ()) -> str:
    """A digest of the files behind a kernel and of ``more`` files, by their contents and names, not by where they are."""
    digest = hashlib.sha256()
    for path in (*sources_of(start), *map(Path, more)):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()

"""PTX text to instructions: what the machine needs of the language, and an error for the rest.

Reads what NVVM prints and what inline assembly adds to it: entries, parameters, registers (with their nested scopes), shared
variables, labels, predicates.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

__all__ = ["Entry", "Instruction", "Parameter", "parse"]

# Shared variables start here, so that address 0 is no valid place.
SHARED_BASE = 1024


@dataclass(frozen=True)
class Parameter:
    name: str
    size: int
    align: int


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``op`` split at its dots, operands as text, the guard as (register, negated)."""

    op: tuple[str, ...]
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    text: str


@dataclass
class Entry:
    """One kernel.

    Attributes:
        registers: type (``b32``, ``pred``, ...) of single registers; ``prefixes`` that of numbered ones by their prefix.
        shared: address of each shared variable; ``static_shared`` is where dynamic shared memory begins.
        labels: index of the instruction that follows each label.
    """

    name: str
    parameters: list[Parameter]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    prefixes: dict[str, str] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    static_shared: int = SHARED_BASE
    threads: int = 0

    def type_of(self, register: str) -> str:
        if register in self.registers:
            return self.registers[register]
        match = re.match(r"%[a-zA-Z_]+", register)
        if match is None or match.group(0) not in self.prefixes:
            raise SyntaxError(f"no register {register} in {self.name}")
        return self.prefixes[match.group(0)]


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s[^%\w$]*(?:\.\w+\s+(?:\d+\s+)?)*)?([\w$]+)(?:\[(\d+)\])?$"
)
_SHARED = re.compile(r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?")


@functools.cache
def bits_of(kind: str) -> int:
    return int(re.sub(r"\D", "", kind))


def parse(ptx: str) -> dict[str, Entry]:
    """Every entry of a module by its name."""
    ptx = re.sub(r"/\*.*?\*/", "", ptx, flags=re.S)
    ptx = re.sub(r"//[^\n]*", "", ptx)
    ptx = re.sub(r"^\s*\.(?:loc|file)\b[^\n]*$", "", ptx, flags=re.M)  # these two end with their line
    entries: dict[str, Entry] = {}
    outside = ptx
    for match in _ENTRY.finditer(ptx):
        close = ptx.index(")", match.end())
        open_ = ptx.index("{", close)
        end = _closing(ptx, open_)
        entry = Entry(match.group(1), _parameters(ptx[match.end() : close]))
        threads = re.search(
            r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", ptx[close:open_]
        )
        if threads:
            entry.threads = 1
            for size in threads.groups():
                entry.threads *= int(size or 1)
        body = ptx[open_ + 1 : end]
        outside = outside.replace(ptx[match.start() : end + 1], "")
        _body(entry, body)
        _place_shared(entry, body)
        entries[entry.name] = entry
    for entry in entries.values():
        _place_shared(entry, outside)
    return entries


def _closing(text: str, open_: int) -> int:
    depth = 0
    for i in range(open_, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
    raise SyntaxError("a brace that is never closed")


def _parameters(text: str) -> list[Parameter]:
    found = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            continue
        match = _PARAMETER.match(part)
        if match is None:
            raise SyntaxError(f"parameter {part!r}")
        align, kind, name, count = match.groups()
        size = bits_of(kind) // 8 * int(count or 1)
        found.append(Parameter(name, size, int(align or size)))
    return found


def _place_shared(entry: Entry, text: str) -> None:
    dynamic = []
    for match in _SHARED.finditer(text):
        extern, align, kind, name, count = match.groups()
        if name in entry.shared:
            continue
        step = int(align or bits_of(kind) // 8)
        if extern or count == "":
            dynamic.append((name, step))
            continue
        at = -(-entry.static_shared // step) * step
        entry.shared[name] = at
        entry.static_shared = at + bits_of(kind) // 8 * int(count or 1)
    for name, step in dynamic:
        entry.static_shared = -(-entry.static_shared // step) * step
        entry.shared[name] = entry.static_shared


def _statements(body: str) -> list[str]:
    """Statements, with ``{`` and ``}`` of scopes on their own; braces inside a statement are vector operands."""
    found: list[str] = []
    buffer, depth = "", 0
    for char in body:
        if char == "{" and depth == 0 and not re.sub(r"[\w$]+:", "", buffer).strip():
            found += [buffer, "{"] if buffer.strip() else ["{"]
            buffer = ""
            continue
        if char == "}" and depth == 0:
            found += [buffer, "}"] if buffer.strip() else ["}"]
            buffer = ""
            continue
        depth += (char == "{") - (char == "}")
        buffer += char
        if char == ";" and depth == 0:
            found.append(buffer)
            buffer = ""
    return found


def _body(entry: Entry, body: str) -> None:
    scopes: list[dict[str, str]] = [{}]
    count = 0
    for statement in _statements(body):
        statement = statement.strip()
        while match := re.match(r"^([\w$]+):\s*", statement):
            entry.labels[match.group(1)] = len(entry.instructions)
            statement = statement[match.end() :].strip()
        if statement == "{":
            count += 1
            scopes.append({})
            continue
        if statement == "}":
            scopes.pop()
            continue
        statement = statement.rstrip(";").strip()
        if not statement or statement.startswith((".pragma", ".shared", ".extern")):
            continue
        if statement.startswith(".reg"):
            _declare(entry, statement, scopes, count)
            continue
        if statement.startswith("."):
            raise NotImplementedError(f"directive {statement!r}")
        for scope in scopes[1:]:
            for name, unique in scope.items():
                statement = re.sub(rf"(?<![\w.%@$]){re.escape(name)}(?![\w@])", unique, statement)
        entry.instructions.append(_instruction(statement))


def _declare(entry: Entry, statement: str, scopes: list[dict[str, str]], count: int) -> None:
    match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S)
    if match is None:
        raise SyntaxError(statement)
    kind, names = match.groups()
    for name in (part.strip() for part in names.split(",")):
        if numbered := re.match(r"(%[a-zA-Z_]+)<\d+>", name):
            entry.prefixes[numbered.group(1)] = kind
        elif len(scopes) > 1:
            scopes[-1][name] = f"{name}@{count}"
            entry.registers[f"{name}@{count}"] = kind
        else:
            entry.registers[name] = kind


def _instruction(text: str) -> Instruction:
    match = re.match(r"(?:@(!?)([%\w$@]+)\s+)?(\S+)\s*(.*)", text, re.S)
    assert match is not None, text
    negated, guard, op, rest = match.groups()
    operands = tuple(part.strip() for part in re.split(r",(?![^{]*\})", rest)) if rest else ()
    return Instruction(
        tuple(op.split(".")), operands, (guard, bool(negated)) if guard else None, " ".join(text.split())
    )


def elements(operand: str) -> list[str]:
    """The registers of a vector operand, or the single one."""
    return [part.strip() for part in operand.strip("{}").split(",")] if operand.startswith("{") else [operand]

"""The model families through both front doors, with the lossless format ``none`` beside the untouched model.

    kvq models                                  # a Markdown table of all families
    kvq models --family llama --json llama.json

A row of the table is one family with one kind of attention through one door.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvq_lab.families import (
    FAMILIES,
    Family,
    build,
    dense_cache,
    encoder_states,
    get_family,
    quantized_cache,
    step,
    tokens,
)

__all__ = ["Record", "main", "markdown", "rows", "run_compile", "run_export", "run_rows"]


@dataclass
class Record:
    """What became of one row.

    Attributes:
        sites, rewritten: attention sites of all its graphs, and how many of them read the quantized cache.
        graphs: how many graphs were compiled or exported.
        left: for each site that was left, the node and the reason.
        error: largest difference of a logit from the untouched model's, with the lossless format.
        failure: the error that ended the run, if one did.
        notes: what is special about the family.
    """

    family: str
    attention: str
    door: str
    sites: int = 0
    rewritten: int = 0
    graphs: int = 0
    left: list[str] = field(default_factory=list)
    error: float | None = None
    failure: str = ""
    notes: str = ""

    def take(self, report: Any) -> None:
        """Count what a report of the passes says."""
        self.sites, self.rewritten, self.graphs = report.found, report.rewritten, len(report.graphs)
        self.left = [f"{site.anchor}: {site.node} {site.reason}" for site in report.left]


def run(
    family: Family, model: Any, call: Callable[..., Any], ids: Tensor, cache: Any, prompt: int
) -> list[Tensor]:
    """Logits of a prompt of ``prompt`` tokens, then of one token at a time to the end of ``ids``."""
    with torch.no_grad():
        logits = [step(family, model, call, ids[:, :prompt], cache)]
        for at in range(prompt, ids.shape[1]):
            logits.append(step(family, model, call, ids[:, at : at + 1], cache))
    return logits


def furthest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference anywhere."""
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def compiled(
    family: Family,
    model: Any,
    format: str,
    ids: Tensor,
    prompt: int,
    *,
    lower: str = "inductor",
) -> tuple[list[Tensor], Any, Any]:
    """Logits through ``torch.compile``, the quantized cache after them, and the report of the passes."""
    import passes

    torch._dynamo.reset()
    before = len(passes.report().graphs)
    call = torch.compile(model, backend="kvq", fullgraph=True, options={"lower": lower})
    cache = quantized_cache(family, model, format, ids.shape[1], ids.shape[0])
    logits = run(family, model, call, ids, cache, prompt)
    return logits, cache, passes.Report(passes.report().graphs[before:])


def run_compile(
    family: Family, attention: str, *, prompt: int = 5, steps: int = 32, lower: str = "inductor"
) -> Record:
    """One row through ``torch.compile``: a prompt and ``steps`` tokens, past the window where there is one."""
    record = Record(family.name, attention, "compile", notes=family.notes)
    model, ids = build(family, attention), tokens(2, prompt + steps)
    wanted = run(family, model, model, ids, dense_cache(family, model, ids.shape[1]), prompt)
    found, _, report = compiled(family, model, "none", ids, prompt, lower=lower)
    record.take(report)
    record.error = furthest(found, wanted)
    return record


class DecodeStep(nn.Module):
    """One step of a model as a module that can be exported: the tensors of its cache are buffers.

    The cache holds a prompt already. Layers with a window have passed it: transformers decides by Python numbers how such a
    layer is written, so an exported step is one of the two kinds, and this is the one that goes on for ever.
    """

    def __init__(self, family: Family, model: nn.Module, cache: Any, batch: int, length: int) -> None:
        super().__init__()
        self.family, self.model, self.cache = family, model, cache
        asks = "position_ids" in inspect.signature(model.forward).parameters
        self.tells_positions = asks and (family.window is not None or family.slices_by_length)
        parts = {"": cache}
        if family.encodes:
            parts = {"": cache.self_attention_cache, "cross_": cache.cross_attention_cache}
            self.register_buffer("encoder_states", encoder_states(batch))
        for prefix, part in parts.items():
            for i, layer in enumerate(part.layers):
                self.register_buffer(f"{prefix}key_cache_{i}", layer.keys)
                self.register_buffer(f"{prefix}value_cache_{i}", layer.values)
                self.register_buffer(f"{prefix}cumulative_length_{i}", layer.cumulative_length)
        if family.slices_by_length:
            self.slots: Tensor
            self.register_buffer("slots", torch.arange(length))
            for layer in cache.layers:
                _count_on_host(layer)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits ``[batch, 1, VOCABULARY]`` for ``ids`` at ``positions``, both ``[batch, 1]``."""
        more: dict[str, Any] = {}
        if self.family.encodes:
            more["encoder_states"] = self.encoder_states
        if self.family.slices_by_length:
            # With positions and a mask given, the length makes no difference to such models.
            seen = self.slots <= positions[:, None, :, None]
            low = torch.finfo(torch.float32).min
            more["attention_mask"] = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, low)
        if self.tells_positions:
            more["position_ids"] = positions
        return step(self.family, self.model, self.model, ids, self.cache, **more)


def _count_on_host(layer: Any) -> None:
    """Let a layer answer with a number, which then is a constant of the exported step."""
    kind = type(layer)
    seen = int(layer.cumulative_length)
    layer.__class__ = type(
        f"Counted{kind.__name__}", (kind,), {"get_seq_length": lambda self: seen, "_layer_type": None}
    )


def exported(family: Family, model: nn.Module, cache: Any, ids: Tensor, prompt: int) -> Any:
    """The step after ``prompt`` tokens of ``ids``, with ``cache`` for all of them, as an exported program."""
    batch, length = ids.shape
    with torch.no_grad():
        step(family, model, model, ids[:, :prompt], cache)
        # The second token takes every layer to the branch that the exported step is made of.
        module = DecodeStep(family, model, cache, batch, length).eval()
        arguments = (ids[:, prompt : prompt + 1], torch.full((batch, 1), prompt))
        return torch.export.export(module, arguments, strict=True)


def run_program(program: Any, ids: Tensor, prompt: int) -> list[Tensor]:
    """Logits of an exported step for the tokens of ``ids`` from ``prompt`` on."""
    module = program.module()
    with torch.no_grad():
        return [
            module(ids[:, at : at + 1], torch.full((ids.shape[0], 1), at))
            for at in range(prompt, ids.shape[1])
        ]


def run_export(family: Family, attention: str, *, prompt: int = 11, steps: int = 8) -> Record:
    """One row through ``torch.export`` and ``quantize_exported``: ``steps`` tokens over a cache that holds a prompt."""
    import passes

    record = Record(family.name, attention, "export", notes=family.notes)
    model, ids = build(family, attention), tokens(2, prompt + steps)
    program = exported(family, model, dense_cache(family, model, ids.shape[1]), ids, prompt)
    before = len(passes.report().graphs)
    quantized = passes.quantize_exported(program, "none")
    record.take(passes.Report(passes.report().graphs[before:]))
    record.error = furthest(run_program(quantized, ids, prompt), run_program(program, ids, prompt))
    return record


def rows(family: Family) -> Iterator[tuple[str, Callable[..., Record]]]:
    """Attention and door of each row of a family."""
    for attention in family.attentions:
        yield attention, run_compile
        yield attention, run_export


# ---------------------------------------------------------------------------------------------------------- the table


def markdown(records: Sequence[Record]) -> str:
    """The table for the README: a line for each family and attention, with rewritten sites and the largest error by door."""
    doors = list(dict.fromkeys(record.door for record in records))
    lines = [
        f"| family | attention | {' | '.join(doors)} | left as they are |",
        f"|---|---|{'---|' * len(doors)}---|",
    ]
    grouped: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        name = f"{record.family} ({record.notes})" if record.notes else record.family
        grouped.setdefault((name, record.attention), {})[record.door] = record
    for (name, attention), by_door in grouped.items():
        cells = [_cell(by_door.get(door)) for door in doors]
        left = "; ".join(dict.fromkeys(reason for record in by_door.values() for reason in record.left))
        lines.append(f"| {name} | {attention} | {' | '.join(cells)} | {left} |")
    return "\n".join(lines)


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    if record.failure:
        return record.failure
    error = "" if record.error is None else f", {record.error:.0e}"
    return f"{record.rewritten} of {record.sites}{error}"


def run_rows(families: Sequence[Family], *, lower: str = "inductor") -> Iterator[Record]:
    """The record of every row; a row that fails says so in its record."""
    for family in families:
        for attention, door in rows(family):
            options = {"lower": lower} if door is run_compile else {}
            try:
                yield door(family, attention, **options)
            except Exception as error:
                name = "compile" if door is run_compile else "export"
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                yield Record(family.name, attention, name, failure=reason, notes=family.notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows, tell of each as it ends, and print the table. The exit status is 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="kvq models", description=main.__doc__)
    parser.add_argument("--family", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there, too")
    parser.add_argument(
        "--lower",
        choices=("inductor", "eager"),
        default="inductor",
        help="how compiled rows run (default: inductor)",
    )
    given = parser.parse_args(arguments)
    try:
        chosen = [get_family(name) for name in given.family] if given.family else list(FAMILIES)
    except KeyError as error:
        parser.error(str(error.args[0]))
    records: list[Record] = []
    for record in run_rows(chosen, lower=given.lower):
        records.append(record)
        outcome = record.failure or f"{record.rewritten} of {record.sites} sites, error {record.error:.0e}"
        print(f"{record.family} {record.attention} {record.door}: {outcome}", file=sys.stderr, flush=True)
    print(markdown(records))
    if given.json:
        given.json.write_text(json.dumps([asdict(record) for record in records], indent=2) + "\n")
    return int(any(record.failure for record in records))


if __name__ == "__main__":
    sys.exit(main())

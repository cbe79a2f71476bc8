"""Run a decoder through both doors, and compare it with the untouched one and with fake quantization."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import passes
from kvq_ops.formats import get_format
from kvq_ops.handle import QuantizedKV

from .cache_decoder import WIDTH, B, Decoder, Spelling

INT8 = "int8_per_token_head"
Step = Callable[[Tensor, Tensor], Tensor]


@contextlib.contextmanager
def scalars_in_graphs() -> Iterator[None]:
    """Let ``.item()`` become a size of the graph, as export does it, instead of a break."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def inputs(spelling: Spelling) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(B, tokens, WIDTH, generator=generator), torch.arange(first, first + tokens))
        for first, tokens in spelling.steps
    ]


def run(step: Step, spelling: Spelling) -> list[Tensor]:
    with torch.no_grad():
        return [step(x, position) for x, position in inputs(spelling)]


def example(spelling: Spelling) -> tuple[Tensor, Tensor]:
    """A decode step; where the number of tokens may not vary, the first call."""
    tokens = spelling.steps[0][1] if spelling.longest == 0 else 1
    return torch.randn(B, tokens, WIDTH), torch.arange(tokens)


def expected(net: Decoder, format: str) -> list[Tensor]:
    """Results with caches rounded to ``format``, in plain torch; those of the untouched model for ``none``."""
    plain = copy.deepcopy(net)
    if format != "none":
        plain.fake = format
    return run(plain, net.spelling)


def assert_same(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-6) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def assert_quantized(got: list[Tensor], dense: list[Tensor]) -> None:
    """That rounding shows: these are not the results of the dense model."""
    assert max((a - b).abs().max().item() for a, b in zip(got, dense, strict=True)) > 1e-4


def quantized(net: Decoder, format: str) -> tuple[Decoder, passes.Report]:
    copied = copy.deepcopy(net)
    return copied, passes.quantize_kv_cache_(copied, format, example(net.spelling))


def compiled(net: nn.Module, **options: object) -> Step:
    torch._dynamo.reset()
    return torch.compile(
        net, backend="kvq", fullgraph=True, dynamic=True, options={"lower": "eager", **options}
    )


def handles(net: nn.Module) -> dict[str, QuantizedKV]:
    return {name: one for name, one in net.named_buffers() if isinstance(one, QuantizedKV)}


def check_compile(spelling: Spelling, format: str) -> None:
    """All sites are rewritten; the compiled and the eager model give what they must."""
    net = Decoder(spelling)
    want = expected(net, format)
    ours, report = quantized(net, format)
    assert report.rewritten == report.found == spelling.layers, report.text()
    assert not [note for graph in report.graphs for note in graph.notes], report.text()
    assert sum(one.nbytes for one in handles(ours).values()) == sum(c.bytes for c in report.graphs[0].caches)
    eager = run(copy.deepcopy(ours), spelling)
    assert_same(eager, want)
    passes.clear_report()
    step = compiled(ours)
    assert_same(run(step, spelling), want)
    after = passes.report()
    assert after.rewritten == after.found >= spelling.layers, after.text()
    if format != "none":
        assert_quantized(eager, expected(net, "none"))


def exported(net: Decoder) -> ExportedProgram:
    spelling = net.spelling
    shapes, tokens = None, spelling.steps[0][1]
    if spelling.longest:
        dim = Dim("tokens", min=1, max=spelling.longest)
        shapes, tokens = ({1: dim}, {0: dim}), 3
    call = (torch.randn(B, tokens, WIDTH), torch.arange(tokens))
    with torch.no_grad():
        return torch.export.export(copy.deepcopy(net), call, dynamic_shapes=shapes)


def written_planes(program: ExportedProgram) -> set[str]:
    """Names of the buffers that the functional form of a program writes."""
    signature = program.run_decompositions().graph_signature
    return set(signature.buffers_to_mutate.values())


def check_export(spelling: Spelling, *formats: str, caches: set[str] | None = None) -> None:
    """As ``check_compile``, for the exported program; what it writes is exactly the planes of ``caches``.

    Args:
        caches: the names behind which ``_codes``, ``_scale`` and so on are put; all caches of the model by default.
    """
    if not spelling.longest:
        # One length only: call it with that one.
        same = [step for step in spelling.steps if step[1] == spelling.steps[0][1]]
        spelling = replace(spelling, steps=tuple(same))
    net = Decoder(spelling)
    program = exported(net)
    if caches is None:
        caches = set(dict(net.named_buffers())) - {"causal"}
    for format in formats:
        passes.clear_report()
        ours = passes.quantize_exported(program, format)
        assert passes.report().rewritten == passes.report().found == spelling.layers
        planes = [plane.name for plane in get_format(format).planes]
        assert written_planes(ours) == {f"{cache}_{plane}" for cache in caches for plane in planes}
        assert not caches & set(ours.state_dict)
        assert_same(run(ours.module(), spelling), expected(net, format))


def formats(net: nn.Module) -> dict[str, str]:
    return {
        name: one.format_name if isinstance(one, QuantizedKV) else "dense"
        for name, one in net.named_buffers()
        if name != "causal"
    }


def unchanged(net: nn.Module) -> object:
    """Checks later that no tensor of ``net`` was replaced or written."""
    tensors = {**dict(net.named_buffers()), **dict(net.named_parameters())}
    values = {name: one.clone() for name, one in tensors.items()}
    plain = {name: value for name, value in vars(net).items() if isinstance(value, (int, str, float, list))}
    plain = copy.deepcopy(plain)

    def check() -> None:
        now = {**dict(net.named_buffers()), **dict(net.named_parameters())}
        assert all(now[name] is tensors[name] for name in tensors)
        assert all(torch.equal(now[name], values[name]) for name in tensors)
        assert all(vars(net)[name] == value for name, value in plain.items())

    return check

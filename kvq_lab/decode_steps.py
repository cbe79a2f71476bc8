"""Decode steps of one model that run compiled, each with a cache of its own, beside one another in one process."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

# The row of the model with its own cache, which the others are held against.
UNQUANTIZED = "unquantized"


def compiled_apart(model: Any, **options: Any) -> Callable[..., Any]:
    """``torch.compile`` with code of its own: variants would share one recompile limit and try each other's guards."""
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(model, **options)
    return compiled


@contextlib.contextmanager
def room_for_recompiles(count: int) -> Iterator[None]:
    """Where compiled code is shared between variants, allow one compilation for each."""
    from torch._dynamo import config

    with config.patch(recompile_limit=max(config.recompile_limit, 2 * count)):
        yield


class Decoder:
    """Greedy decoding, a token for each call."""

    def __init__(self, forward: Callable[..., Any], argument: str, cache: Any, token: torch.Tensor) -> None:
        self.forward, self.keywords = forward, {argument: cache, "use_cache": True}
        self.token = token

    def __call__(self) -> torch.Tensor:
        logits = self.forward(self.token, **self.keywords).logits
        self.token = logits[:, -1:].argmax(-1)
        return self.token

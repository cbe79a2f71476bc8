"""What a model calls its layers: paths of modules, and types such as ``sliding_attention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .candidates import Layer

__all__ = ["LayerName", "LayerNames"]


@dataclass(frozen=True)
class LayerName:
    """Path of the module whose attention it is, and its type where the model names types."""

    module: str
    kind: str | None


class LayerNames:
    """Names of the layers of ``model``, in the order of their attention."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        self.layers = [LayerName(self.clean(one.module), None) for one in layers]
        kinds = [_kind(model, one.module) for one in self.layers]
        listed = getattr(getattr(model, "config", None), "layer_types", None)
        if listed is not None and len(listed) == len(kinds):
            kinds = [own or str(given) for own, given in zip(kinds, listed, strict=True)]
        self.layers = [LayerName(one.module, kind) for one, kind in zip(self.layers, kinds, strict=True)]

    def of(self, layer: int) -> LayerName:
        return self.layers[layer]

    @staticmethod
    def clean(path: str) -> str:
        """A path as ``named_modules`` spells it."""
        return path.removeprefix("L['model']").removeprefix("L['self']").strip(".")


def _kind(model: nn.Module, path: str) -> str | None:
    """The type that the module at ``path``, or the nearest around it, says it has."""
    parts = path.split(".") if path else []
    for end in range(len(parts), 0, -1):
        try:
            module = model.get_submodule(".".join(parts[:end]))
        except AttributeError:
            continue
        for attribute in ("layer_type", "attention_type"):
            value = getattr(module, attribute, None)
            if isinstance(value, str):
                return value
        sliding = getattr(module, "is_sliding", None)
        if isinstance(sliding, bool):
            return "sliding_attention" if sliding else "full_attention"
    return None

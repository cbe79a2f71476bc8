"""Put other tensors where a model or an argument holds certain tensors, wherever that is."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["Holders"]

_OPAQUE = (
    Tensor,
    type,
    str,
    bytes,
    int,
    float,
    complex,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type(None),
)

Place = Callable[[Any], None]


class Holders:
    """Every place from which the tensors below some objects are reached: buffers, attributes, items of lists and dicts.

    A tensor in a tuple is held by what holds the tuple, which gets another tuple.
    """

    def __init__(self, *roots: Any) -> None:
        self.places: dict[int, list[tuple[Place, Tensor]]] = {}
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        for root in roots:
            self._visit(root)

    def tensors(self) -> Iterator[Tensor]:
        """Each tensor that is held, once."""
        for places in self.places.values():
            yield places[0][1]

    def holds(self, tensor: Tensor) -> bool:
        return id(tensor) in self.places

    def replace(self, others: Mapping[int, Tensor]) -> None:
        """Put ``others[id(tensor)]`` in place of each tensor; all or, when that fails anywhere, none."""
        done: list[tuple[Place, Tensor]] = []
        try:
            for key, other in others.items():
                for place, tensor in self.places.get(key, ()):
                    done.append((place, tensor))
                    place(other)
        except BaseException:
            for place, tensor in reversed(done):
                place(tensor)
            raise

    # ------------------------------------------------------------------------------------------------------ the walk

    def _visit(self, owner: Any) -> None:
        if isinstance(owner, _OPAQUE) or id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        self._alive.append(owner)
        if isinstance(owner, nn.Module):
            for attribute, value in list(owner.__dict__.items()):
                # Hooks and parameters hold no caches; submodules and buffers are dicts like any other.
                if attribute not in ("_parameters", "training") and not attribute.endswith("_hooks"):
                    self._hold(value, _set_item(owner.__dict__, attribute))
        elif isinstance(owner, dict):
            for key, value in list(owner.items()):
                self._hold(value, _set_item(owner, key))
        elif isinstance(owner, list):
            for i, value in enumerate(owner):
                self._hold(value, _set_item(owner, i))
        elif not isinstance(owner, (tuple, set, frozenset)):
            for attribute in _attributes(owner):
                self._hold(getattr(owner, attribute, None), _set_attribute(owner, attribute))

    def _hold(self, value: Any, place: Place) -> None:
        if isinstance(value, nn.Parameter):
            return
        if isinstance(value, Tensor):
            self.places.setdefault(id(value), []).append((place, value))
        elif isinstance(value, tuple):
            self._hold_tuple(value, place)
        else:
            self._visit(value)

    def _hold_tuple(self, value: tuple[Any, ...], place: Place) -> None:
        # Several items may change one after the other, so the tuple is made from what its items are by then.
        items = list(value)

        def put(i: int) -> Place:
            def set_item(other: Any) -> None:
                items[i] = other
                place(value._make(items) if hasattr(value, "_make") else type(value)(items))

            return set_item

        for i, item in enumerate(value):
            self._hold(item, put(i))


def _attributes(owner: Any) -> list[str]:
    names = list(getattr(owner, "__dict__", ()))
    if dataclasses.is_dataclass(owner):
        names += [one.name for one in dataclasses.fields(owner) if one.name not in names]
    return names


def _set_item(owner: Any, key: Any) -> Place:
    def put(value: Any) -> None:
        owner[key] = value

    return put


def _set_attribute(owner: Any, attribute: str) -> Place:
    def put(value: Any) -> None:
        try:
            setattr(owner, attribute, value)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(owner, attribute, value)

    return put

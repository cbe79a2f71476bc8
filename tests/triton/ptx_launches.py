"""The launchers of ``kvq_ops.triton_kernels`` with the PTX simulator in place of a GPU.

Launchers run as they are, on CPU tensors: they choose kernels, configurations and arguments for the named target, every launch
is compiled for it (``ptx_compiler``), and what was compiled runs in ``tests/ptx`` on the memory of the tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tests.ptx.parser import Entry
from tests.ptx.simulator import Fault, GlobalMemory, entry_of, run
from tests.triton.offline import VERSIONS
from tests.triton.ptx_compiler import Compiled, Pointer, compile_launch

__all__ = ["Fault", "Simulation", "simulated"]

Change = Callable[[str, str], str]


@functools.lru_cache(maxsize=128)
def _parsed(ptx: str) -> Entry:
    return entry_of(ptx)


class _Memory:
    """Tensors as addresses; tensors that share memory share a buffer, which starts at a multiple of 2**40.

    Memory is kept until the end, so that no new tensor gets an address that is known. What ``new_empty`` made may not be read
    before a kernel wrote it.
    """

    def __init__(self, readable: Mapping[int, np.ndarray]) -> None:
        self.memory = GlobalMemory()
        self._readable: dict[int, np.ndarray | bool] = dict(readable)
        self._known: dict[int, int] = {}
        self._fresh: list[Tensor] = []

    def address(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if where not in self._known:
            octets: np.ndarray = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._known[where] = self.memory.add(octets, readable=self._readable.get(where, True))
        return self._known[where] + tensor.storage_offset() * tensor.element_size()

    def new_empty(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = _NEW_EMPTY(tensor, *args, **kwargs)
        self._fresh.append(made)
        self._readable[made.untyped_storage().data_ptr()] = False
        return made


_NEW_EMPTY = Tensor.new_empty


@dataclasses.dataclass
class Simulation:
    """What ran.

    Attributes:
        launches: how often each kernel was started.
        opcodes: warp instructions.
        compiled: the kernels, in the order of their launches.
    """

    launches: Counter[str] = dataclasses.field(default_factory=Counter)
    opcodes: Counter[str] = dataclasses.field(default_factory=Counter)
    compiled: list[Compiled] = dataclasses.field(default_factory=list)


def _constant(value: Any) -> Any:
    return int(value) if isinstance(value, (bool, np.integer)) else value


@contextlib.contextmanager
def simulated(
    target: str,
    *,
    version: str = VERSIONS[0],
    schedule: int | None = None,
    config: Mapping[str, int] | None = None,
    splits: int = 0,
    change: Change | None = None,
    readable: Mapping[int, np.ndarray] | None = None,
) -> Iterator[Simulation]:
    """Launches run for ``target`` in the simulator.

    Args:
        schedule: seed of a random order of warps; lockstep unless given.
        config: launch parameters in place of those that are chosen.
        splits: into how many parts attention cuts tokens, if not the launcher's choice.
        change: of the name and the PTX of a kernel before it runs, to plant a fault.
        readable: for storages, by address, which bytes may be read.
    """
    simulation = Simulation()
    places = _Memory(readable or {})

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = self.arg_names
        bound = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        passed = {k: places.address(v) if isinstance(v, Tensor) else v for k, v in bound.items()}
        described = {
            k: Pointer(v.dtype, passed[k]) if isinstance(v, Tensor) else _constant(v)
            for k, v in bound.items()
        }
        options = {k: v for k, v in kwargs.items() if k not in names}
        made = compile_launch(target, version, self.fn.__module__, self.fn.__name__, (), described | options)
        assert not made.scratch, "no kernel of ours needs scratch memory"
        simulation.launches[self.fn.__name__] += 1
        simulation.compiled.append(made)
        text = made.ptx if change is None else change(self.fn.__name__, made.ptx)
        given = [passed[name] for name in made.parameters]
        entry = _parsed(text)
        # What follows are pointers to scratch memory, null where a kernel needs none.
        scratch = entry.parameters[len(given) :]
        assert all(parameter.size == 8 for parameter in scratch) and len(scratch) <= 2, entry.parameters
        given += [0] * len(scratch)
        grid = (*(int(n) for n in grid), 1, 1)[:3]
        done = run(
            entry,
            grid,
            (32 * made.warps, 1, 1),
            given,
            places.memory,
            shared=made.shared,
            schedule=schedule,
            replicated=True,
        )
        simulation.opcodes.update(done.opcodes)

    from kvq_ops.triton_kernels import attention

    where = ("cuda", int(target.removeprefix("sm_")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", launch)
        patch.setattr(Tensor, "new_empty", lambda tensor, *a, **k: places.new_empty(tensor, *a, **k))
        for name, module in list(sys.modules.items()):
            if name.startswith("kvq_ops.triton_kernels."):
                if hasattr(module, "target"):
                    patch.setattr(module, "target", lambda: where)
                if config is not None and name.rpartition(".")[2] in ("attention", "dequantize"):
                    chosen = module.config_for
                    patch.setattr(module, "config_for", lambda *a, f=chosen: f(*a) | config)
        if splits:
            patch.setattr(attention, "count_splits", lambda programs, blocks, slots: splits)
        yield simulation

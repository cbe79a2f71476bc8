"""Caches of other projects, through transformers' own ``QuantizedCache``, as rows beside ours.

They keep the newest tokens exact too (128 here, as their default is), and quantize the whole history again when those are
full. Ours to compare with are formats with ``+recent128``. The keys' axis is what makes most of the difference: the default is
per token, and ``-per-channel`` is what the KIVI paper does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from kvq_lab.environment import version_of
from kvq_lab.eval_caches import Contender, sized
from kvq_lab.evaluate import live_bytes
from kvq_ops.errors import FormatError, KVQError

GROUP = 64
RESIDUAL = 128


class PeerError(KVQError, RuntimeError):
    """A peer that is not installed, or that cannot hold what is measured."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A configuration of transformers' quantized cache."""

    package: str
    backend: str
    bits: int
    key_axis: int
    value_axis: int
    note: str


def _table() -> dict[str, Peer]:
    peers = {}
    for bits in (4, 2):
        peers[f"quanto{bits}"] = Peer("optimum-quanto", "quanto", bits, 0, 0, "default axes: per token")
        peers[f"quanto{bits}-per-channel"] = Peer("optimum-quanto", "quanto", bits, -1, 0, "keys per channel")
    for bits in (8, 4, 2):
        peers[f"hqq{bits}"] = Peer("hqq", "hqq", bits, 1, 1, "axis 1")
    peers["hqq4-axis0"] = Peer("hqq", "hqq", 4, 0, 0, "default axes")
    return peers


PEERS = _table()


def check_peer(name: str) -> Peer:
    """The peer called ``name``.

    Raises:
        FormatError: for an unknown name; PeerError: if its package is not installed.
    """
    if name not in PEERS:
        raise FormatError("a peer to compare with", got=repr(name), allowed=", ".join(PEERS))
    peer = PEERS[name]
    if version_of(peer.package) is None:
        raise PeerError(
            f"the peer {name!r}",
            got=f"the package {peer.package} is not installed",
            do="pip install 'kvq-ops[peers]', or pip install "
            + ("--no-deps --no-build-isolation hqq" if peer.package == "hqq" else peer.package),
        )
    return peer


def peer(name: str, config: Any) -> Contender:
    """A contender of this name."""
    row = check_peer(name)

    def new_cache(rows: int, tokens: int) -> Any:
        from transformers.cache_utils import QuantizedCache

        try:
            return QuantizedCache(
                backend=row.backend,
                config=config,
                nbits=row.bits,
                axis_key=row.key_axis,
                axis_value=row.value_axis,
                q_group_size=GROUP,
                residual_length=RESIDUAL,
            )
        except (ValueError, ImportError) as error:
            raise PeerError(f"a cache of the peer {name!r}", got=str(error).strip()) from error

    return Contender(name, new_cache, _peer_bytes, peer=True)


def _parts(stored: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Codes, scales and zero points of one quantized tensor, as quanto or HQQ keep them."""
    if isinstance(stored, tuple):
        packed, meta = stored
        yield "codes", packed
        yield "scales", meta["scale"]
        yield "minima", meta["zero"]
        return
    packed = stored._data  # a tensor of its own class around the bytes
    yield "codes", packed._data if hasattr(packed, "_data") else packed
    yield "scales", stored._scale
    yield "minima", stored._shift


def _all_parts(cache: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for layer in cache.layers:
        for name in ("_quantized_keys", "_quantized_values"):
            stored: Any = getattr(layer, name, None)
            if stored is not None:
                yield from _parts(stored)
        for name in ("keys", "values"):
            tensor: Any = getattr(layer, name, None)
            if isinstance(tensor, torch.Tensor):
                yield "exact", tensor


def _peer_bytes(cache: Any) -> dict[str, int]:
    found = sized(_all_parts(cache))
    found["other"] += live_bytes(cache) - sum(found.values())
    return found

"""Which layer gets which format.

A policy is a default format with exceptions: by layer index (negative counts from the end), by a pattern on the name of the
cache or module (``fnmatch``), or by layer type such as ``sliding_attention`` where the model names types.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from .calibration import Calibration
from .errors import CalibrationError, FormatError
from .formats import Format, KVFormat, parse_kv_format

__all__ = ["Policy"]

Which: TypeAlias = int | str


@dataclass(frozen=True)
class Policy:
    """Formats by layer.

    Attributes:
        default: for layers that nothing else speaks of.
        layers: exceptions, the first match wins.
        skip: layers that stay dense.
        calibration: scales and codebooks fitted beforehand; formats with scales that span tokens then use them (``+static``).
    """

    default: KVFormat
    layers: tuple[tuple[Which, KVFormat], ...] = ()
    skip: tuple[Which, ...] = field(default=())
    calibration: Calibration | None = field(default=None, compare=False)

    @staticmethod
    def of(
        format: str | Format | KVFormat | Policy,
        *,
        layers: Mapping[Which, str | Format | KVFormat] | None = None,
        skip: Sequence[Which] | Which = (),
        calibration: Calibration | None = None,
    ) -> Policy:
        """A policy from what users write.

        Args:
            format: the default, or a policy, whose exceptions come after the ones given here.
            layers: ``{3: "int8_per_token_head", "sliding_attention": "int4_group32"}``.
            skip: indices, name patterns or layer types to leave alone.
            calibration: what was fitted beforehand, by layer; instead of the policy's own, if ``format`` is one.

        Raises:
            FormatError, UnknownFormatError: on names that are no formats and keys that are no layers.
            CalibrationError: there is a calibration, and no format that could use one.
        """
        base = format if isinstance(format, Policy) else Policy(parse_kv_format(format))
        left = (skip,) if isinstance(skip, (int, str)) else tuple(skip)
        exceptions = tuple((which, parse_kv_format(f)) for which, f in (layers or {}).items())
        for which in (*left, *(which for which, _ in exceptions)):
            if isinstance(which, bool) or not isinstance(which, (int, str)):
                raise FormatError(
                    "a layer in layers= or skip=",
                    got=repr(which),
                    allowed="an index, a name pattern, or a layer type",
                    do='name layers as in skip=(0, -1) or layers={"sliding_attention": "none"}',
                )
        calibration = base.calibration if calibration is None else calibration
        result = Policy(base.default, exceptions + base.layers, left + base.skip, calibration)
        formats = [base.default, *(pair for _, pair in result.layers)]
        if calibration is not None and not any(pair.calibratable for pair in formats):
            raise CalibrationError(
                "calibration=",
                got=f"formats that have nothing to calibrate: {', '.join(dict.fromkeys(map(str, formats)))}",
                allowed="formats with scales that span tokens, such as fp8_e4m3, fp8_per_head, nvfp4 or nuq4",
                do="leave calibration= out: these formats compute their scales from each token",
            )
        return result

    def choose(
        self,
        index: int,
        name: str | Sequence[str] = "",
        kind: str | None = None,
        count: int | None = None,
    ) -> KVFormat | None:
        """The format of a layer, or ``None`` to leave it dense.

        Args:
            index: of the layer, from 0.
            name: of its cache or module, or all names it goes by.
            kind: its type, where the model names types.
            count: number of layers, which negative indices need.
        """
        names = (name,) if isinstance(name, str) else tuple(name)
        if any(_matches(which, index, names, kind, count) for which in self.skip):
            return None
        chosen = next(
            (f for which, f in self.layers if _matches(which, index, names, kind, count)), self.default
        )
        return chosen if self.calibration is None else chosen.calibrated()

    def static(self, layer: int, side: str, format: Format, shape: Sequence[int]) -> dict[str, Tensor] | None:
        """Calibrated planes for the ``"key"`` or ``"value"`` cache ``[B, H, T, D]`` of a layer; ``None`` if it needs none.

        Raises:
            CalibrationError: it needs some and there are none, or they do not fit.
        """
        if not format.calibrated:
            return None
        return (self.calibration or Calibration()).static(layer, side, format, shape)

    def check_layers(self, count: int) -> None:
        """Raise ``CalibrationError`` if the calibration speaks of layers beyond ``count``."""
        if self.calibration is not None:
            self.calibration.check_layers(count)

    def check(self, layers: Sequence[tuple[int, Sequence[str], str | None]], count: int) -> None:
        """Raise ``FormatError`` if an exception speaks of none of ``layers``, each with its index, names and type.

        Args:
            count: number of layers; one that goes by several names may come several times.
        """
        for which in (*self.skip, *(which for which, _ in self.layers)):
            if any(_matches(which, index, names, kind, count) for index, names, kind in layers):
                continue
            kinds = sorted({kind for _, _, kind in layers if kind is not None})
            known = [name for _, names, _ in layers for name in names if name]
            raise FormatError(
                "a layer in layers= or skip=",
                got=f"{which!r}, which no layer is",
                allowed=f"{-count}..{count - 1}" if count else "nothing: there are no layers with a cache",
                do=f"or use a layer type ({', '.join(kinds) or 'none here'}) or a pattern on names such as "
                f"{', '.join(map(repr, known[:4])) or 'none here'}",
            )


def _matches(which: Which, index: int, names: Sequence[str], kind: str | None, count: int | None) -> bool:
    if isinstance(which, int):
        return which == index or (which < 0 and count is not None and which + count == index)
    return which == kind or any(fnmatch.fnmatchcase(name, which) for name in names if name)

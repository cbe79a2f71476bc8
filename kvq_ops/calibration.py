"""What is fitted before a cache is used: scales that span tokens, and codebooks.

    static = fit(keys, get_format("fp8_per_head+static"))               # planes by name, from sample keys [B, H, T, D]
    QuantizedKV.empty(shape, "fp8_per_head+static", static=static)

A :class:`Calibration` holds such planes for the layers of a model, is saved and loaded, and reads the scales that checkpoints
carry. A scale that is missing is an error; there is no default.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .codecs import codec_for, outlier_distance, prepare
from .codecs.codebook import fit_channels, normalized
from .codecs.kmeans import fit_entries
from .codecs.outliers import split_outliers
from .errors import CalibrationError, CorruptStoreError
from .files import read_file, unreadable, write_file
from .formats import Format, KVFormat, get_format, parse_kv_format

__all__ = ["Calibration", "check_static", "fit"]

SIDES = ("key", "value")
_KIND, _VERSION = "kvq.calibration", 1

Planes = dict[str, Tensor]


def fit(x: Tensor, format: Format, *, weight: Tensor | None = None, inv_freq: Tensor | None = None) -> Planes:
    """Static planes of ``format`` fitted to sample keys or values.

    Args:
        x: ``[B, H, T, D]``, as the cache receives them, token ``t`` at slot ``t``.
        weight: of the same shape, how much an error in each value matters, such as its squared gradient (the diagonal of the
            Fisher information, as KVQuant takes it); for codebooks, all alike unless given.
        inv_freq: ``[D / 2]``, radians a step by which rotary embedding turned these keys (halves of the vector are paired); a
            format that can codes them as they were before. Others ignore it.

    Returns:
        Planes by name; empty for a format without static planes.

    Raises:
        CalibrationError: ``x`` holds nothing to fit to.
    """
    row = format.base or format
    static: Planes = {}
    if not row.static_planes:
        return static
    if x.dim() != 4 or x.numel() == 0 or not bool((x.isfinite() & (x != 0)).any()):
        raise CalibrationError(
            f"fitting format {format.name!r}",
            got=f"a sample of shape {tuple(x.shape)} without a finite value other than zero",
            allowed="keys or values [B, H, T, D] of real text",
            do="run the model on some hundred tokens of text and fit to what its layers cache",
        )
    position = None
    if "position" in row._index:
        half = x.shape[-1] // 2
        static["inv_freq"] = torch.zeros(half) if inv_freq is None else inv_freq.detach().float().cpu()
        if tuple(static["inv_freq"].shape) != (half,):
            raise CalibrationError(
                f"fitting format {format.name!r}",
                got=f"inv_freq of shape {tuple(static['inv_freq'].shape)}",
                allowed=f"[{half}], half of head_dim",
                do="give the inv_freq of the rotary embedding that turned these keys, or None where none did",
            )
        position = torch.arange(1, x.shape[2] + 1).view(1, 1, -1)
    x = x.detach().cpu()
    sample = prepare(x, row, static, position)
    if "codebook" not in row._index:
        if row.outliers:
            sample = _without_outliers(sample, row, static)
        return codec_for(row).calibrate(sample, row)
    if weight is not None:
        # A gradient turns as its vector does; squares alone do not say where to. Pairs and blocks share theirs.
        weight = _spread_weight(weight.detach().cpu().float(), row)
    if row.group is None:
        static |= fit_channels(sample)
        # What is kept exactly need not lie in the range, and which values those are depends on it. Two rounds are enough: the
        # range only has to hold the rest, among it the first tokens, whose keys are unlike all others.
        for _ in range(2 if row.outliers else 0):
            static |= fit_channels(_without_outliers(sample, row, static))
    if row.outliers:
        sample = _without_outliers(sample, row, static)
    z = normalized(sample, row, static)
    used = z.isfinite()
    weights = torch.ones_like(z) if weight is None else weight
    if not bool(used.any()):
        raise CalibrationError(
            f"fitting format {format.name!r}",
            got="a sample without spread in any channel",
            allowed="real text",
            do="fit to keys or values of more than one token of text",
        )
    # An error in z is half_range times as large in x.
    span = _half_range(sample, row, static)
    entries = fit_entries(z[used], (weights * span.square())[used], 2**row.bits)
    return {"codebook": entries, **static}


def _without_outliers(x: Tensor, row: Format, static: Mapping[str, Tensor]) -> Tensor:
    count = row.outlier_count(x.shape[-1])
    return split_outliers(x, count, outlier_distance(x, row, static), dtype=torch.float32)[2]


def _half_range(x: Tensor, row: Format, static: Mapping[str, Tensor]) -> Tensor:
    if row.group is None:
        return static["half_range"].float()[None, :, None].expand(x.shape)
    ok = x.isfinite()
    high = torch.where(ok, x, -torch.inf).amax(-1, keepdim=True)
    low = torch.where(ok, x, torch.inf).amin(-1, keepdim=True)
    return ((high - low) / 2).clamp_min(0.0).expand(x.shape)


def _spread_weight(weight: Tensor, row: Format) -> Tensor:
    if row.rotation:
        return weight.mean(-1, keepdim=True).expand(weight.shape)
    if "position" in row._index:
        low, high = weight.chunk(2, -1)
        return ((low + high) / 2).repeat(1, 1, 1, 2)
    return weight


def check_static(
    static: Mapping[str, Tensor], format: Format, shape: Sequence[int], where: str = ""
) -> Planes:
    """``static`` if it is what ``format`` needs for a cache ``[B, H, T, D]``, else ``CalibrationError``.

    One scale for the tensor may serve a format with one for each head, which is the same; the reverse may not.
    """
    asked = f"calibrated planes of format {format.name!r}" + (f" for {where}" if where else "")
    rows = [format.planes[i] for i in format.static_planes]
    names = [plane.name for plane in rows]
    if set(static) != set(names):
        missing, extra = sorted(set(names) - set(static)), sorted(set(static) - set(names))
        raise CalibrationError(
            asked,
            got="; ".join(
                f"{word} {', '.join(part)}" for word, part in (("no", missing), ("also", extra)) if part
            ),
            allowed=", ".join(names) or "none: this format computes its scales from each token",
            do="calibrate for this very format",
        )
    checked: Planes = {}
    for plane in rows:
        want, given = plane.shape(*shape), static[plane.name]
        if tuple(given.shape) != want and not (given.numel() == 1 and plane.axes in ("1", "H")):
            raise CalibrationError(
                asked,
                got=f"{plane.name} of shape {tuple(given.shape)}",
                allowed=str(want),
                do="use the format of that granularity (per tensor or per head), or calibrate for this model",
            )
        assert plane.dtype is not None
        checked[plane.name] = given.detach().to(plane.dtype).reshape(-1).expand(math.prod(want)).reshape(want)
    first = checked[names[0]] if names else torch.ones(1)
    usable = bool((first > 0).all()) if names and names[0] != "codebook" else bool((first.diff() > 0).all())
    if not usable or not all(bool(plane.isfinite().all()) for plane in checked.values()):
        raise CalibrationError(
            asked,
            got=f"{names[0]} {first.flatten()[:8].tolist()}",
            allowed="finite positive scales, ascending codebooks",
            do="calibrate again; a checkpoint that says -1 or 0 here was never calibrated",
        )
    return checked


def _meaning(format: Format) -> tuple[Any, ...]:
    """What calibrated planes depend on: formats that agree in it can share them."""
    row = format.base or format
    names = tuple(row.planes[i].name for i in row.static_planes)
    return row.codec, row.bits, row.element, row.rotation, row.outliers, names


@dataclass
class Calibration:
    """Static planes by layer and side.

    Attributes:
        planes: by ``(layer, "key")`` and ``(layer, "value")``.
        notes: in the same way, how they were made, for reports.
        ignored: names of a checkpoint that look like scales and were not used.
        formats: in the same way, the format that they were fitted for, where that is known.
    """

    planes: dict[tuple[int, str], Planes] = field(default_factory=dict)
    notes: dict[tuple[int, str], str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    formats: dict[tuple[int, str], str] = field(default_factory=dict)

    def static(self, layer: int, side: str, format: Format, shape: Sequence[int]) -> Planes | None:
        """Planes for one cache ``[B, H, T, D]``; ``None`` for a format that needs none.

        Raises:
            CalibrationError: they are missing, or do not fit the format or the shape.
        """
        if not format.static_planes:
            return None
        where = f"the {side}s of layer {layer}"
        if (layer, side) not in self.planes:
            known = sorted(self.planes)
            raise CalibrationError(
                f"calibrated planes of format {format.name!r} for {where}",
                got="none",
                allowed=f"one entry for each layer and side; there are {len(known)}"
                + (f", from {known[0]} to {known[-1]}" if known else ""),
                do="calibrate this layer too, leave it unquantized (skip=), or choose a format with dynamic scales",
            )
        made_for = self.formats.get((layer, side))
        if made_for and _meaning(get_format(made_for)) != _meaning(format):
            raise CalibrationError(
                f"calibrated planes of format {format.name!r} for {where}",
                got=f"planes that were fitted for {made_for!r}, whose codes mean other values",
                allowed="the same format; windows, sinks, and one scale for a tensor or each head may differ",
                do="calibrate for this very format",
            )
        return check_static(self.planes[layer, side], format, shape, where)

    def check_layers(self, count: int) -> None:
        """Raise ``CalibrationError`` if there are planes for layers that a model of ``count`` layers does not have."""
        beyond = sorted({layer for layer, _ in self.planes if not 0 <= layer < count})
        if beyond:
            raise CalibrationError(
                "a calibration for this model",
                got=f"planes for layer {', '.join(map(str, beyond[:8]))}",
                allowed=f"0..{count - 1}: the model has {count} layers with a cache",
                do="calibrate this very model; only(...) drops entries on purpose",
            )

    def only(self, keep: Iterable[tuple[int, str]]) -> Calibration:
        """A calibration with these entries alone."""
        kept = set(keep)
        return Calibration(
            {at: planes for at, planes in self.planes.items() if at in kept},
            {at: note for at, note in self.notes.items() if at in kept},
            formats={at: name for at, name in self.formats.items() if at in kept},
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to ``path``, for :meth:`load`."""
        entries = [
            {
                "layer": layer,
                "side": side,
                "planes": dict(planes),
                "note": self.notes.get((layer, side), ""),
                "format": self.formats.get((layer, side), ""),
            }
            for (layer, side), planes in sorted(self.planes.items())
        ]
        write_file(path, _KIND, _VERSION, {"entries": entries})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """What :meth:`save` wrote.

        Raises:
            CorruptStoreError: the file is damaged, cut off, or of another kind or version.
        """
        content = read_file(path, _KIND, _VERSION, "a calibration")
        result = Calibration()
        try:
            for entry in content["entries"]:
                at = (int(entry["layer"]), str(entry["side"]))
                if at[1] not in SIDES or not all(isinstance(p, Tensor) for p in entry["planes"].values()):
                    raise CorruptStoreError("an entry of a calibration", got=repr(at))
                result.planes[at], result.notes[at] = dict(entry["planes"]), str(entry["note"])
                result.formats[at] = str(entry.get("format", ""))
        except (CorruptStoreError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise unreadable(path, "a calibration", f"{type(error).__name__}: {error}") from error
        return result

    @staticmethod
    def from_checkpoint(
        weights: Mapping[str, Tensor] | str | os.PathLike[str], format: str | Format | KVFormat
    ) -> Calibration:
        """The scales that a checkpoint carries for its KV cache.

        Read are, with the layer's number anywhere before: ``k_scale`` and ``v_scale`` (vLLM, ModelOpt), ``k_proj.output_scale``
        and ``v_proj.output_scale`` (compressed-tensors, Quark, AutoFP8), ``kv_scale`` for both. Each is what a reader
        multiplies by, which is ``scale`` of the fp8 formats (integer ones stand for other numbers) and ``decode_scale`` of
        ``nvfp4``. Scales of queries and probabilities are not ours and are listed in ``ignored``; zero points must be zero.

        Args:
            weights: tensors by name, a safetensors file, or a folder of them.

        Raises:
            CalibrationError: no scales, the same one twice, or numbers that are no scales.
        """
        pair = parse_kv_format(format)
        result = Calibration()
        names = weights.items() if isinstance(weights, Mapping) else _safetensors(Path(weights))
        for name, tensor in names:
            match = _SCALE.fullmatch(name)
            if match is None:
                continue
            kind = match["kind"]
            if kind.startswith(("q_", "prob_")):
                result.ignored.append(name)
                continue
            if kind.endswith("zero_point"):
                if bool((tensor != 0).any()):
                    raise CalibrationError(
                        f"the cache scales of a checkpoint: {name}",
                        got=f"a zero point {tensor.flatten()[:4].tolist()}",
                        allowed="symmetric scales",
                        do="choose a checkpoint whose cache scales are symmetric, or calibrate on text",
                    )
                continue
            for side in SIDES if kind == "kv_scale" else ("key" if kind[0] == "k" else "value",):
                at = (int(match["layer"]), side)
                row: Format = getattr(pair, side)
                if at in result.planes:
                    raise CalibrationError(
                        "the cache scales of a checkpoint",
                        got=f"{result.notes[at]} and {name} for the {side}s of layer {at[0]}",
                        allowed="one of them",
                        do="give the tensors of one naming scheme only, as a mapping",
                    )
                if len(row.static_planes) != 1 or row.codec not in ("float8", "block_scaled"):
                    raise CalibrationError(
                        f"the cache scales of a checkpoint for format {row.name!r}",
                        got=name,
                        allowed="a format with one scale for the tensor or each head",
                        do="ask for fp8_e4m3, fp8_per_head or nvfp4, or calibrate this format on text",
                    )
                result.planes[at] = {
                    row.planes[row.static_planes[0]].name: tensor.detach().float().reshape(-1)
                }
                result.notes[at] = name
        if not result.planes:
            raise CalibrationError(
                "the cache scales of a checkpoint",
                got="none of the names that are known",
                allowed="...layers.N....k_scale, v_scale, kv_scale, k_proj.output_scale, v_proj.output_scale",
                do="calibrate on sample text instead, or choose a format with dynamic scales",
            )
        return result


_SCALE = re.compile(
    r"(?:.*\.)?(?:layers|h|blocks|layer|block)\.(?P<layer>\d+)\.(?:.+\.)?"
    r"(?P<kind>(?:kv|k|v|q|prob)_scale|[kvq]_proj\.output_scale|[kv]_(?:proj\.output_)?zero_point)"
)


def _safetensors(path: Path) -> Iterable[tuple[str, Tensor]]:
    from safetensors import safe_open

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        with safe_open(str(file), framework="pt") as content:  # type: ignore[no-untyped-call, unused-ignore]
            names: list[Any] = [name for name in content.keys() if _SCALE.fullmatch(name)]  # noqa: SIM118
            for name in names:
                yield name, content.get_tensor(name)

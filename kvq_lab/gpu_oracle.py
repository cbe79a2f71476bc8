"""Attention in float64 by its definition, and how far a kernel may be from it.

The definition is written out here once more, apart from ``kvq_ops.reference``, so that a kernel and its oracle share no line.
Only the meaning of codes is taken from ``kvq_ops`` (``kvq_ops.reference.decode_store``), which the tests hold against numpy.

**How far.** A kernel differs from the definition by roundings that know nothing of each other, so the error of an output is
a sum of many independent ones, and its standard deviation follows from the data. With ``u`` the unit of the arithmetic
(``2**-11`` in fp16, ``2**-8`` in bf16, ``2**-24`` in fp32; a rounding is uniform, so its variance is ``u**2 / 3`` of the square)
and ``R`` roundings on the way to a number of the tile,

    var(score_t) = scale**2 * R u**2 / 3 * sum_d (q_d k_td)**2 + (2**-23 score_t)**2
    var(out)     = sum_t p_t**2 ((v_t - out)**2 var(score_t) + (R + 2) u**2 / 3 * v_t**2) + T 2**-48 / 3 * (sum_t p_t |v_t|)**2

How many standard deviations are allowed follows from how many numbers are compared. A sum of independent roundings, each of at
most ``a_i`` to either side, is off by ``t`` or more with a chance of at most ``2 exp(-t**2 / (2 sum a_i**2))`` (W. Hoeffding,
Probability inequalities for sums of bounded random variables, 1963, theorem 2); a variance above is ``a_i**2 / 3``. So

    t = sqrt(6 log(2 n / CHANCE)) standard deviations

keep all ``n`` outputs of a comparison within ``t`` but for a chance of ``CHANCE``: 14 for a hundred thousand. To that comes the
rounding of the result. A token that is dropped, doubled or read from the wrong place moves an output by far more.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from kvq_ops.formats import Format

ROUNDINGS = 6
"""At most: four where scales belong to channels, one where vectors are rotated, one of the query."""
CHANCE = 1e-9
"""Of calling a comparison wrong that is right."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What attention is asked to do, as in ``kvq::attention``."""

    mask: Tensor | None = None
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def given(self) -> dict[str, object]:
        """As keyword arguments, without what is off."""
        return {
            field.name: value for field in dataclasses.fields(self) if _on(value := getattr(self, field.name))
        }


def _on(value: object) -> bool:
    return isinstance(value, Tensor) or bool(value)


@dataclasses.dataclass(frozen=True)
class Expected:
    """``value`` in float64, each element to within ``limit``."""

    value: Tensor
    limit: Tensor

    def compare(self, got: Tensor) -> tuple[str, float, float]:
        """What is wrong or ``""``, the error that is largest relative to what is allowed there, and what is allowed."""
        if got.shape != self.value.shape:
            return f"shape {tuple(got.shape)} instead of {tuple(self.value.shape)}", float("nan"), 0.0
        error = (got.to(self.value.device).double() - self.value).abs()
        if not bool(error.isfinite().all()):
            return f"{int((~error.isfinite()).sum())} values are not finite", float("nan"), 0.0
        if error.numel() == 0:
            return "", 0.0, 0.0
        worst = int((error / self.limit).argmax())
        found, allowed = float(error.flatten()[worst]), float(self.limit.flatten()[worst])
        return (f"error {found:.3g}, allowed {allowed:.3g}" if found > allowed else ""), found, allowed


def deviations(count: int) -> float:
    """Standard deviations within which ``count`` sums of roundings stay; see above."""
    return math.sqrt(6 * math.log(2 * max(count, 1) / CHANCE))


def unit(dtype: torch.dtype, *, bfloat16_stored: bool = False) -> float:
    """The unit roundoff of what a kernel computes in for a query of ``dtype``."""
    if dtype is torch.float32:
        return 2.0**-24
    return 2.0**-8 if dtype is torch.bfloat16 and bfloat16_stored else 2.0**-11


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: Tensor,
    options: Options,
    *,
    u: float,
    dtype: torch.dtype,
) -> Expected:
    """Expected attention over decoded keys and values.

    Args:
        query: ``[B, Hq, N, D]``; the last one stands at the end of its row.
        key, value: ``[B, Hkv, T, D]``.
        length: ``[B]``, tokens that count.
        u: see :func:`unit`.
        dtype: of the result.
    """
    batch, heads, count, dim = query.shape
    tokens, group = key.shape[2], heads // key.shape[1]
    q, k, v = query.double(), *(x.double().repeat_interleave(group, 1) for x in (key, value))
    scale = dim**-0.5
    scores = q @ k.transpose(-1, -2) * scale
    variance = (
        (q**2 @ (k**2).transpose(-1, -2)) * (scale * u) ** 2 * (ROUNDINGS + dim * (2.0**-24 / u) ** 2) / 3
    )
    variance = variance + (scores * 2.0**-23) ** 2
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    at = torch.arange(tokens, device=query.device)
    end = length.to(query.device).view(-1, 1)
    place = end - count + torch.arange(count, device=query.device)
    opened = (at < end)[:, None, None].expand(batch, 1, count, tokens)
    if options.causal:
        opened = opened & (at <= place.unsqueeze(-1))[:, None]
    if options.window:
        opened = opened & (at > place.unsqueeze(-1) - options.window)[:, None]
    if options.mask is not None and options.mask.dtype is torch.bool:
        opened = opened & options.mask
    elif options.mask is not None:
        scores = scores + options.mask.double()
    scores = scores.masked_fill(~opened, -torch.inf)
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks.double().view(1, -1, 1, 1).expand(batch, -1, count, 1)), -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., :tokens]
    out = weights @ v
    # (v - out)^2 summed with weights, without a tensor of [.., T, D] for each query.
    squared = weights**2 * variance.masked_fill(~opened, 0.0)
    spread = squared @ v**2 - 2 * out * (squared @ v) + out**2 * squared.sum(-1, keepdim=True)
    rounding = (weights**2 @ v**2) * u**2 * (ROUNDINGS + 2) / 3
    adding = (weights @ v.abs()) ** 2 * tokens * 2.0**-48 / 3
    info = torch.finfo(dtype)
    limit = deviations(out.numel()) * (spread.clamp_min(0) + rounding + adding).sqrt()
    return Expected(out, limit + info.eps / 2 * out.abs() + info.smallest_normal)


def decoded(values: Tensor, dtype: torch.dtype, row: Format) -> Expected:
    """Expected ``dequantize``, rounded to ``dtype``.

    The codec's numbers and the kernel's are both fp32, each off by at most ``steps`` roundings of ``2**-24``, relative to the
    largest number of the vector: a product and a sum, where the product can be twice that number, are 3 (joined into one, less);
    a vector that is turned back by its position takes 8 more: two products, two sines to within 2 roundings each, and a sum. A
    length is a sum of ``D`` squares, a root and a quotient. Where vectors were rotated, each of ``log2 D`` sums and the factor
    behind them is rounded relative to what it gives, which is no more than the length of the vector.

    Args:
        values: fp32, from the torch codec.
    """
    info = torch.finfo(dtype)
    x = values.double()
    exact = x.clamp(-info.max, info.max)
    planes = {plane.name for plane in row.planes}
    sums = math.log2(x.shape[-1])
    steps = 3.0 + 8.0 * ("position" in planes) + (sums + 3) * ("norm" in planes)
    off = steps * x.abs().amax(-1, keepdim=True)
    if row.rotation:
        off = off + (sums + 1 + steps) * x.norm(dim=-1, keepdim=True)
    limit = 2 * 2.0**-24 * off
    return Expected(exact, limit + info.eps / 2 * (exact.abs() + limit) + info.smallest_normal * info.eps)

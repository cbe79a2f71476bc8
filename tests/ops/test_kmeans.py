"""Codebooks by weighted k-means: against brute force, Lloyd's fixed points, and what weights do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq_ops import QuantizedKV, calibration
from kvq_ops.calibration import fit
from kvq_ops.codecs.kmeans import fit_entries
from kvq_ops.formats import get_format
from tests.ops.calibrated import D


def cost(z: np.ndarray, weight: np.ndarray, entries: np.ndarray) -> float:
    return float((weight * ((z[:, None] - entries) ** 2).min(1)).sum())


def best_by_force(z: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Every way to cut the sorted values into intervals."""
    order = np.argsort(z)
    z, weight = z[order], weight[order]
    best: tuple[float, np.ndarray] | None = None
    for cuts in itertools.combinations(range(1, len(z)), count - 1):
        parts = [slice(a, b) for a, b in zip((0, *cuts), (*cuts, len(z)), strict=True)]
        entries = np.array([(weight[p] * z[p]).sum() / weight[p].sum() for p in parts])
        found = cost(z, weight, entries)
        if best is None or found < best[0]:
            best = found, entries
    assert best is not None
    return best[1]


def lloyd(z: np.ndarray, weight: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """Plain Lloyd iterations: assign to the nearest, move to the weighted mean."""
    for _ in range(1000):
        nearest = np.abs(z[:, None] - entries).argmin(1)
        moved = entries.copy()
        for k in range(len(entries)):
            mine = nearest == k
            if weight[mine].sum() > 0:
                moved[k] = (weight[mine] * z[mine]).sum() / weight[mine].sum()
        if np.abs(moved - entries).max() < 1e-12:
            break
        entries = moved
    return entries


def test_clusters_that_lie_apart_are_found_as_by_force() -> None:
    rng = np.random.default_rng(0)
    for count in (2, 3, 4):
        centres = np.arange(count) * 10.0 + rng.standard_normal(count)
        z = np.concatenate([c + rng.standard_normal(4) for c in centres])
        weight = rng.uniform(0.5, 1.5, len(z))
        rng.shuffle(order := np.arange(len(z)))
        got = fit_entries(torch.from_numpy(z[order]), torch.from_numpy(weight[order]), count).numpy()
        want = best_by_force(z, weight, count)
        assert got.dtype == np.float32 and np.allclose(got, want, rtol=1e-6)
        unweighted = fit_entries(torch.from_numpy(z), torch.ones(len(z)), count).numpy()
        assert not np.allclose(unweighted, want, rtol=1e-6), (
            "the check would not see weights that are ignored"
        )


@pytest.mark.parametrize("kind", ["normal", "long tails", "uniform"])
@pytest.mark.parametrize("count", [4, 8, 16])
def test_entries_are_a_fixed_point_of_lloyd(kind: str, count: int) -> None:
    rng = np.random.default_rng(count)
    z = {"normal": rng.standard_normal, "long tails": lambda n: rng.standard_t(3, n), "uniform": rng.random}[
        kind
    ](2000)
    weight = rng.uniform(0, 1, len(z)) ** 3
    got = fit_entries(torch.from_numpy(z), torch.from_numpy(weight), count, steps=1000).double().numpy()
    span = np.ptp(z)
    assert np.allclose(lloyd(z, weight, got), got, atol=1e-4 * span), (
        "an entry is not the mean of what it serves"
    )
    assert cost(z, weight, got) <= cost(z, weight, lloyd(z, weight, got)) * (1 + 1e-4)
    order = np.argsort(z)
    share = (np.arange(count) + 0.5) / count * weight.sum()
    quantiles = z[order][np.searchsorted(np.cumsum(weight[order]), share).clip(0, len(z) - 1)]
    assert cost(z, weight, got) < 0.99 * cost(z, weight, quantiles), (
        "as good without a step: nothing was shown"
    )
    assert not np.allclose(
        lloyd(z, weight, quantiles + 0.05 * span), quantiles + 0.05 * span, atol=1e-4 * span
    )


def test_entries_ascend_whatever_there_is() -> None:
    for values in ([1.0], [0.0, 0.0, 0.0], [-2.0, 5.0], [1e30, -1e30], list(range(3))):
        z = torch.tensor(values, dtype=torch.float32)
        for weight in (torch.ones(len(z)), torch.zeros(len(z))):
            entries = fit_entries(z, weight, 16)
            assert entries.shape == (16,) and (entries.diff() > 0).all() and entries.isfinite().all()
            assert all((entries - v).abs().min() <= 1e-6 * abs(v) for v in values), "each value has its entry"


def test_weights_of_zero_count_as_none_and_order_does_not_matter() -> None:
    z, weight = torch.randn(500), torch.rand(500)
    assert torch.equal(fit_entries(z, torch.zeros(500), 8), fit_entries(z, torch.ones(500), 8))
    order = torch.randperm(500)
    assert torch.allclose(fit_entries(z[order], weight[order], 8), fit_entries(z, weight, 8), atol=1e-6)
    far = torch.cat([z, torch.full((50,), 100.0)])
    ignored = fit_entries(far, torch.cat([weight, torch.zeros(50)]), 8)
    assert torch.allclose(ignored, fit_entries(z, weight, 8), atol=1e-6)


@pytest.mark.parametrize("name", ["nuq3_keys", "nuq3_values", "nuq2_values+hadamard", "nuq3_keys+outlier1%"])
def test_weights_move_the_codebook_to_where_errors_matter(name: str) -> None:
    """Each of two codebooks is the better one by its own measure."""
    fmt = get_format(name)
    x = torch.randn(1, 2, 400, D)
    matters = torch.where(x.abs() > 1.5, 20.0, 0.1)
    if fmt.rotation:
        matters = matters.mean(-1, keepdim=True).expand(x.shape).contiguous()
    plain, weighted = fit(x, fmt), fit(x, fmt, weight=matters)
    assert not torch.equal(plain["codebook"], weighted["codebook"])
    assert all(torch.equal(plain[k], weighted[k]) for k in plain if k != "codebook")

    def error(static: dict[str, Tensor], weight: Tensor) -> float:
        back = QuantizedKV.from_dense(x, name, static=static).dequantize()
        return float((weight * (back - x) ** 2).sum())

    assert error(weighted, matters) < error(plain, matters)
    assert error(plain, torch.ones_like(x)) < error(weighted, torch.ones_like(x))
    if not fmt.rotation and not fmt.outliers:
        outer = plain["codebook"].abs()[[0, -1]].sum() - weighted["codebook"].abs()[[0, -1]].sum()
        assert error(weighted, matters) < 0.9 * error(plain, matters) and outer != 0


def test_weights_of_pairs_are_shared_where_keys_are_turned() -> None:
    """A weight on one half alone is one on its pair: turned back, a value is made of both."""
    fmt = get_format("nuq3_keys")
    x, inv_freq = torch.randn(1, 1, 300, D), torch.rand(D // 2)
    one = torch.zeros_like(x)
    one[..., : D // 2] = torch.rand(1, 1, 300, D // 2)
    both = (one[..., : D // 2] / 2).repeat(1, 1, 1, 2)
    a, b = (fit(x, fmt, weight=w, inv_freq=inv_freq)["codebook"] for w in (one, both))
    assert torch.allclose(a, b, atol=1e-6)
    assert calibration.SIDES == ("key", "value")

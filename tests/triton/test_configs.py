"""Launch parameters: measured ones where an entry serves, rules otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_lab import gpu_tune
from kvq_ops.formats import get_format, names
from kvq_ops.triton_kernels import configs
from kvq_ops.triton_kernels.spec import Spec, spec_of

H100, A100, L4 = ("cuda", 90), ("cuda", 80), ("cuda", 89)


def spec(name: str) -> Spec:
    found = spec_of(get_format(name))
    assert isinstance(found, Spec)
    return found


def entry(**changes: Any) -> dict[str, Any]:
    codes = [configs.code_of(spec("int8_per_token_head"))] * 2
    return {
        "kind": "decode",
        "codes": codes,
        "head_dim": 128,
        "group": 4,
        "fp32": False,
        "backend": "cuda",
        "arch": 90,
        "config": {"block_n": 256},
        **changes,
    }


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Entries in a file of their own."""
    monkeypatch.setattr(configs, "TABLE_FILE", tmp_path / "configs.json")

    def write(*entries: dict[str, Any]) -> None:
        configs.TABLE_FILE.write_text(json.dumps({"about": "a test", "entries": list(entries)}))
        configs.measured.cache_clear()
        configs._chosen.cache_clear()

    yield write
    configs.measured.cache_clear()
    configs._chosen.cache_clear()


def ask(
    name: str = "int8_per_token_head",
    kind: str = "decode",
    dim: int = 128,
    group: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    target: tuple[str, Any] = H100,
) -> dict[str, int]:
    return configs.config_for(kind, spec(name), spec(name), dim, group, dtype, target)


def check_entry(one: dict[str, Any]) -> None:
    assert set(entry()) <= set(one), "what an entry is looked up by"
    assert (
        one["kind"] in ("decode", "prefill", "dequantize")
        and configs.padded(one["head_dim"]) == one["head_dim"]
    )
    # Rows of a tile follow from the launch, and are not tuned.
    assert one["config"] and set(one["config"]) <= {"block_n", "num_warps", "num_stages", "slots"}
    assert all(type(value) is int and value > 0 for value in one["config"].values())


def test_the_shipped_table_is_one() -> None:
    shipped = json.loads((Path(configs.__file__).parent / "configs.json").read_text())
    assert set(shipped) == {"about", "entries"}
    for one in shipped["entries"]:
        check_entry(one)


def test_an_entry_that_is_none_is_noticed() -> None:
    """The table that is shipped may be empty; what would be wrong in it must show all the same."""
    check_entry(entry())
    for change in (
        {"kind": "decoding"},
        {"head_dim": 96},
        {"config": {}},
        {"config": {"block_m": 16}},
        {"config": {"block_n": 0}},
        {"config": {"block_n": "64"}},
    ):
        with pytest.raises(AssertionError):
            check_entry(entry(**change))
    with pytest.raises(AssertionError):
        check_entry({key: value for key, value in entry().items() if key != "arch"})


def test_an_entry_replaces_what_it_measured_and_nothing_else(table: Any) -> None:
    table()
    rule = ask()
    table(entry())
    assert ask() == rule | {"block_n": 256}


@pytest.mark.parametrize(
    "other",
    [
        {"name": "int4_group32"},
        {"kind": "prefill"},
        {"dim": 64},
        {"dtype": torch.float32},
        {"target": A100},
        {"target": ("hip", "gfx942")},
    ],
    ids=str,
)
def test_an_entry_does_not_serve_other_launches(table: Any, other: dict[str, Any]) -> None:
    table()
    rule = ask(**other)
    table(entry())
    assert ask(**other) == rule


def test_the_same_capability_comes_before_the_nearest_group(table: Any) -> None:
    table(
        entry(arch=89, config={"block_n": 1}),
        entry(arch=80, group=32, config={"block_n": 2}),
        entry(arch=80, group=8, config={"block_n": 3}),
    )
    assert ask(target=A100)["block_n"] == 3
    assert ask(target=A100, group=30)["block_n"] == 2
    assert ask(target=L4, group=30)["block_n"] == 1
    # A capability of the same family that was never measured.
    assert ask(target=("cuda", 86))["block_n"] == 1


def test_head_dims_share_an_entry_when_they_are_padded_alike(table: Any) -> None:
    table(entry())
    assert ask(dim=96)["block_n"] == 256


@pytest.mark.parametrize("kind", ["decode", "prefill", "dequantize"])
def test_rules_for_every_format(kind: str) -> None:
    for name in names():
        for target in (H100, A100, ("hip", "gfx942"), ("interpreter", 0)):
            config = ask(name, kind, target=target)
            assert config["block_n"] & (config["block_n"] - 1) == 0 and config["num_warps"] in (1, 2, 4, 8)


def test_what_the_tuner_writes_is_read_back(table: Any) -> None:
    table(entry(config={"block_n": 32}), entry(arch=80, config={"block_n": 16}))
    gpu_tune.write([entry(config={"block_n": 64, "num_warps": 8}, gain=1.2)])
    assert ask()["block_n"] == 64 and ask()["num_warps"] == 8
    assert ask(target=A100)["block_n"] == 16
    assert len(configs.measured()) == 2


def test_one_entry_alone_while_it_is_tried(table: Any) -> None:
    table(entry(config={"block_n": 32}))
    with gpu_tune.only(entry(config={"block_n": 512})):
        assert ask()["block_n"] == 512
    assert ask()["block_n"] == 32


def test_candidates_start_with_the_rule() -> None:
    rule = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 2}
    first, *others = gpu_tune.candidates(rule)
    assert first == {"block_n": 64, "num_warps": 4, "num_stages": 2}
    assert len(others) > 10 and all("block_m" not in other for other in others)

"""What --format reads: names, pairs, policies in JSON and in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvq_ops
from kvq_lab.eval_specs import Spec, parse_spec, parse_specs
from kvq_ops.errors import FormatError, UnknownFormatError


@pytest.mark.parametrize("name", kvq_ops.formats.kv_names())
def test_every_listed_name_is_read_back_as_it_prints(name: str) -> None:
    spec = parse_spec(name)
    assert spec.uniform
    assert spec.name == name
    assert parse_spec(spec.text()) == spec


@pytest.mark.parametrize(
    "text",
    [
        "kivi4+recent64",
        "int4_group32+hadamard",
        "key=int8_per_token_head,value=int4_group32",
        '{"format": "int4_group32", "layers": {"0": "int8_per_token_head", "-1": "key=kivi4,value=none"}, "skip": [1]}',
        '{"name": "mine", "format": "kivi4", "layers": {"sliding_attention": "int4_group32"}}',
    ],
)
def test_what_is_printed_reads_back_as_the_same(text: str) -> None:
    spec = parse_spec(text)
    again = parse_spec(spec.text())
    assert again == spec
    assert again.policy == spec.policy


def test_a_policy_is_what_quantized_cache_takes() -> None:
    spec = parse_spec('{"format": "int4_group32", "layers": {"0": "int8_per_token_head"}, "skip": [-1]}')
    policy = spec.policy
    assert str(policy.choose(0, count=4)) == "int8_per_token_head"
    assert str(policy.choose(1, count=4)) == "int4_group32"
    assert policy.choose(3, count=4) is None


def test_printed_python_makes_the_same_cache() -> None:
    hf = pytest.importorskip("kvq_ops.hf", reason="the hf extra is not installed")
    from tests.lab.eval_toys import tiny_llama

    spec = parse_spec('{"format": "int4_group32", "layers": {"0": "int8_per_token_head"}, "skip": [-1]}')
    names = {"QuantizedCache": hf.QuantizedCache, "model": tiny_llama()}
    cache = eval(spec.code(), names)
    assert [str(pair) for pair in cache.layer_formats] == ["int8_per_token_head", "int4_group32", "none"]


def test_printed_python_says_where_a_calibration_is_needed() -> None:
    assert "calibration=" in parse_spec("nuq4").code()
    assert "calibration=" not in parse_spec("int4_group32").code()


def test_a_policy_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"format": "nvfp4", "layers": {"2": "kivi4"}}))
    assert parse_spec(str(file)).layers[0][0] == 2


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]{}",
        '{"layers": {}}',
        '{"format": "nvfp4", "layer": {}}',
        '{"format": "nvfp4", "layers": {"0": 3}}',
        '{"format": "nvfp4", "skip": [true]}',
        "/no/such/policy.json",
        "int8_per_tokn",
    ],
)
def test_what_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parse_spec(text)


def test_unknown_formats_in_a_policy_name_the_near_ones() -> None:
    with pytest.raises(UnknownFormatError, match="int4_group32"):
        parse_spec('{"format": "none", "layers": {"0": "int4_grp32"}}')


def test_specs_come_once_and_under_names_of_their_own() -> None:
    policy = '{"format": "nvfp4", "layers": {"0": "none"}}'
    other = '{"format": "nvfp4", "layers": {"1": "none"}}'
    specs = parse_specs(["nvfp4", policy, "nvfp4", other, "key=nvfp4,value=nvfp4"])
    assert [spec.name for spec in specs] == ["nvfp4", "policy on nvfp4", "policy on nvfp4 (2)"]
    assert isinstance(specs[0], Spec)


def test_by_default_every_listed_format_is_measured() -> None:
    assert [spec.name for spec in parse_specs(None)] == list(kvq_ops.formats.kv_names())

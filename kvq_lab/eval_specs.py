"""What ``kvq eval --format`` reads: a format for all layers, or a policy as JSON, as ``--suggest`` prints it.

int4_group32
key=int8_per_token_head,value=int4_group32
{"format": "int4_group32", "layers": {"0": "int8_per_token_head", "-1": "key=kivi4,value=int4_group32"}}
policy.json
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kvq_ops
from kvq_ops.errors import FormatError
from kvq_ops.formats import Format, KVFormat
from kvq_ops.policy import Policy, Which

_KEYS = ("format", "layers", "skip", "name")
_EXAMPLE = '{"format": "int4_group32", "layers": {"0": "int8_per_token_head"}, "skip": [-1]}'


@dataclasses.dataclass(frozen=True)
class Spec:
    """Formats of every layer, under a name for tables.

    Attributes:
        layers, skip: as :class:`kvq_ops.hf.QuantizedCache` takes them.
    """

    name: str
    default: KVFormat
    layers: tuple[tuple[Which, KVFormat], ...] = ()
    skip: tuple[Which, ...] = ()

    @property
    def policy(self) -> Policy:
        return Policy(self.default, self.layers, self.skip)

    @property
    def uniform(self) -> bool:
        return not self.layers and not self.skip

    def formats(self) -> list[Format]:
        """Every format that occurs, once."""
        pairs = [self.default, *(pair for _, pair in self.layers)]
        return list(dict.fromkeys(side for pair in pairs for side in (pair.key, pair.value)))

    def text(self) -> str:
        """What ``--format`` reads back as the same."""
        if self.uniform:
            return str(self.default)
        content: dict[str, Any] = {"name": self.name, "format": str(self.default)}
        if self.layers:
            content["layers"] = {str(which): str(pair) for which, pair in self.layers}
        if self.skip:
            content["skip"] = list(self.skip)
        return json.dumps(content)

    def code(self) -> str:
        """Python that makes such a cache."""
        lines = [
            "QuantizedCache(",
            "    model.config,",
            f"    {str(self.default)!r},",
            "    max_cache_len=4096,",
        ]
        if self.layers:
            lines.append("    layers={")
            lines += [f"        {which!r}: {str(pair)!r}," for which, pair in self.layers]
            lines.append("    },")
        if self.skip:
            lines.append(f"    skip={list(self.skip)!r},")
        if any(pair.needs_calibration for pair in (self.default, *(pair for _, pair in self.layers))):
            lines.append("    calibration=calibration,  # by kvq_lab.calibrate.calibrate(model, ids, policy)")
        return "\n".join([*lines, ")"])


def parse_spec(text: str) -> Spec:
    """A spec from what was typed.

    Raises:
        FormatError: on JSON that is no policy, or a file that is none; UnknownFormatError on unknown names.
    """
    text = text.strip()
    if text.endswith(".json"):
        try:
            text = Path(text).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(
                "a policy from a file", got=str(error), allowed=f"a JSON file such as {_EXAMPLE}"
            ) from error
    if not text.startswith("{"):
        pair = kvq_ops.parse_kv_format(text)
        return Spec(str(pair), pair)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise FormatError(
            "a policy in JSON", got=f"{text!r}: {error}", allowed=f"such as {_EXAMPLE}"
        ) from error
    return _policy(content)


def _policy(content: Mapping[str, Any]) -> Spec:
    unknown = sorted(set(content) - set(_KEYS))
    layers, skip = content.get("layers", {}), content.get("skip", [])
    fits = (
        isinstance(content.get("format"), str)
        and isinstance(content.get("name", ""), str)
        and isinstance(layers, dict)
        and all(isinstance(name, str) for name in layers.values())
        and isinstance(skip, list)
        and all(isinstance(which, (int, str)) and not isinstance(which, bool) for which in skip)
    )
    if unknown or not fits:
        raise FormatError(
            "a policy in JSON",
            got=f"unknown {', '.join(unknown)}" if unknown else json.dumps(content),
            allowed=f"format, and optionally layers, skip and name, such as {_EXAMPLE}",
        )
    exceptions = tuple((_which(key), kvq_ops.parse_kv_format(name)) for key, name in layers.items())
    default = kvq_ops.parse_kv_format(content["format"])
    if not exceptions and not skip:
        return Spec(str(default), default)
    return Spec(content.get("name") or f"policy on {str(default)}", default, exceptions, tuple(skip))


def _which(key: str) -> Which:
    """JSON has no numbers as keys."""
    try:
        return int(key)
    except ValueError:
        return key


def parse_specs(texts: Sequence[str] | None) -> tuple[Spec, ...]:
    """Specs from the ``--format`` options, each once and each under a name of its own; all listed formats by default."""
    if texts is None:
        return tuple(parse_spec(name) for name in kvq_ops.formats.kv_names())
    found = list(dict.fromkeys(parse_spec(text) for text in texts))
    seen: Counter[str] = Counter()
    result = []
    for spec in found:
        seen[spec.name] += 1
        number = seen[spec.name]
        result.append(spec if number == 1 else dataclasses.replace(spec, name=f"{spec.name} ({number})"))
    return tuple(result)

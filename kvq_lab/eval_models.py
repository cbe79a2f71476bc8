"""Models and texts that ``kvq eval`` measures on: by name, or a local Hugging Face folder.

The hard case ``smollm2-outliers`` is SmolLM2 with channels of its keys made thirty times as large and the same channels of its
queries thirty times as small. Rotary embedding turns channels ``c`` and ``c + D/2`` as a pair, and a factor common to the pair
commutes with that, so every product q.k, and with it the function of the model, stays; only its key cache now holds outlier
channels, as those of models with biased key projections do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvq_lab import assets
from kvq_ops.errors import FormatError, ShapeError

OUTLIER_PAIRS = (5, 17)
OUTLIER_FACTOR = 30.0

# Texts that are scored, and one that only calibration reads.
SCORED_TEXTS = ("emma", "afaq")
CALIBRATION_TEXT = "persuasion"
# Front matter is no prose.
_SKIPPED_CHARACTERS = 2000
_READ_CHARACTERS = 400_000


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model under test.

    Attributes:
        name: as it was asked for.
        title: for tables.
        bos: token that every text must begin with, where the model needs one.
        note: what a reader of the figures should know.
    """

    name: str
    title: str
    model: Any
    tokenizer: Any
    bos: int | None = None
    note: str = ""


def add_key_outliers_(
    model: Any, pairs: Sequence[int] = OUTLIER_PAIRS, factor: float = OUTLIER_FACTOR
) -> list[int]:
    """Make channels ``c`` and ``c + D/2`` of all keys ``factor`` times as large for each ``c`` in ``pairs``, in place.

    The queries shrink by as much, so the model computes what it did. Returns the channels.

    Raises:
        FormatError: if the model has no Llama-like projections, or normalizes queries and keys after them, which would undo it.
        ShapeError: if a pair is none of ``0 .. D/2 - 1``.
    """
    blocks = [m for m in model.modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj")]
    if not blocks or any(getattr(m, "k_norm", None) is not None for m in blocks):
        raise FormatError(
            "outlier channels in the keys",
            got=f"{type(model).__name__}, with {'normalized keys' if blocks else 'no q_proj and k_proj'}",
            allowed="models whose q_proj and k_proj feed rotary embedding directly, as in Llama",
        )
    channels: list[int] = []
    with torch.no_grad():
        for block in blocks:
            head_dim = block.head_dim
            half = head_dim // 2
            if any(not 0 <= pair < half for pair in pairs):
                raise ShapeError(
                    "rotary pairs of outlier channels", got=str(list(pairs)), allowed=f"0..{half - 1}"
                )
            channels = sorted([*pairs, *(pair + half for pair in pairs)])
            for projection, by in ((block.k_proj, factor), (block.q_proj, 1 / factor)):
                for parameter in (projection.weight, projection.bias):
                    if parameter is not None:
                        parameter.view(-1, head_dim, *parameter.shape[1:])[:, channels] *= by
    return channels


def _smollm2() -> Subject:
    return Subject("smollm2", "SmolLM2-135M-Instruct", *assets.load_smollm2())


def _smollm2_outliers() -> Subject:
    model, tokenizer = assets.load_smollm2()
    channels = add_key_outliers_(model)
    return Subject(
        "smollm2-outliers",
        "SmolLM2-135M-Instruct with outlier channels",
        model,
        tokenizer,
        note=f"key channels {', '.join(map(str, channels))} of every head are {OUTLIER_FACTOR:g} times as large as trained and "
        "the queries as much smaller: the same function, harder to quantize",
    )


def _gemma3() -> Subject:
    from kvq_lab.gemma import BOS, load_gemma3

    model, tokenizer = load_gemma3()
    return Subject("gemma3", "Gemma 3 270M", model, tokenizer, bos=BOS)


MODELS: dict[str, Callable[[], Subject]] = {
    "smollm2": _smollm2,
    "smollm2-outliers": _smollm2_outliers,
    "gemma3": _gemma3,
}
"""Models by name; anything else is a folder."""


def check_model(name: str) -> None:
    """Raise ``FormatError`` unless ``name`` is in ``MODELS`` or a folder with a ``config.json``; loads nothing."""
    if name in MODELS or (Path(name) / "config.json").is_file():
        return
    what = f"folder {name!r} without a config.json" if Path(name).is_dir() else repr(name)
    raise FormatError(
        "a model to evaluate",
        got=what,
        allowed=", ".join(MODELS)
        + ", or a local folder with a Hugging Face model (config.json, weights, tokenizer)",
        do="models are never downloaded: save one with save_pretrained() and give its folder",
    )


def load(name: str) -> Subject:
    """Load a model by name or folder, in fp32 and eval mode, attending through ``scaled_dot_product_attention``.

    Raises:
        FormatError: for a name that is neither.
        AssetError: if what is asked for cannot be loaded here.
    """
    check_model(name)
    if name in MODELS:
        return MODELS[name]()
    try:
        model, tokenizer = assets.load_converted(Path(name), None, "sdpa")
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise assets.AssetError(
            f"the model in folder {name!r}",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            allowed="a causal language model and its tokenizer, as save_pretrained() writes them",
        ) from error
    bos = tokenizer.bos_token_id
    begins = tokenizer("a").input_ids[:1]
    return Subject(name, Path(name).resolve().name, model, tokenizer, bos=bos if begins == [bos] else None)


# -- texts -------------------------------------------------------------------------------------


def texts() -> dict[str, str]:
    """The long texts, or, where they cannot be had, the passage that ships with this package."""
    try:
        return assets.texts()
    except assets.AssetError:
        _, text = assets.passage()
        return {"passage": text}


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    return tokenizer(
        text[:_READ_CHARACTERS], return_tensors="pt", add_special_tokens=False, verbose=False
    ).input_ids[0]


def _prose(text: str) -> str:
    return text[_SKIPPED_CHARACTERS:] if len(text) > 10 * _SKIPPED_CHARACTERS else text


def windows(subject: Subject, count: int, length: int) -> tuple[list[str], torch.Tensor]:
    """``count`` stretches of ``length`` tokens from the texts that are scored: their names, and ids ``[count, length]``.

    They are spread evenly, over *Emma* and the Anarchist FAQ in turn. A model's BOS token is the first of the ``length``.

    Raises:
        ShapeError: if a text is shorter than a window.
    """
    available = texts()
    names = [name for name in SCORED_TEXTS if name in available] or list(available)[:1]
    shares = [len(range(i, count, len(names))) for i in range(len(names))]
    described, rows = [], []
    for name, share in zip(names, shares, strict=True):
        ids = _ids(subject.tokenizer, _prose(available[name])) if share else torch.empty(0)
        for number in range(share):
            start = min(number * (len(ids) // (share + 1)), max(0, len(ids) - length))
            row = ids[start : start + length]
            if len(row) < length:
                raise ShapeError(
                    f"a window of {length} tokens",
                    got=f"a text of {len(ids)} tokens ({name})",
                    allowed=f"context and scored tokens of a window up to {len(ids) - 1} together",
                    do=f"ask for a shorter --context or fewer --tokens, or name a longer text in {assets.TEXT_VARIABLE}",
                )
            if subject.bos is not None:
                row = torch.cat([torch.tensor([subject.bos]), row[:-1]])
            described.append(f"{name} from token {start}")
            rows.append(row)
    return described, torch.stack(rows)


def calibration_ids(subject: Subject, rows: int = 4, length: int = 512) -> tuple[str, torch.Tensor]:
    """Text for calibration: its name and ids ``[rows, length]``, from a text that is not scored.

    Where there is one text alone, its end is read, which the scored windows do not reach.
    """
    available = texts()
    name = CALIBRATION_TEXT if CALIBRATION_TEXT in available else next(iter(available))
    ids = _ids(subject.tokenizer, _prose(available[name]))
    length = min(length, len(ids) // rows)
    if subject.bos is None:
        return name, ids[-rows * length :].reshape(rows, length)
    body = ids[-rows * (length - 1) :].reshape(rows, length - 1)
    return name, torch.cat([torch.full((rows, 1), subject.bos), body], 1)

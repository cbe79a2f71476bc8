"""Needle retrieval: a secret number somewhere in a long novel, asked for at its end, read from each cache.

The haystack with its needle is run once without quantization and handed to every cache; the question and the answer then run
through the caches. A needle is found when every token of the number is the most likely one, which is what greedy decoding gives.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from kvq_lab import eval_models
from kvq_lab.eval_caches import Contender, Prefill
from kvq_lab.eval_models import Subject, _ids, _prose
from kvq_lab.progress import Stages
from kvq_ops.errors import ShapeError
from kvq_ops.hf_shapes import cache_argument

COLOURS = ("red", "blue", "green", "silver")
_NEEDLE = "\n\nThe secret number of the {colour} vault is {number}.\n\n"
_QUESTION = "\n\nQuestion: What is the secret number of the {colour} vault?\nAnswer: The secret number of the {colour} vault is"
_STATEMENT = "The secret number of the {colour} vault is"

# The longest question and answer, for the room that caches need.
_ROOM = 64


@dataclasses.dataclass(frozen=True)
class Trial:
    """One haystack ``[length]``, what is asked, and the tokens that answer it."""

    haystack: torch.Tensor
    question: torch.Tensor
    answer: torch.Tensor


def make_trial(
    subject: Subject, hay: torch.Tensor, length: int, depth: float, random_: random.Random
) -> Trial:
    """A haystack of exactly ``length`` tokens with its needle at share ``depth``.

    Raises:
        ShapeError: if the text is shorter than that.
    """
    words = {"colour": random_.choice(COLOURS), "number": str(random_.randint(10000, 99999))}

    def tokens(text: str) -> torch.Tensor:
        return _ids(subject.tokenizer, text.format(**words))

    needle, question = tokens(_NEEDLE), tokens(_QUESTION)
    # What follows the statement, as the tokenizer sees it within the sentence.
    answer = tokens(_STATEMENT + " {number}")[len(tokens(_STATEMENT)) :]
    begin = hay.new_tensor([] if subject.bos is None else [subject.bos])
    rest = length - len(needle) - len(begin)
    if rest < 1 or len(hay) < rest:
        raise ShapeError(
            f"a haystack of {length} tokens",
            got=f"a text of {len(hay)} tokens",
            allowed=f"{len(needle) + len(begin) + 1}..{len(hay)}",
            do="choose other --needle-lengths",
        )
    start = random_.randint(0, len(hay) - rest)
    before = int(rest * depth)
    return Trial(
        torch.cat([begin, hay[start : start + before], needle, hay[start + before : start + rest]]),
        question,
        answer,
    )


def ask(
    subject: Subject, cache: Any, prefill: Prefill, question: torch.Tensor, answer: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Which rows find every token of ``answer [rows, A]`` after ``question [rows, Q]``."""
    prefill.fill(cache)
    argument = cache_argument(subject.model)
    ids = torch.cat([question, answer[:, :-1]], 1)
    found = torch.ones(ids.shape[0], dtype=torch.bool)
    with torch.no_grad():
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            logits = subject.model(part, **{argument: cache, "use_cache": True}).logits
            for i in range(part.shape[1]):
                number = start + i - (question.shape[1] - 1)
                if number >= 0:
                    found &= logits[:, i].argmax(-1) == answer[:, number]
    return found


def check_lengths(subject: Subject, lengths: Sequence[int]) -> None:
    """Raise ``ShapeError`` for lengths beyond what the model was made for."""
    limit = getattr(subject.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is None:
        return
    if too_long := [n for n in lengths if n + _ROOM > limit]:
        raise ShapeError(
            "lengths of haystacks",
            got=f"{', '.join(map(str, too_long))} tokens",
            allowed=f"up to {limit - _ROOM} for this model, which has {limit} positions",
            do="choose other --needle-lengths",
        )


def needles(
    subject: Subject, contenders: Sequence[Contender], settings: Any, stages: Stages
) -> dict[str, list[dict[str, Any]]]:
    """For each cache a list of ``{length, depth, trials, found}``; every cache is asked the same."""
    check_lengths(subject, settings.needle_lengths)
    available = eval_models.texts()
    name = "emma" if "emma" in available else next(iter(available))
    hay = _ids(subject.tokenizer, _prose(available[name]))
    random_ = random.Random(0)
    found: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    total = (
        len(settings.needle_lengths) * len(settings.needle_depths) * settings.needle_trials * len(contenders)
    )
    with stages.stage(f"Needles for {len(contenders)} caches", total) as advance:
        for length in settings.needle_lengths:
            for depth in settings.needle_depths:
                trials = [
                    make_trial(subject, hay, length, depth, random_) for _ in range(settings.needle_trials)
                ]
                # Rows of a batch must be equally long.
                alike: dict[tuple[int, int], list[Trial]] = defaultdict(list)
                for trial in trials:
                    alike[len(trial.question), len(trial.answer)].append(trial)
                hits = dict.fromkeys(found, 0)
                for group in alike.values():
                    prefill = Prefill(subject.model, torch.stack([trial.haystack for trial in group]))
                    question = torch.stack([trial.question for trial in group])
                    answer = torch.stack([trial.answer for trial in group])
                    for contender in contenders:
                        cache = contender.new_cache(len(group), length + question.shape[1] + answer.shape[1])
                        right = ask(subject, cache, prefill, question, answer, settings.chunk)
                        hits[contender.name] += int(right.sum())
                        advance(len(group))
                for key, count in hits.items():
                    found[key].append(
                        {"length": length, "depth": depth, "trials": len(trials), "found": count}
                    )
    return found

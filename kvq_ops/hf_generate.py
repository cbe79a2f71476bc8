"""Let ``generate()`` of a Hugging Face model keep its cache quantized, with nothing more to pass.

    undo = use_quantized_cache_(model, "int8_per_token_head")
    model.generate(**inputs)
    undo()

Transformers still decides whether a call needs a cache, and of what length; only the cache it makes is another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.configuration_utils import CompileConfig

from .calibration import Calibration
from .errors import FormatError
from .eviction import Eviction
from .formats import Format, KVFormat
from .hf import AnyFormat, QuantizedCache
from .policy import Policy, Which

__all__ = ["restore_cache_", "use_quantized_cache_"]

_HOOK = "_prepare_cache_for_generation"
_NAMES = ("cache", "past_key_values")
"""What releases of transformers call the cache among the arguments of a model."""


def use_quantized_cache_(
    model: Any,
    format: AnyFormat,
    *,
    layers: Mapping[Which, str | Format | KVFormat] | None = None,
    skip: Sequence[Which] | Which = (),
    calibration: Calibration | None = None,
    eviction: Eviction | None = None,
) -> Callable[[], None]:
    """From now on ``model.generate()`` makes a :class:`QuantizedCache` where it is given no cache.

    The cache is as long as the call asks for (``max_length``, or ``max_cache_len`` of the generation configuration if that is
    more) and has a row for each beam or returned sequence. A cache or a ``cache_implementation`` that the caller gives goes
    first, and so does ``use_cache=False``. Encoder-decoder models get both caches quantized. Where ``generate`` compiles by
    itself it does so with the backend ``kvq``.

    Copies of the model, and models that are pickled, keep this. A second call replaces the first.

    Args:
        model: a model with ``generate()``; it is changed in place.
        format: one name for both, ``"key=NAME,value=NAME"``, or a policy.
        layers, skip: formats of some layers, and layers to leave alone; see :class:`kvq_ops.policy.Policy`.
        calibration: scales and codebooks fitted beforehand, for each layer.
        eviction: keep only the heaviest tokens; see :class:`kvq_ops.eviction.Eviction` for what that loses.

    Returns:
        A function that makes ``generate()`` as it was, the same as :func:`restore_cache_`.

    Raises:
        FormatError, HeadDimError: the model has no ``generate()``, or the policy does not fit it.
    """
    if not hasattr(model, _HOOK) or not hasattr(model, "config"):
        raise FormatError(
            "use_quantized_cache_",
            got=type(model).__name__,
            allowed="a Hugging Face model that has generate()",
            do="call passes.quantize_kv_cache_(model, ...) with example inputs for other models",
        )
    policy = Policy.of(format, layers=layers, skip=skip, calibration=calibration)
    # What does not fit should not wait for the first prompt.
    QuantizedCache(model.config, policy, 1, eviction=eviction)
    restore_cache_(model)
    before = vars(model).get(_HOOK)
    setattr(model, _HOOK, _CacheMaker(model, policy, before, eviction))
    return lambda: restore_cache_(model)


def restore_cache_(model: Any) -> None:
    """Make ``model.generate()`` as it was before :func:`use_quantized_cache_`; nothing happens to other models."""
    made = vars(model).get(_HOOK)
    if not isinstance(made, _CacheMaker):
        return
    delattr(model, _HOOK)
    if made.before is not None:
        setattr(model, _HOOK, made.before)


class _CacheMaker:
    """Stands in for the method of the model that prepares its cache.

    An object with a reference to the model, and not a bound function: copies and pickles of the model then refer to the copy.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        before: Callable[..., Any] | None,
        eviction: Eviction | None = None,
    ) -> None:
        self.model, self.policy, self.before, self.eviction = model, policy, before, eviction

    def __call__(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = {name for name in _NAMES if model_kwargs.get(name) is not None}
        prepare = self.before or getattr(type(self.model), _HOOK).__get__(self.model)
        result = prepare(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args, **kwargs
        )
        if given or generation_config.cache_implementation not in (None, "dynamic"):
            return result
        for name in _NAMES:
            made: Any = model_kwargs.get(name)
            crossed = isinstance(made, EncoderDecoderCache)
            if type(made.self_attention_cache if crossed else made) is not DynamicCache:
                continue
            rows = batch_size * max(
                generation_config.num_beams or 1, generation_config.num_return_sequences or 1
            )
            length = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0, 1)
            model_kwargs[name] = self._make(crossed, rows, length, model_kwargs)
            if getattr(generation_config, "is_assistant", False):
                model_kwargs[name].activate_past_recording()
            self._compile_with_kvq(generation_config)
        return result

    def _make(self, crossed: bool, rows: int, length: int, model_kwargs: Mapping[str, Any]) -> Any:
        model = self.model
        options = {
            "batch_size": rows,
            "dtype": model.dtype,
            "device": model.device,
            # Models that transformers cannot compile whole slice or branch by the cache's length.
            "host_length": not getattr(model, "_can_compile_fullgraph", False),
        }
        if not crossed:
            return QuantizedCache(model.config, self.policy, length, eviction=self.eviction, **options)
        if self.eviction is not None:
            options["eviction"] = self.eviction  # which refuses models with an encoder
        encoded = model_kwargs.get("encoder_outputs")
        encoder_length = encoded[0].shape[1] if encoded is not None else None
        return QuantizedCache.encoder_decoder(model.config, self.policy, length, encoder_length, **options)

    def _compile_with_kvq(self, generation_config: Any) -> None:
        """On devices where ``generate`` compiles by itself, let it use a backend that knows codes."""
        wanted = getattr(generation_config, "compile_config", None)
        if wanted is None:
            if self.model.device.type != "cpu" and not generation_config.disable_compile:
                generation_config.compile_config = CompileConfig(backend="kvq")
        elif wanted.backend == "inductor":
            # The object may be the caller's own.
            changed = copy.copy(wanted)
            changed.backend = "kvq"
            generation_config.compile_config = changed

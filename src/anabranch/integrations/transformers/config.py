"""The parts of a ``generate`` call that are honoured; everything else is refused.

``generate`` turns most fields of a GenerationConfig into logits processors and stopping criteria before it calls a
``custom_generate`` function, so these are honoured by running them. Each of the other fields has a value here that
changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from anabranch.errors import CapabilityError, InputError

__all__ = ["arguments_of_generate", "check_arguments", "check_config", "prompts_of"]

# Fields that ``generate`` turns into processors, criteria, the prompt or its copies, or that are read here.
HONOURED = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "watermarking_config"),
        *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "token_healing"),
        *("renormalize_logits", "remove_invalid_values", "num_return_sequences"),
        *("output_scores", "output_logits", "return_dict_in_generate"),
        *("pad_token_id", "bos_token_id", "eos_token_id"),
        *("decoder_start_token_id", "disable_compile"),  # nothing to start or to compile
    }
)
_OURS = "anabranch drafts itself; choose how with drafter="
_BEAMS = "anabranch has no beam search"
_CACHE = "anabranch keeps keys and values in a cache of its own"
# Why the other fields must keep a value that changes nothing, and such values besides None and transformers' default.
REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(
        (
            *("num_beams", "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),
            *("constraints", "force_words_ids"),
        ),
        (_BEAMS, ()),
    ),
    **dict.fromkeys(("penalty_alpha", "low_memory", "dola_layers"), ("anabranch only samples or takes the best", ())),
    **dict.fromkeys(("use_cache", "cache_config", "max_cache_len"), (_CACHE, ())),
    "cache_implementation": (_CACHE, ("dynamic", "hybrid")),
    **dict.fromkeys(
        (
            *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
            *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
            *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
            "speculation_type",
        ),
        (_OURS, (False,)),
    ),
    "guidance_scale": ("classifier-free guidance runs a second text beside each one", (1, 1.0)),
    "output_attentions": ("attention weights are not kept", (False,)),
    "output_hidden_states": ("hidden states are not kept", (False,)),
    "compile_config": ("anabranch runs kernels of its own", ()),
    "continuous_batching_config": ("anabranch batches by itself", ()),
    "prefill_chunk_size": ("anabranch reads prompts in chunks of its own", ()),
}
_CACHES = ("cache", "past_key_values")  # the argument's name since transformers 5.24, and before
# Arguments of the model's forward that ``generate`` prepares and that say nothing new
_PREPARED = ("attention_mask", "position_ids", *_CACHES, "use_cache", "logits_to_keep", "cache_position")


def check_config(config: GenerationConfig) -> None:
    """Raise CapabilityError for a field that asks for something else than what is decoded here.

    Entries that are no fields of the installed transformers' GenerationConfig are ignored, as transformers does.
    """
    defaults = GenerationConfig._get_default_generation_params()
    for name in vars(GenerationConfig()):
        if name.startswith("_") or name == "transformers_version" or name in HONOURED:
            continue
        why, harmless = REFUSED.get(name, ("this version of anabranch does not know it", ()))
        value = getattr(config, name, None)
        if value is not None and value != defaults.get(name) and value not in harmless:
            raise CapabilityError(f"{name}={value!r} is not supported with custom_generate: {why}; leave {name} out")


def arguments_of_generate() -> Mapping[str, Any]:
    """The arguments of ``generate`` that it does not pass on to a ``custom_generate`` function; empty outside of it.

    transformers 5 hands no streamer to a function, and drops an assistant model without a word. Its own call is looked
    up on the stack, so that the first is used and the second refused.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    variables = {} if frame is None else frame.f_locals
    return {name: variables[name] for name in ("streamer", "assistant_model", "synced_gpus") if name in variables}


def check_arguments(hidden: Mapping[str, Any], model_kwargs: Mapping[str, Any]) -> None:
    """Raise CapabilityError for an argument of ``generate`` that would be ignored.

    hidden        from ``arguments_of_generate``
    model_kwargs  what ``generate`` would pass to the model's forward
    """
    if hidden.get("assistant_model") is not None:
        raise CapabilityError(
            "assistant_model is not supported with custom_generate; save it and give "
            "drafter='draft_model:model=FOLDER', or leave custom_generate out"
        )
    if hidden.get("synced_gpus"):
        raise CapabilityError("synced_gpus is not supported with custom_generate; decode on each GPU by itself")
    for name, value in model_kwargs.items():
        if value is not None and name not in _PREPARED:
            raise CapabilityError(
                f"the argument {name!r} of the model is not supported with custom_generate; leave it out"
            )
    cache = next((model_kwargs[name] for name in _CACHES if model_kwargs.get(name) is not None), None)
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        raise CapabilityError(
            f"a cache (past_key_values) is not supported with custom_generate: {_CACHE}; leave it out"
        )


def prompts_of(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[list[int]]:
    """The prompts in ``input_ids`` [B, L] without their padding, which is on the left.

    Raises InputError for a mask with padding elsewhere, an empty prompt, or positions that do not count its tokens.
    """
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, got {tuple(mask.shape)}"
        )
    kept = mask != 0
    if bool((kept[:, :-1] & ~kept[:, 1:]).any()):
        raise InputError("attention_mask has zeros after ones; pad prompts on the left (padding_side='left')")
    if input_ids.shape[1] == 0 or not bool(kept[:, -1].all()):
        raise InputError("a prompt is empty; give at least one token for each row")
    positions = model_kwargs.get("position_ids")
    counted = kept.long().cumsum(-1) - 1
    if positions is not None and bool((positions.to(counted.device) != counted)[kept.expand_as(counted)].any()):
        raise InputError("position_ids do not count the tokens of each prompt from 0; leave them out")
    return [row[kept_row].tolist() for row, kept_row in zip(input_ids, kept, strict=True)]

"""A model's defaults for generation: ``generation_config.json``, as transformers reads it.

Without that file, transformers takes the same fields from ``config.json``; with it, it ignores them there.

Fields that change the text of a greedy call become defaults of a call's options, and so do top_k, top_p and min_p for
calls that sample. ``do_sample`` and ``temperature`` are only suggested: decoding stays greedy until a call gives a
temperature, and a warning says so. Unsupported fields that would change the text are named in one warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.declared import SCORES, ScoreKeywords, check
from anabranch.errors import AnabranchWarning, InputError, ModelError
from anabranch.support.jsonfiles import is_whole, read_json, shown
from anabranch.support.log import warn

__all__ = ["HARMLESS", "HONOURED", "NEUTRAL", "SUGGESTED", "GenerationDefaults", "read_defaults"]

CUTS = ("top_k", "top_p", "min_p")
LENGTHS = ("max_new_tokens", "max_length")
OURS = ("logit_bias", "presence_penalty", "frequency_penalty")  # options of a call that transformers has not
HONOURED = frozenset((*{*SCORES} - {*OURS}, *CUTS, *LENGTHS, "stop_strings", "eos_token_id"))
SUGGESTED = frozenset(("do_sample", "temperature"))
# Fields that change no token of greedy decoding or sampling, whatever their value.
HARMLESS = frozenset(
    {
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_dict_in_generate"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
        # they shape beam search, and num_beams is not harmless
        *("early_stopping", "length_penalty", "low_memory"),
        # assisted decoding reproduces the model's own output
        *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "speculation_type"),
        *("compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size"),
        "renormalize_logits",  # leaves the distribution as it is
        "transformers_version",
    }
)
# Unsupported fields with the values that have no effect; null is one for each.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "max_time": (),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("typical_p", "top_h", "guidance_scale", "assistant_ensemble_weight"), (1,)),
    **dict.fromkeys(("token_healing", "dola_layers", "watermarking_config"), (False,)),
    **dict.fromkeys(("constraints", "force_words_ids"), ([],)),
}
FILE, OLDER = "generation_config.json", "config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """The defaults of a model's generation config; none by default.

    scores     the options that change scores
    cuts       top_k, top_p and min_p, for calls that sample
    stop       stop strings
    new        max_new_tokens
    total      max_length: the most tokens of a text with its prompt, unless a call gives max_new_tokens
    suggested  do_sample and temperature, which have no effect
    """

    scores: ScoreKeywords = field(default_factory=dict)  # type: ignore[assignment]
    cuts: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    new: int | None = None
    total: int | None = None
    suggested: Mapping[str, Any] = field(default_factory=dict)

    @property
    def honoured(self) -> dict[str, Any]:
        """The defaults that calls use, by the file's names."""
        values = {**self.scores, **self.cuts, "stop_strings": list(self.stop)}
        values |= {"max_new_tokens": self.new, "max_length": self.total}
        return {name: value for name, value in values.items() if value not in (None, [])}

    def to_dict(self) -> dict[str, Any]:
        """The honoured and the suggested defaults as JSON values."""
        return {"honoured": self.honoured, "suggested": dict(self.suggested)}

    @property
    def of_tokens(self) -> dict[str, Any]:
        """The defaults that apply where tokens are decoded without their text, and callers limit their number."""
        return {name: value for name, value in self.honoured.items() if name not in (*LENGTHS, "stop_strings")}

    def sentences(self, *, text: bool = True) -> list[str]:
        """Facts for the command line; none for a model without such defaults.

        text  False: for commands that use ``of_tokens`` only
        """
        used = self.honoured if text else self.of_tokens
        facts = [f"defaults of the model's generation config: {_listed(used)}"] if used else []
        unused = [] if text or not self.stop else ["its stop strings end no text here"]
        return [*facts, *unused]


def read_defaults(folder: Path, described: Mapping[str, Any], advice: str) -> tuple[GenerationDefaults, Any]:
    """The defaults of a model folder, and the ``eos_token_id`` of its generation config (None: not stated there).

    described  its config.json
    advice     the end of the message for a file that cannot be read

    Raises ModelError for values that no call could use. Warns of unsupported fields.
    """
    stated = (folder / FILE).is_file()
    record = read_json(folder / FILE, advice) if stated else described
    where = FILE if stated else OLDER
    given = {name: value for name, value in record.items() if value is not None}
    ignored = {name: given[name] for name in NEUTRAL if name in given and given[name] not in NEUTRAL[name]}
    if ignored:
        warn(
            f"the model's {where} asks for {_listed(ignored)}, which is not supported and has no effect; transformers "
            "may decode another text",
            AnabranchWarning,
            stacklevel=2,
        )
    if given.get("do_sample") is True:
        temperature = given.get("temperature", 1.0)
        warn(
            f"the model's {where} sets do_sample, with temperature {temperature}; decoding is greedy unless a call "
            "gives a temperature",
            AnabranchWarning,
            stacklevel=2,
        )
    try:
        return _defaults(given), record.get("eos_token_id") if stated else None
    except InputError as error:
        raise ModelError(f"{where} of the model is invalid: {error}; correct it or fetch the model again") from error


def _defaults(given: Mapping[str, Any]) -> GenerationDefaults:
    scores: Any = {name: _tuples(given[name]) for name in SCORES if name in given and name in HONOURED}
    cuts = {name: given[name] for name in CUTS if name in given and given[name] not in (0, -1)}
    check({**scores, **cuts})
    for name in LENGTHS:
        if name in given and not is_whole(given[name], 1, 2**31):
            raise InputError(f"{name} must be a whole number of at least 1, got {shown(given[name])}")
    stop = given.get("stop_strings", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise InputError(f"stop_strings must be a list of strings, got {shown(stop)}")
    suggested = {name: given[name] for name in sorted(SUGGESTED) if name in given}
    return GenerationDefaults(
        scores, cuts, tuple(stop), given.get("max_new_tokens"), given.get("max_length"), suggested
    )


def _tuples(value: Any) -> Any:
    """A JSON value with lists as tuples, which can be hashed and shared."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in values.items())

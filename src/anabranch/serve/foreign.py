"""Fields that other servers and interfaces know and that not every interface here has.

A field that would change the text or the content of the answer is refused by name, unless its value is neutral. Hints
that agents send by default are tolerated and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["FOREIGN", "PROMPT", "Foreign"]


class Foreign(NamedTuple):
    """A field that an interface lacks.

    neutral  values at which it changes nothing; null is one for each
    use      fields to use instead: the first that the interface has is named, and its value is neutral too
    hint     whether any value is tolerated
    limits   the fields whose effect it limits, with their neutral values: where all have these, it changes nothing
    """

    neutral: tuple[Any, ...] = ()
    use: tuple[str, ...] = ()
    hint: bool = False
    limits: tuple[tuple[str, float], ...] = ()


HINT = Foreign(hint=True)
LIMIT = Foreign(use=("max_tokens", "max_output_tokens"))
FORMAT = ("response_format",)
PENALTIES = (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0))

# fields that change the prompt, which concern the interfaces that only count or list its tokens too
PROMPT: Mapping[str, Foreign] = {
    "add_generation_prompt": Foreign((True,)),
    "add_special": Foreign((True,), ("add_special_tokens",)),  # llama.cpp's
    "add_special_tokens": Foreign((False,)),  # of conversations
    "chat_template": Foreign(),
    "chat_template_kwargs": Foreign(({},)),
    "container": Foreign(),
    "continue_final_message": Foreign(),
    "conversation": Foreign(),
    "documents": Foreign(([],)),
    "enable_thinking": Foreign(use=("chat_template_kwargs",)),
    "function_call": Foreign(("none", "auto"), ("tool_choice",)),
    "functions": Foreign(([],), ("tools",)),
    "input": Foreign(use=("messages", "prompt")),
    "input_ids": Foreign(use=("prompt",)),
    "instructions": Foreign(("",), ("system", "messages", "prompt")),
    "mcp_servers": Foreign(([],)),
    "messages": Foreign(use=("input", "prompt")),
    "parse_special": Foreign((True,)),
    "previous_response_id": Foreign(),
    "prompt": Foreign(use=("messages", "input")),
    "prompt_embeds": Foreign(([],)),
    "suffix": Foreign(("",)),
    "system": Foreign(("", []), ("instructions", "messages", "prompt")),
    "tools": Foreign(([],)),
    "truncate_prompt_tokens": Foreign(),
    "truncation": Foreign(("disabled", "auto")),
    "with_pieces": Foreign((False,), ("return_token_strs",)),
}

FOREIGN: Mapping[str, Foreign] = {
    **PROMPT,
    # the distribution
    "adaptive_target": Foreign((-1,)),
    "allowed_token_ids": Foreign(),
    "bad_words": Foreign(([],)),
    "best_of": Foreign((1,)),
    "custom_logit_processor": Foreign(),
    "dry_multiplier": Foreign((0,)),
    "dynatemp_range": Foreign((0,)),
    "early_stopping": Foreign((False,)),
    "length_penalty": Foreign((1,)),
    "logits_processors": Foreign(([],)),
    "lora": Foreign(([],), ("model",)),
    "lora_path": Foreign(use=("model",)),
    "min_keep": Foreign((0,)),
    "mirostat": Foreign((0,)),
    "no_repeat_ngram_size": Foreign((0,)),
    "repeat_last_n": Foreign((-1,), limits=PENALTIES),
    "repeat_penalty": Foreign((1,), ("repetition_penalty",)),
    "samplers": Foreign(),
    "tfs_z": Foreign((1,)),
    "top_a": Foreign((0,)),
    "top_n_sigma": Foreign((-1, 0)),
    "typical_p": Foreign((1,)),
    "use_beam_search": Foreign((False,)),
    "watermarking": Foreign((False,)),
    "xtc_probability": Foreign((0,)),
    # the length and the end
    "max_completion_tokens": LIMIT,
    "max_new_tokens": LIMIT,
    "max_output_tokens": LIMIT,
    "max_tokens": LIMIT,
    "min_new_tokens": Foreign((0,), ("min_tokens",)),
    "n_predict": LIMIT,
    "no_stop_trim": Foreign((False,)),
    "include_stop_str_in_output": Foreign((False,)),
    "repetition_detection": Foreign(),
    "stop_regex": Foreign(([],)),
    "stop_sequences": Foreign(([],), ("stop",)),
    "t_max_predict_ms": Foreign((0,)),
    "thinking_token_budget": Foreign((-1,)),
    # the format
    "ebnf": Foreign(use=("guided_grammar",)),
    "grammar": Foreign(("",), ("guided_grammar",)),  # llama.cpp's, in a language of its own
    "guided_whitespace_pattern": Foreign(),
    "json_schema": Foreign(use=("guided_json",)),
    "output_config": Foreign(({},), FORMAT),
    "output_format": Foreign(use=FORMAT),
    "regex": Foreign(use=("guided_regex",)),
    "structural_tag": Foreign(),
    "structured_outputs.disable_additional_properties": Foreign((False,)),
    "structured_outputs.structural_tag": Foreign(),
    "structured_outputs.whitespace_pattern": Foreign(),
    "text": Foreign(({},), FORMAT),
    # the content of the answer
    "audio": Foreign(),
    "background": Foreign((False,)),
    "echo": Foreign((False,)),
    "include[message.output_text.logprobs]": Foreign(),
    "include_reasoning": Foreign((True,)),
    "logprob_token_ids": Foreign(),
    "logprobs": Foreign((False,)),
    "modalities": Foreign((["text"],)),
    "n_probs": Foreign((0,), ("top_logprobs", "logprobs")),
    "prompt_logprobs": Foreign(),
    "return_prompt_text": Foreign((False,)),
    "return_token_ids": Foreign((False,)),
    "return_tokens": Foreign((False,)),
    "return_tokens_as_token_ids": Foreign((False,)),
    "skip_special_tokens": Foreign((True,)),
    "spaces_between_special_tokens": Foreign((True,)),
    "tool_choice": Foreign(("none", "auto")),
    "top_logprobs": Foreign((0,), ("logprobs",)),
    "web_search_options": Foreign(),
    # sent by default by Codex, Claude Code, Open WebUI, aider and others
    "context_management": HINT,
    "include[reasoning.encrypted_content]": HINT,
    "output_config.effort": HINT,
    "reasoning": HINT,
    "reasoning_effort": HINT,
    "text.verbosity": HINT,
    "thinking": HINT,
    "verbosity": HINT,
}

"""Tables of request fields that the server does not implement: those it refuses and those it ignores.

A field that a body declares needs no row. Fields without a row are refused as unknown.
"""

from typing import Any

OFF = (False,)
EMPTY_LIST: tuple[Any, ...] = ([],)
EMPTY_OBJECT: tuple[Any, ...] = ({},)
EMPTY_TEXT = ("",)

OPENAI: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "reasoning", "web_search_options"), ()),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": EMPTY_LIST,
    "modalities": (["text"],),
    "suffix": EMPTY_TEXT,
    "verbosity": ("medium",),
}
VLLM_AND_SGLANG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("chat_template", "custom_logit_processor", "ebnf", "kv_transfer_params"), ()),
    **dict.fromkeys(("lora_path", "prompt_embeds", "prompt_logprobs", "regex", "stop_regex"), ()),
    **dict.fromkeys(("thinking", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim", "return_hidden_states"), OFF),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "use_beam_search"), OFF),
    **dict.fromkeys(("documents", "logits_processors"), EMPTY_LIST),
    "skip_special_tokens": (True,),
}
OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n_predict", "num_ctx", "num_predict", "samplers"), ()),
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "n_probs", "xtc_probability"), (0,)),
    **dict.fromkeys(("repeat_penalty", "tfs_z", "typical_p"), (1,)),
    **dict.fromkeys(("repeat_last_n", "top_n_sigma"), (-1,)),
    **dict.fromkeys(("format", "grammar"), EMPTY_TEXT),
    **dict.fromkeys(("json_schema", "options"), EMPTY_OBJECT),
    "lora": EMPTY_LIST,
    "watermark": OFF,
}
"""Fields of llama.cpp, Ollama and text-generation-inference."""
REFUSED = OPENAI | VLLM_AND_SGLANG | OTHERS
"""Fields that would change the answer, with the values that have no effect; null has none either."""

REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = REFUSED | {
    **dict.fromkeys(("add_generation_prompt", "max_completion_tokens", "reasoning_effort"), ()),
    "chat_template_kwargs": EMPTY_OBJECT,
    "continue_final_message": OFF,
    "tool_choice": ("none", "auto"),
    "tools": EMPTY_LIST,
    "top_logprobs": (0,),
}
REFUSED_IN_CHATS: dict[str, tuple[Any, ...]] = REFUSED | {"echo": OFF}
REFUSED_IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("conversation", "image", "max_tool_calls", "moderation"), ()),
    **dict.fromkeys(("previous_response_id", "prompt"), ()),
    "context_management": EMPTY_LIST,
    "include": ([], ["reasoning.encrypted_content"]),
    "background": OFF,
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

ACCOUNTING = {"metadata", "request_id", "rid", "safety_identifier", "service_tier", "store", "usage", "user"}
ROUTING = {"cache_prompt", "id_slot", "keep_alive", "prompt_cache_key", "prompt_cache_retention"}
PROGRESS = {"prediction", "return_progress", "timings_per_token"}
DETAILS_OF_SAMPLING = {
    *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
    *("early_stopping", "length_penalty", "mirostat_eta", "mirostat_tau", "xtc_threshold"),
}
DETAILS_OF_TEXT = {"guided_decoding_backend", "guided_whitespace_pattern", "spaces_between_special_tokens"}
"""Details of features whose own fields are refused."""
IGNORED = frozenset(ACCOUNTING | ROUTING | PROGRESS | DETAILS_OF_SAMPLING | DETAILS_OF_TEXT)
"""Fields without effect on the answer."""
IGNORED_IN_COMPLETIONS = IGNORED | {"parallel_tool_calls"}
IGNORED_IN_RESPONSES = IGNORED | {"access_programs", "background_options", "prompt_cache_options"}
IGNORED_IN_STREAMS = frozenset({"include_obfuscation"})
"""Stream options without effect on the answer."""
IGNORED_IN_MESSAGES = frozenset(
    {"annotations", "cache_control", "parsed", "parsed_arguments", "provider_specific_fields", "refusal"}
)
"""Fields of messages and of their parts that chat templates do not read; clients add some to replies."""

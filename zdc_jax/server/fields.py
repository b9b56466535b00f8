"""Tables of request fields that the server does not implement: those it refuses and those it ignores.

A field that a body declares needs no row. Fields without a row are refused as unknown.
"""

from typing import Any

OFF = (False,)

REFUSED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM and SGLang
    "chat_template": (),
    "custom_logit_processor": (),
    "documents": ([],),
    "ebnf": (),
    "include_stop_str_in_output": OFF,
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "lora_path": (),
    "no_stop_trim": OFF,
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "return_hidden_states": OFF,
    "return_token_ids": OFF,
    "return_tokens_as_token_ids": OFF,
    "skip_special_tokens": (True,),
    "stop_regex": (),
    "thinking": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": OFF,
    # llama.cpp, Ollama and text-generation-inference
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "format": ("",),
    "grammar": ("",),
    "json_schema": ({},),
    "lora": ([],),
    "mirostat": (0,),
    "n_predict": (),
    "n_probs": (0,),
    "num_ctx": (),
    "num_predict": (),
    "options": ({},),
    "repeat_last_n": (-1,),
    "repeat_penalty": (1,),
    "samplers": (),
    "tfs_z": (1,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "watermark": OFF,
    "xtc_probability": (0,),
}
"""Fields that would change the answer, with the values that have no effect; null has none either."""

REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = REFUSED | {
    "add_generation_prompt": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": OFF,
    "max_completion_tokens": (),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
REFUSED_IN_CHATS: dict[str, tuple[Any, ...]] = REFUSED | {
    "echo": OFF,
}
REFUSED_IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": OFF,
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}

IGNORED = frozenset(
    {
        # Accounting, storage and routing
        "cache_prompt",
        "id_slot",
        "keep_alive",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "return_progress",
        "rid",
        "safety_identifier",
        "service_tier",
        "store",
        "timings_per_token",
        "usage",
        "user",
        # Details of features whose own fields are refused
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "early_stopping",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "length_penalty",
        "mirostat_eta",
        "mirostat_tau",
        "spaces_between_special_tokens",
        "xtc_threshold",
    }
)
"""Fields without effect on the answer."""
IGNORED_IN_COMPLETIONS = IGNORED | {"parallel_tool_calls"}
IGNORED_IN_RESPONSES = IGNORED | {"access_programs", "background_options", "prompt_cache_options"}
IGNORED_IN_STREAMS = frozenset({"include_obfuscation"})
"""Stream options without effect on the answer."""
IGNORED_IN_MESSAGES = frozenset({"annotations", "cache_control", "provider_specific_fields", "refusal"})
"""Fields of messages and of their parts that chat templates do not read."""

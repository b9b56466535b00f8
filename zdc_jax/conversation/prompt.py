"""Conversion of chat messages to prompts: token ids, and the tokens that end a reply."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from zdc_jax.conversation.template import ChatTemplate, Message
from zdc_jax.errors import ChatError
from zdc_jax.generation.request import tokenized
from zdc_jax.loading import TextModel


def opening(system: str | None, message: str) -> list[dict[str, str]]:
    """Return the first messages of a chat: an optional system message and the user's message."""
    system_messages = [] if system is None else [{"role": "system", "content": system}]
    return [*system_messages, {"role": "user", "content": message}]


def chat_prompt(
    model: TextModel,
    messages: Iterable[Message],
    options: Mapping[str, Any] | None = None,
    *,
    add_special_tokens: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """Return the token ids of a chat up to the start of the assistant's reply, for `generate` and `stream`.

    As in transformers and vLLM, text of a message that spells a special token becomes that token.

    Args:
      model: model with a tokenizer and a chat template.
      messages: messages, oldest first, each with a `role` (system, user, assistant or tool) and a `content`.
      options: further variables of the template, see `ChatTemplate.render`.
      add_special_tokens: add special tokens such as BOS, for a template that does not write them.
      tools: tools that the model may call, in the format of transformers.
      add_generation_prompt: end with the start of an assistant's reply.
      continue_final_message: end with the content of the last message, for the model to continue.

    Raises:
      ChatError: the model has no template or tokenizer, messages are malformed, or the template fails.
      PromptError: the tokenizer cannot encode the text.
    """
    template, tokenizer = get_template_and_tokenizer(model)
    if tools:
        template, options = template.for_tools(), {**(options or {}), "tools": list(tools)}
    text = template.render(
        messages,
        options,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    return tokenized(tokenizer, text, add_special_tokens=add_special_tokens)


def chat_stop_tokens(model: TextModel) -> tuple[int, ...]:
    """Return the ids that end a reply: the model's end-of-sequence ids and the tokenizer's `eos_token`.

    If config.json was copied from a base model, often only the `eos_token` ends a reply. Ids outside the
    vocabulary, which some folders name, are left out.
    """
    template, tokenizer = get_template_and_tokenizer(model)
    eos_token = template.special_tokens.get("eos_token")
    eos_id = None if eos_token is None else tokenizer.token_to_id(eos_token)
    named = [*model.config.eos_ids, *([] if eos_id is None else [eos_id])]
    return tuple(dict.fromkeys(token for token in named if 0 <= token < model.config.vocab_size))


def get_template_and_tokenizer(model: TextModel) -> tuple[ChatTemplate, Tokenizer]:
    """Return the chat template and the tokenizer of a model; raise `ChatError` if one is missing."""
    if not hasattr(model, "chat_template"):
        raise ChatError(f"{model=!r:.80} must be a model; pass zdc_jax.load(FOLDER)")
    if model.chat_template is None or model.tokenizer is None:
        missing = "tokenizer" if model.tokenizer is None else "chat template"
        raise ChatError(
            f"this model has no {missing}; use a model made for chat, or put its chat_template.jinja into "
            "the converted folder"
        )
    return model.chat_template, model.tokenizer

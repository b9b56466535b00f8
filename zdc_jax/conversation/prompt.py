"""What a chat is for `generate`: a prompt's token ids, and the tokens that end a reply."""

from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

from zdc_jax.conversation.template import ChatTemplate, Message
from zdc_jax.errors import ChatError
from zdc_jax.generation.request import tokenized
from zdc_jax.loading import TextModel


def opening(system: str | None, message: str) -> list[dict[str, str]]:
    """A first message, behind what the model is told before it, if anything."""
    told = [] if system is None else [{"role": "system", "content": system}]
    return [*told, {"role": "user", "content": message}]


def chat_prompt(
    model: TextModel, messages: Iterable[Message], options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a chat up to where the assistant's reply begins, for `generate` and `stream`.

    As in transformers and vLLM, text of a message that spells a special token becomes that token.

    Args:
      messages: oldest first, each with a `role` (system, user or assistant) and a `content`.
      options: further variables of the model's template, see `ChatTemplate.render`.

    Raises:
      ChatError: no template or tokenizer, malformed messages, a template that cannot be used.
      PromptError: the tokenizer cannot encode the text.
    """
    template, tokenizer = means_to_chat(model)
    # Templates write the tokens that a text begins with themselves.
    return tokenized(tokenizer, template.render(messages, options), add_special_tokens=False)


def chat_stop_tokens(model: TextModel) -> tuple[int, ...]:
    """Ids that end a reply: the model's end-of-sequence ids, and the tokenizer's `eos_token`.

    The latter is often the only one that ends a turn, where config.json was copied from a base model. Ids
    outside the vocabulary, which some folders name, are none.
    """
    template, tokenizer = means_to_chat(model)
    ending = template.special_tokens.get("eos_token")
    own = None if ending is None else tokenizer.token_to_id(ending)
    named = [*model.config.eos_ids, *([] if own is None else [own])]
    return tuple(dict.fromkeys(token for token in named if 0 <= token < model.config.vocab_size))


def means_to_chat(model: TextModel) -> tuple[ChatTemplate, Tokenizer]:
    """Template and tokenizer of a model; raises `ChatError` where one is missing."""
    if model.chat_template is None or model.tokenizer is None:
        missing = "tokenizer" if model.tokenizer is None else "chat template"
        raise ChatError(
            f"this model has no {missing}; take one that was made for chat, or put its "
            "chat_template.jinja into the converted folder"
        )
    return model.chat_template, model.tokenizer

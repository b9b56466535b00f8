"""Whether a request can be served at all: known before any engine takes it."""

from zdc_jax.engine.request import MAX_LOGPROBS, EngineRequest
from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.generation.request import check_limit, stop_strings, stop_token_ids, token_ids
from zdc_jax.generation.row_numbers import MAX_STOP_TOKENS
from zdc_jax.generation.sampling import is_whole
from zdc_jax.loading import TextModel


def stop_ids(model: TextModel, request: EngineRequest) -> tuple[int, ...]:
    """Tokens that end an answer; raises `PromptError` for ids that are none of the model's."""
    own = () if request.ignore_eos else model.config.eos_ids
    return tuple(dict.fromkeys((*own, *stop_token_ids(model, request.stop_tokens))))


def check_length(prompt: int, max_tokens: int, max_model_len: int, limit: str = "max_tokens") -> None:
    """Raises `PromptError` where a prompt of so many tokens and its answer are longer than what is served.

    limit: what the asker calls `max_tokens`.
    """
    if (asked := prompt + max_tokens) > max_model_len:
        raise PromptError(
            f"{prompt} prompt tokens and {limit}={max_tokens} are {asked}: "
            f"at most {max_model_len} are served (max_model_len)"
        )


def check_request(model: TextModel, max_model_len: int, request: EngineRequest) -> None:
    """Raises `PromptError` for what cannot be served.

    max_model_len: tokens of a prompt and its answer together, at most.
    """
    check_limit(request.max_tokens)
    token_ids(model, request.prompt)
    if request.generated:
        token_ids(model, request.generated)
    check_length(len(request.prompt), request.max_tokens, max_model_len)
    if not (is_whole(request.min_tokens) and 0 <= request.min_tokens <= request.max_tokens):
        raise PromptError(f"min_tokens={request.min_tokens} must be 0 to max_tokens={request.max_tokens}")
    asked_for = request.logprobs
    if asked_for is not None and not (is_whole(asked_for) and 0 <= asked_for <= MAX_LOGPROBS):
        raise PromptError(f"logprobs={asked_for!r} must be 0 to {MAX_LOGPROBS}")
    if request.prompt_logprobs and request.logprobs is None:
        raise PromptError("prompt_logprobs needs logprobs: how many alternatives of each token")
    if len(stop_ids(model, request)) > MAX_STOP_TOKENS:
        raise PromptError(f"stop_tokens: at most {MAX_STOP_TOKENS} are allowed, the model's own among them")
    stop_strings(model, request.stop)
    if not is_whole(request.priority):
        raise PromptError(f"priority={request.priority!r:.80} must be a whole number")
    with foreign_errors_as(PromptError, f"salt={request.salt!r:.80} must be a text"):
        request.salt.encode()

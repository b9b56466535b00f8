"""Validation of networks that an engine shall serve, and of requests before they are queued."""

from zdc_jax.engine.request import MAX_LOGPROBS, EngineRequest
from zdc_jax.errors import MeshError, PlanError, PromptError, foreign_errors_as
from zdc_jax.generation.guide import check_sampling
from zdc_jax.generation.packed_parameters import MAX_STOP_TOKENS
from zdc_jax.generation.request import (
    check_limit,
    find_special_tokens,
    stop_strings,
    stop_token_ids,
    token_ids,
)
from zdc_jax.generation.sampling import is_whole
from zdc_jax.loading import TextModel
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.mesh import DATA

CLAUSES = frozenset({"chunked", "ragged", "order", "reuse"})
"""Clauses of the cache contract that the engine needs.

Sequences are prefilled in chunks, batched with others, and take the place of sequences that have ended.
"""


def resolve_stop_ids(model: TextModel, request: EngineRequest, name: str = "stop_tokens") -> tuple[int, ...]:
    """Return the token ids that end the answer, including stop strings that are special tokens.

    Args:
      model: model of the engine.
      request: request whose answer ends.
      name: name of the argument `stop_tokens` in errors.

    Raises:
      PromptError: an id lies outside the vocabulary, or there are more ids than a program reads.
    """
    own = () if request.ignore_eos else model.config.eos_ids
    asked = stop_token_ids(model, request.stop_tokens)
    ids = tuple(dict.fromkeys((*own, *asked, *find_special_tokens(model, request.stop))))
    if len(ids) > MAX_STOP_TOKENS:
        raise PromptError(
            f"{name} has {len(ids)} ids including the model's own; at most {MAX_STOP_TOKENS} are allowed"
        )
    return ids


def check_request(model: TextModel, max_model_len: int, request: EngineRequest) -> None:
    """Raise `PromptError` unless an engine with this model can serve the request.

    Args:
      model: model of the engine.
      max_model_len: most tokens of a prompt and its answer together.
      request: request to check.
    """
    check_limit(request.max_tokens, name="max_tokens")
    token_ids(model, request.prompt)
    if request.generated:
        token_ids(model, request.generated)
    prompt, max_tokens = len(request.prompt), request.max_tokens
    if prompt + max_tokens > max_model_len:
        raise PromptError(
            f"{max_tokens=}: {prompt} prompt tokens plus {max_tokens} new ones exceed {max_model_len=}; "
            "shorten the prompt or lower max_tokens"
        )
    if not (is_whole(request.min_tokens) and 0 <= request.min_tokens <= request.max_tokens):
        raise PromptError(
            f"min_tokens={request.min_tokens!r:.80} must be a whole number from 0 to "
            f"max_tokens={request.max_tokens}"
        )
    logprobs = request.logprobs
    if logprobs is not None and not (is_whole(logprobs) and 0 <= logprobs <= MAX_LOGPROBS):
        raise PromptError(f"{logprobs=!r:.80} must be a whole number from 0 to {MAX_LOGPROBS}, or None")
    if request.prompt_logprobs and logprobs is None:
        raise PromptError(
            "prompt_logprobs=True needs logprobs; set it to the number of alternatives of each token"
        )
    resolve_stop_ids(model, request)
    stop_strings(model, request.stop)
    check_sampling(model, request.sampling)
    if not is_whole(request.priority):
        raise PromptError(f"priority={request.priority!r:.80} must be a whole number")
    with foreign_errors_as(PromptError, f"salt={request.salt!r:.80} must be a string"):
        request.salt.encode()


def check_servable(network: Transformer) -> Transformer:
    """Check that the engine can serve a network, and return the network.

    Raises:
      PlanError: the cache lacks a clause of the contract or uses host memory.
      MeshError: the mesh divides sequences.
    """
    if (data := network.count_devices(DATA)) > 1:
        raise MeshError(
            f"data={data}: an engine has one scheduler for all sequences; use data=1, or replicas"
        )
    for layer, spec in enumerate(network.layer_caches):
        if missing := CLAUSES - spec.clauses:
            kind = type(spec).__name__
            raise PlanError(
                f"layer {layer}: {kind} does not support {sorted(missing)}, which the engine needs; "
                "choose another method"
            )
        if spec.host_bytes(1024):
            raise PlanError(f"layer {layer}: memory='host' is not served by the engine; use memory='device'")
    return network

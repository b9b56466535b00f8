"""How likely continuations are behind contexts that NVIDIA's kvpress compresses, by its own code on torch.

    python benchmarks/quality/kvpress_answers.py HF_FOLDER pairs.npz answers.npz --ratios 0.5 0.75

Caches of ours can be held against these answers. pairs.npz holds `context` [W, S] and `continuation` [W, C],
token ids. A context is read exactly, and its cache is compressed when it is whole. The continuation goes on
from position S behind what is left, as in kvpress' own evaluation; so its first token follows from the exact
reading.

answers.npz holds log-probabilities [W, C] float32, `dense` and `PRESS-RATIO`; `PRESS-RATIO-kept` [W, L, K, M]
int32, which M of the S tokens each KV head of each layer keeps, in order; `context` [W, S-1] float32, the
log-probabilities of the context itself.

Needs torch, transformers >= 5 and kvpress (0.5.5 was tried), of which the presses alone are imported.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

PRESSES = {
    "streaming": ("streaming_llm_press", "StreamingLLMPress"),
    "snapkv": ("snapkv_press", "SnapKVPress"),
    "knorm": ("knorm_press", "KnormPress"),
    "observed": ("observed_attention_press", "ObservedAttentionPress"),
}
"""Module and class in `kvpress.presses`; all with their own defaults."""


def press_of(name: str, ratio: float) -> Any:
    """A press that removes `ratio` of the tokens.

    It is imported alone: the package would import all others, and with them datasets, cachetools and fire.
    """
    if "kvpress" not in sys.modules:
        found = importlib.util.find_spec("kvpress")
        if found is None or found.submodule_search_locations is None:
            sys.exit("kvpress is absent; put it on PYTHONPATH")
        package = ModuleType("kvpress")
        package.__path__ = list(found.submodule_search_locations)
        sys.modules["kvpress"] = package
    module, kind = PRESSES[name]
    return getattr(importlib.import_module(f"kvpress.presses.{module}"), kind)(compression_ratio=ratio)


@contextmanager
def watched(press: Any) -> Iterator[dict[int, np.ndarray]]:
    """What a press keeps while it works: indices [K, M], ascending, by layer."""
    kept: dict[int, np.ndarray] = {}
    score = press.score

    def watching(module: Any, hidden_states: Any, keys: torch.Tensor, *rest: Any) -> torch.Tensor:
        scores = score(module, hidden_states, keys, *rest)
        count = max(1, int(keys.shape[2] * (1 - press.compression_ratio)))
        kept[module.layer_idx] = scores[0].topk(count, dim=-1).indices.sort().values.int().cpu().numpy()
        return scores

    press.score = watching
    yield kept
    press.score = score


@torch.inference_mode()
def log_probs(
    model: PreTrainedModel, context: np.ndarray, continuation: np.ndarray, press: Any
) -> np.ndarray:
    """Log-probabilities [C] float32 of a continuation [C] behind a context [S], which `press` compresses."""
    ids = torch.tensor(np.concatenate([context, continuation])[None], dtype=torch.long, device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)
    cache, length = DynamicCache(), len(context)
    with nullcontext() if press is None else press(model):
        # Presses look at `cache_position`; transformers 5.17 hands it on to layers but does not make it.
        first = model(
            ids[:, :length], past_key_values=cache, cache_position=positions[:length], logits_to_keep=1
        )
    logits = [first.logits]
    if len(continuation) > 1:
        rest = model(ids[:, length:-1], past_key_values=cache, position_ids=positions[None, length:-1])
        logits.append(rest.logits)
    found = torch.cat(logits, dim=1)[0].float().log_softmax(-1)
    return found.gather(1, ids[0, length:, None])[:, 0].cpu().numpy()


@torch.inference_mode()
def context_log_probs(model: PreTrainedModel, context: np.ndarray) -> np.ndarray:
    """Log-probabilities [S-1] float32 of all tokens of a context but its first."""
    ids = torch.tensor(context[None], dtype=torch.long, device=model.device)
    found = model(ids).logits[0, :-1].float().log_softmax(-1)
    return found.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()


def answers(
    model: PreTrainedModel,
    contexts: np.ndarray,
    continuations: np.ndarray,
    presses: list[str],
    ratios: list[float],
) -> dict[str, np.ndarray]:
    """All arrays of answers.npz, see above."""
    pairs = list(zip(contexts, continuations, strict=True))
    model.set_attn_implementation("sdpa")
    found = {
        "context": np.stack([context_log_probs(model, context) for context in contexts]),
        "dense": np.stack([log_probs(model, *pair, None) for pair in pairs]),
    }
    for name in presses:
        # Only eager attention gives the weights that this press looks at.
        model.set_attn_implementation("eager" if name == "observed" else "sdpa")
        for ratio in ratios:
            press, rows, kept = press_of(name, ratio), [], []
            for pair in pairs:
                with watched(press) as indices:
                    rows.append(log_probs(model, *pair, press))
                kept.append(np.stack([indices[layer] for layer in sorted(indices)]))
            label = f"{name}-{ratio:g}"
            found |= {label: np.stack(rows), f"{label}-kept": np.stack(kept)}
            print(
                f"{label}: {found[label].mean():.5f} nats a token, dense {found['dense'].mean():.5f}",
                flush=True,
            )
    return found


def main() -> None:
    """The command above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder, or the folder of --gguf-file")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gguf-file", help="name of a GGUF file in that folder")
    parser.add_argument("--presses", nargs="+", choices=PRESSES, default=list(PRESSES))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5], help="of tokens removed, in (0, 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if not all(0 < ratio < 1 for ratio in given.ratios):
        parser.error(f"--ratios {given.ratios} must lie in (0, 1)")
    torch.backends.cuda.matmul.allow_tf32 = False
    with np.load(given.pairs) as pairs:
        contexts, continuations = pairs["context"], pairs["continuation"]
    model = AutoModelForCausalLM.from_pretrained(
        given.model, gguf_file=given.gguf_file, dtype=getattr(torch, given.dtype)
    )
    model = model.to(given.device).eval()
    np.savez(given.output, **answers(model, contexts, continuations, given.presses, given.ratios))


if __name__ == "__main__":
    main()

"""Log-probabilities of continuations after contexts that NVIDIA's kvpress compresses.

    python benchmarks/quality/kvpress_answers.py HF_FOLDER pairs.npz answers.npz --ratios 0.5 0.75

`kvpress_check` compares our caches with these answers. pairs.npz has `context` [W, S] and `continuation` [W,
C], token ids. A context is read exactly, and its cache is compressed afterwards. The continuation starts at
position S, as in kvpress' own evaluation, so its first token follows from the exact context.

answers.npz has log-probabilities in float32: `dense` and `PRESS-RATIO` [W, C] for continuations, and
`context` [W, S-1] for contexts. `PRESS-RATIO-kept` [W, L, K, M] int32 lists the M tokens that each KV head of
each layer keeps, in order.

The script needs torch, transformers >= 5 and kvpress (tested with 0.5.5), of which it imports the presses
alone.
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
"""Module and class in `kvpress.presses`; all with their default settings."""


def press_of(name: str, ratio: float) -> Any:
    """Return a press that removes `ratio` of the tokens.

    Only its module is imported: the package would import all presses, and datasets, cachetools and fire.
    """
    if "kvpress" not in sys.modules:
        spec = importlib.util.find_spec("kvpress")
        if spec is None or spec.submodule_search_locations is None:
            sys.exit("kvpress is absent; put it on PYTHONPATH")
        package = ModuleType("kvpress")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["kvpress"] = package
    module, kind = PRESSES[name]
    return getattr(importlib.import_module(f"kvpress.presses.{module}"), kind)(compression_ratio=ratio)


@contextmanager
def watched(press: Any) -> Iterator[dict[int, np.ndarray]]:
    """Record which tokens a press keeps: indices [K, M], ascending, by layer."""
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
    """Return log-probabilities [C] of a continuation [C] after a context [S] that `press` compresses."""
    ids = torch.tensor(np.concatenate([context, continuation])[None], dtype=torch.long, device=model.device)
    positions = torch.arange(ids.shape[1], device=model.device)
    cache, length = DynamicCache(), len(context)
    with nullcontext() if press is None else press(model):
        # Presses need `cache_position`, which transformers 5.17 passes on but does not create.
        first = model(
            ids[:, :length], past_key_values=cache, cache_position=positions[:length], logits_to_keep=1
        )
    logits = [first.logits]
    if len(continuation) > 1:
        rest = model(ids[:, length:-1], past_key_values=cache, position_ids=positions[None, length:-1])
        logits.append(rest.logits)
    log_probabilities = torch.cat(logits, dim=1)[0].float().log_softmax(-1)
    return log_probabilities.gather(1, ids[0, length:, None])[:, 0].cpu().numpy()


@torch.inference_mode()
def context_log_probs(model: PreTrainedModel, context: np.ndarray) -> np.ndarray:
    """Return log-probabilities [S-1] of all tokens of a context except the first."""
    ids = torch.tensor(context[None], dtype=torch.long, device=model.device)
    log_probabilities = model(ids).logits[0, :-1].float().log_softmax(-1)
    return log_probabilities.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()


def answers(
    model: PreTrainedModel,
    contexts: np.ndarray,
    continuations: np.ndarray,
    presses: list[str],
    ratios: list[float],
) -> dict[str, np.ndarray]:
    """Return all arrays of answers.npz."""
    pairs = list(zip(contexts, continuations, strict=True))
    model.set_attn_implementation("sdpa")
    arrays = {
        "context": np.stack([context_log_probs(model, context) for context in contexts]),
        "dense": np.stack([log_probs(model, *pair, None) for pair in pairs]),
    }
    for name in presses:
        # This press needs attention weights, which only eager attention returns.
        model.set_attn_implementation("eager" if name == "observed" else "sdpa")
        for ratio in ratios:
            press, rows, kept = press_of(name, ratio), [], []
            for pair in pairs:
                with watched(press) as indices:
                    rows.append(log_probs(model, *pair, press))
                kept.append(np.stack([indices[layer] for layer in sorted(indices)]))
            label = f"{name}-{ratio:g}"
            arrays |= {label: np.stack(rows), f"{label}-kept": np.stack(kept)}
            print(
                f"{label}: {arrays[label].mean():.5f} nats a token, dense {arrays['dense'].mean():.5f}",
                flush=True,
            )
    return arrays


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder, or the folder of --gguf-file")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gguf-file", help="name of a GGUF file in that folder")
    parser.add_argument("--presses", nargs="+", choices=PRESSES, default=list(PRESSES))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5], help="of tokens removed, in (0, 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if not all(0 < ratio < 1 for ratio in options.ratios):
        parser.error(f"--ratios {options.ratios}: every ratio must be in (0, 1)")
    torch.backends.cuda.matmul.allow_tf32 = False
    with np.load(options.pairs) as pairs:
        contexts, continuations = pairs["context"], pairs["continuation"]
    model = AutoModelForCausalLM.from_pretrained(
        options.model, gguf_file=options.gguf_file, dtype=getattr(torch, options.dtype)
    )
    model = model.to(options.device).eval()
    np.savez(options.output, **answers(model, contexts, continuations, options.presses, options.ratios))


if __name__ == "__main__":
    main()

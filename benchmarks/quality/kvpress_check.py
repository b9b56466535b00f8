"""Check of our eviction methods against NVIDIA's kvpress, and of our unmodified model against transformers.

    python -m benchmarks.quality.kvpress_check pairs --model CONVERTED --corpus CORPUS --pairs pairs.npz
    python benchmarks/quality/kvpress_answers.py HF_FOLDER pairs.npz A.npz --ratios 0.5 0.75
    python -m benchmarks.quality.kvpress_check compare --model CONVERTED --pairs pairs.npz --answers A.npz

Contexts are read exactly and compressed, and a continuation of one block is scored after them. Our methods
evict nothing within a block, so both libraries keep the same tokens. Only `window` continues to slide. Here
it keeps as many tokens of the context as kvpress does in the middle of the continuation.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Float, Int

from benchmarks.common import RESULTS, write_result
from benchmarks.quality.material import TOPICS_LEFT_OUT
from benchmarks.quality.plans import method_plan
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.evaluation.perplexity import bootstrap_interval, next_token_nll, window_nll
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.loading import load
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

CONTINUATION = 64


@dataclass(frozen=True)
class Pairs:
    """Draw contexts and continuations from held-out text."""

    model: Path
    corpus: Path
    pairs: Path
    rows: int = 24
    context: int = 1024
    seed: int = 16

    def run(self) -> None:
        """Write the file `pairs`."""
        checkpoint = Checkpoint.open(self.model)
        files = [
            file
            for file in sorted(self.corpus.glob("*/heldout.txt.xz"))
            if file.parent.name not in TOPICS_LEFT_OUT
        ]
        windows, _ = token_windows(
            read_documents(files),
            checkpoint.tokenizer(),
            length=self.context + CONTINUATION,
            num_windows=self.rows,
            seed=self.seed,
            eos_id=checkpoint.config.eos_ids[0],
        )
        context, continuation = np.split(windows, [self.context], axis=1)
        np.savez(self.pairs, context=context, continuation=continuation)


@dataclass(frozen=True)
class Compare:
    """Compare our methods with the answers of kvpress, in float32."""

    model: Path
    pairs: Path
    answers: Path
    name: str = "kvpress-smollm2-135m"
    batch: int = 8
    results: Path = RESULTS

    def run(self) -> None:
        """Write one JSON file."""
        jax.config.update("jax_default_matmul_precision", "highest")
        with np.load(self.pairs) as pairs:
            context, continuation = pairs["context"], pairs["continuation"]
        with np.load(self.answers) as answers:
            theirs = {name: answers[name] for name in answers if not name.endswith("-kept")}
        dense = load(self.model, dtype="float32").network
        nll = window_nll(dense, context, batch=self.batch)
        rows: list[dict[str, Any]] = [
            _row("perplexity of the contexts", None, -nll, theirs.pop("context").mean(1))
        ]
        for label, answers in theirs.items():
            plan = plan_of(label, dense.config, context.shape[1])
            network = dense if plan is None else load(self.model, plan, dtype="float32").network
            ours = continuation_log_probs(network, context, continuation, self.batch)
            # The first token follows from the exact context, in both libraries.
            rows.append(_row(label, plan, ours.mean(1), answers[:, 1:].mean(1)))
            print(rows[-1], flush=True)
        config = {"rows": len(context), "context": context.shape[1], "continuation": continuation.shape[1]}
        print(write_result(self.name, config, rows, self.results))


def plan_of(label: str, config: ModelConfig, context: int) -> CompressionPlan | None:
    """Return our plan for PRESS-RATIO of kvpress at `context` tokens; None for `dense`."""
    press, _, ratio = label.partition("-")
    if press == "dense":
        return None
    kept = max(1, int(context * (1 - float(ratio))))
    match press:
        case "streaming":
            return method_plan(config, "window", window=kept - 4 + CONTINUATION // 2, sinks=4)
        case "snapkv":
            options = {"observed": 64, "pool": 5, "pooling": "average"}
            return method_plan(config, "snapkv", window=64, sinks=0, kept=kept - 64, **options)
        case "knorm":
            return method_plan(config, "knorm", kept=kept)
        case "observed":
            return method_plan(config, "h2o", kept=kept, mean=True)
    raise ValueError(f"{label=} names no press that we follow")


def continuation_log_probs(
    network: Transformer,
    context: Int[np.ndarray, "W S"],
    continuation: Int[np.ndarray, "W C"],
    batch: int,
) -> Float[np.ndarray, "W C_next"]:
    """Return log-probabilities of all tokens of continuations except the first, after exact contexts."""
    log_probabilities = []
    for start in range(0, len(context), batch):
        rows, then = (jnp.asarray(tokens[start : start + batch]) for tokens in (context, continuation))
        (B, S), C = rows.shape, then.shape[1]
        _, cache = network.read_prompt(rows, jnp.full(B, S, jnp.int32), capacity=S + C)
        hidden, _ = network.extend(cache, then, cache.lengths + C)
        log_probabilities.append(-np.asarray(next_token_nll(network.embeddings, hidden, then)))
    return np.concatenate(log_probabilities)


def _row(label: str, plan: CompressionPlan | None, ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
    """Return nats a token, ours and theirs, and the increase of perplexity over theirs with its interval."""
    difference = theirs - ours
    return {
        "label": label,
        "plan": None if plan is None else plan.to_json(),
        "ours": float(ours.mean()),
        "theirs": float(theirs.mean()),
        "increase": float(np.expm1(difference.mean())),
        "interval": bootstrap_interval(difference),
        "largest": float(np.abs(difference).max()),
    }


if __name__ == "__main__":
    tyro.cli(
        Annotated[Pairs, tyro.conf.subcommand("pairs")] | Annotated[Compare, tyro.conf.subcommand("compare")]
    ).run()

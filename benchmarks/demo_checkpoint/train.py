"""Train the demo checkpoint from a folder of topics and write it in Hugging Face layout.

    python -m benchmarks.demo_checkpoint.train --corpus CORPUS --output convert/demo_checkpoint

`CORPUS/<topic>/train.txt.xz` and `heldout.txt.xz` hold documents between lines `<|endoftext|>`. Their text is
in the public domain or under a permissive license. Architecture and tokenizer
are those of the checkpoint that ships. One H100 needs five minutes.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from benchmarks.demo_checkpoint.export import export_tensors
from benchmarks.demo_checkpoint.judge import Windows, measure_perplexity, measure_retrieval
from benchmarks.demo_checkpoint.mixing import Encode, cache_encoding, mix
from benchmarks.demo_checkpoint.step import choose_rate, make_step
from benchmarks.random_weights import random_params
from convert.conversion import open_source
from convert.demo_checkpoint import PATH
from convert.hf.weights import SINGLE
from zdc_jax.config import ModelConfig
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.model.params import embedding_shapes, layer_shapes, num_params
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

TOPICS = (
    "books_gutenberg", "code_python", "dialogue_oasst", "law_dc", "math_gsm8k", "peps_docs",
    "pubmed_abstracts", "speeches_us", "web_blog_18f",
)  # fmt: skip
CLOCK_STEPS = 50
"""Steps between two looks at the clock; the host waits for the device there."""
HELDOUT_WINDOWS = 16
"""Windows of each topic for perplexity."""


@dataclass(frozen=True)
class Options:
    """Training options."""

    corpus: Path
    """Folder of topics."""
    output: Path
    """Folder to write the checkpoint to."""
    minutes: float = 4.5
    """Training time, without compilation and evaluation."""
    batch: int = 32
    """Windows in one step."""
    learning_rate: float = 3e-3
    """Highest learning rate."""
    fact_share: float = 0.4
    """Share of windows with facts and questions."""
    answer_weight: float = 4.0
    """Weight of a number in an answer, compared with any other token."""
    layers: int = 6
    """Layers of the model; fewer for a trial on a CPU."""
    context: int = 2048
    """Tokens of a window; fewer for a trial on a CPU."""
    seed: int = 0
    """Seed of the initial weights, the order of windows, and the facts."""


def read_windows(options: Options, tokenizer: Tokenizer, split: str, count: int | None) -> list[Windows]:
    """Return at most `count` windows of each topic's text."""

    def read(topic: str) -> Windows:
        documents = read_documents([options.corpus / topic / f"{split}.txt.xz"])
        eos_id = tokenizer.token_to_id("</s>")
        windows, _ = token_windows(
            documents, tokenizer, length=options.context, num_windows=count, eos_id=eos_id
        )
        return windows

    return list(map(read, TOPICS))


def train(config: ModelConfig, options: Options, windows: Windows, encode: Encode) -> tuple[Transformer, int]:
    """Train on windows that are shuffled every epoch; return float32 parameters and the number of steps."""
    params = random_params(replace(config, dtype="float32"), jax.random.key(options.seed))
    network = Transformer(config, CompressionPlan.full(config), params["embeddings"], params["layers"])
    step, state = make_step(network, answer_weight=options.answer_weight)
    rng, order = np.random.default_rng(options.seed), np.empty(0, int)
    steps, progress, began = 0, 0.0, time.perf_counter()
    while progress < 1:
        if len(order) < options.batch:
            order = rng.permutation(len(windows))
        picked, order = order[: options.batch], order[options.batch :]
        text = mix(windows[picked], encode, rng, fact_share=options.fact_share)
        rate = np.float32(choose_rate(progress, options.learning_rate))
        network, state, losses = step(network, state, text.tokens, text.answers, rate)
        steps += 1
        if steps % CLOCK_STEPS == 1:
            loss, answers_loss = map(float, losses)
            if steps == 1:
                began = time.perf_counter()  # The first step compiled.
            progress = (time.perf_counter() - began) / (60 * options.minutes)
            print(f"step {steps}, {progress:.0%}: loss {loss:.3f}, of answers {answers_loss:.3f}", flush=True)
    return network, steps


def read_params(module: Any, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's parameters in bfloat16, nested as in `shapes`."""
    return {
        name: read_params(getattr(module, name), shape)
        if isinstance(shape, dict)
        else np.asarray(getattr(module, name)[...].astype(jnp.bfloat16))
        for name, shape in shapes.items()
    }


def main(options: Options) -> None:
    """Train, judge, and write `config.json`, `model.safetensors`, the tokenizer and `training.json`."""
    began = time.perf_counter()
    shipped = open_source(PATH).config("bfloat16")
    config = replace(shipped, layers=shipped.layers[: options.layers], max_positions=options.context)
    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    windows = np.concatenate(read_windows(options, tokenizer, "train", None))
    print(f"{windows.size:,} tokens of text read in {time.perf_counter() - began:.0f} s", flush=True)
    encode = cache_encoding(tokenizer)
    network, steps = train(config, options, windows, encode)
    embeddings = read_params(network.embeddings, embedding_shapes(config))
    layers = [read_params(layer, layer_shapes(config, i)) for i, layer in enumerate(network.layers)]
    options.output.mkdir(parents=True, exist_ok=True)
    changes = {"num_hidden_layers": options.layers, "max_position_embeddings": options.context}
    settings = json.loads((PATH / "config.json").read_text()) | changes
    (options.output / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tensors = export_tensors({"embeddings": embeddings, "layers": layers}, config)
    save_file(tensors, options.output / SINGLE, metadata={"format": "pt"})
    tokenizer.save(str(options.output / "tokenizer.json"))
    heldout = read_windows(options, tokenizer, "heldout", HELDOUT_WINDOWS)
    trained = Transformer(config, network.plan, embeddings, layers)
    mixed = np.random.default_rng(options.seed).permutation(np.concatenate(heldout))
    record = {
        "topics": TOPICS,
        "options": {name: value for name, value in asdict(options).items() if not isinstance(value, Path)},
        "tokens_seen": steps * options.batch * options.context,
        "tokens_distinct": int(windows.size),
        "parameters": num_params(config),
        "heldout_perplexity": measure_perplexity(trained, dict(zip(TOPICS, heldout, strict=True))),
        "heldout_retrieval": measure_retrieval(trained, mixed, encode),
        "seconds": round(time.perf_counter() - began),
    }
    (options.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main(tyro.cli(Options))

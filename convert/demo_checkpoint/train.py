"""Train the demo checkpoint from a folder of topics and write it in Hugging Face layout.

    python -m convert.demo_checkpoint.train --corpus CORPUS --output convert/demo_checkpoint

`CORPUS/<topic>/train.txt.xz` and `heldout.txt.xz` hold documents between lines `<|endoftext|>`. Only topics
whose text is in the public domain or under a permissive license are read (`options.py`). Half of the windows
also contain facts and questions about them (`mixing.py`), so that the model learns to look back. It all takes
seven minutes on one GPU.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from convert.demo_checkpoint.judge import Windows, measure_perplexity, measure_retrieval
from convert.demo_checkpoint.mixing import Encode, cache_encoding, mix
from convert.demo_checkpoint.options import CONFIG, EOS_ID, SPECIAL_TOKENS, TOPICS, Options
from convert.demo_checkpoint.step import Losses, choose_rate, make_step
from convert.hf.export import export_hf
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.model.params import num_params, random_params
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

CLOCK_STEPS = 10
"""Steps between two looks at the clock; the host waits for the device there."""
REPORTS = 40
"""Lines of progress."""
HELDOUT_WINDOWS = 16
"""Windows of each topic for perplexity."""


def train_tokenizer(paths: list[Path]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with the model's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in read_documents(paths)), trainer)
    return tokenizer


class Clock:
    """Progress of training by steps and by time, whichever is further."""

    def __init__(self, options: Options):
        self.steps, self.seconds = options.steps, 60 * options.minutes
        self.began, self.step, self.elapsed = time.perf_counter(), 0, 0.0

    def tick(self, losses: Losses) -> None:
        """Count a step; wait for the device and read the time now and then."""
        self.step += 1
        if self.step == 1 or self.step % CLOCK_STEPS == 0:
            jax.block_until_ready(losses)
            self.elapsed = time.perf_counter() - self.began
        if self.step == 1:
            print(f"compiled in {self.elapsed:.0f} s", flush=True)
            self.began, self.elapsed = time.perf_counter(), 0.0

    @property
    def progress(self) -> float:
        """Share of training that is done."""
        return max(self.step / self.steps, self.elapsed / self.seconds)


def train(options: Options, windows: Windows, encode: Encode) -> tuple[Transformer, int]:
    """Train on windows that are shuffled every epoch; return float32 parameters and the tokens seen."""
    network = create_network(options)
    step, state = make_step(options, network)
    rng, order = np.random.default_rng(options.seed), np.empty(0, int)
    clock, reported = Clock(options), -1
    while clock.progress < 1:
        if len(order) < options.batch:
            order = rng.permutation(len(windows))
        picked, order = order[: options.batch], order[options.batch :]
        text = mix(windows[picked], encode, rng, fact_share=options.fact_share)
        rate = np.float32(choose_rate(clock.progress, options.learning_rate))
        network, state, losses = step(network, state, text.tokens, text.answers, rate)
        clock.tick(losses)
        if int(clock.progress * REPORTS) > reported:
            reported = int(clock.progress * REPORTS)
            print_progress(clock, losses, options)
    return network, clock.step * options.batch * options.context


def create_network(options: Options) -> Transformer:
    """Return a network with random float32 parameters."""
    params = random_params(replace(options.config, dtype="float32"), jax.random.key(options.seed))
    plan = CompressionPlan.full(options.config)
    return Transformer(options.config, plan, params["embeddings"], params["layers"])


def print_progress(clock: Clock, losses: Losses, options: Options) -> None:
    """Print one line of progress."""
    text, answers = (float(each) for each in losses)
    tokens = clock.step * options.batch * options.context
    print(
        f"step {clock.step}, {clock.progress:.0%}: loss {text:.3f}, of answers {answers:.3f}; "
        f"{tokens:,} tokens in {clock.elapsed:.0f} s",
        flush=True,
    )


def collect_params(network: Transformer) -> dict[str, Any]:
    """Return a trained network's parameters in the layout of `zdc_jax.model.params`, in bfloat16."""

    def cast(x: Any) -> np.ndarray:
        return np.asarray(x[...].astype(jnp.bfloat16))

    layers = [
        {
            "attention": {name: cast(getattr(block.attention, name)) for name in "qkvo"},
            "mlp": {name: cast(getattr(block.mlp, name)) for name in ("gate", "up", "down")},
            "attention_norm": {"scale": cast(block.attention_norm.scale)},
            "mlp_norm": {"scale": cast(block.mlp_norm.scale)},
        }
        for block in network.layers
    ]
    assert network.embeddings.final_norm is not None
    embeddings = {
        "tokens": cast(network.embeddings.tokens),
        "final_norm": {"scale": cast(network.embeddings.final_norm.scale)},
    }
    return {"embeddings": embeddings, "layers": layers}


def read_text(options: Options, tokenizer: Tokenizer) -> tuple[Windows, dict[str, Windows]]:
    """Return windows of training text, and a few windows of each topic's held-out text."""

    def cut(topic: str, split: str, count: int | None) -> Windows:
        documents = read_documents([options.corpus / topic / f"{split}.txt.xz"])
        windows, _ = token_windows(
            documents, tokenizer, length=options.context, num_windows=count, eos_id=EOS_ID
        )
        return windows

    training = np.concatenate([cut(topic, "train", None) for topic in TOPICS])
    return training, {topic: cut(topic, "heldout", HELDOUT_WINDOWS) for topic in TOPICS}


def main(options: Options) -> None:
    """Train, judge, and write `config.json`, `model.safetensors`, the tokenizer and `training.json`."""
    began = time.perf_counter()
    print(f"{num_params(options.config):,} parameters on {jax.devices()[0].device_kind}", flush=True)
    tokenizer = train_tokenizer([options.corpus / topic / "train.txt.xz" for topic in TOPICS])
    windows, heldout = read_text(options, tokenizer)
    print(f"{windows.size:,} tokens of text read in {time.perf_counter() - began:.0f} s", flush=True)
    encode = cache_encoding(tokenizer)
    network, tokens_seen = train(options, windows, encode)
    params = collect_params(network)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.output / "tokenizer.json"))
    export_hf(params, options.config, options.output)
    print("judging", flush=True)
    plan = CompressionPlan.full(options.config)
    final = Transformer(options.config, plan, params["embeddings"], params["layers"])
    mixed = np.random.default_rng(options.seed).permutation(np.concatenate(list(heldout.values())))
    record = {
        "topics": TOPICS,
        "tokens_seen": tokens_seen,
        "tokens_distinct": int(windows.size),
        "parameters": num_params(options.config),
        "fact_share": options.fact_share,
        "heldout_perplexity": measure_perplexity(final, heldout),
        "heldout_retrieval": measure_retrieval(final, mixed, encode),
    }
    (options.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    print(f"wrote {options.output}; {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main(tyro.cli(Options))

"""Train the demo checkpoint from a folder of topics and write it in Hugging Face layout.

    python -m convert.demo_checkpoint.train --corpus CORPUS --output convert/demo_checkpoint

`CORPUS/<topic>/train.txt.xz` and `heldout.txt.xz` hold documents between lines `<|endoftext|>`. Only the topics
in `TOPICS` are read: their text is in the public domain or under a permissive license. Half of the windows also
contain facts and questions about them (`mixing.py`), so that the model learns to look back. Training takes five
minutes on one GPU.
"""

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from convert.demo_checkpoint.facts import draw_facts
from convert.demo_checkpoint.mixing import Encode, cache_encoding, end_with_question, mix, stack
from convert.hf.export import export_hf
from zdc_jax.axes import Array
from zdc_jax.config import LayerSpec, ModelConfig, RopeConfig
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.model.params import num_params, random_params
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.plan import CompressionPlan

TOPICS = (
    "books_gutenberg",
    "code_python",
    "dialogue_oasst",
    "law_dc",
    "math_gsm8k",
    "peps_docs",
    "pubmed_abstracts",
    "speeches_us",
    "web_blog_18f",
)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
EOS_ID = 2
CONFIG = ModelConfig(
    family="llama",
    layers=LayerSpec(rope=RopeConfig(theta=10_000.0)).repeated(6),
    norm="rms",
    embed_dim=256,
    ffn_dim=576,
    vocab_size=4096,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=2048,
    norm_eps=1e-6,
    activation="silu",
    dtype="bfloat16",
    tie_embeddings=True,
    bos_id=1,
    eos_ids=(EOS_ID,),
)
WARM_UP = 0.02
"""Share of training in which the learning rate rises."""
CLOCK_STEPS = 10
"""Steps between two looks at the clock; the host waits for the device there."""
REPORTS = 40
HELDOUT_WINDOWS = 16
"""Windows of each topic for perplexity."""
DISTANCES = (50, 200, 500, 1000, 1500, 1900)
"""Tokens between a fact and its question, for retrieval on held-out text."""
QUESTIONS = 64
"""Questions at each distance."""


@dataclass(frozen=True)
class Options:
    """Training options."""

    corpus: Path
    """Folder of topics."""
    output: Path
    """Folder to write the checkpoint to."""
    tokens: int = 600_000_000
    """Tokens to train on, all epochs together."""
    minutes: float = 5.0
    """Longest training time, without compilation and evaluation; the learning rate then falls sooner."""
    batch: int = 32
    """Windows in one step."""
    learning_rate: float = 3e-3
    """Highest learning rate."""
    fact_share: float = 0.5
    """Share of windows with facts and questions."""
    answer_weight: float = 4.0
    """Weight of a number in an answer, compared with any other token."""
    attention: Implementation | None = None
    """Implementation of attention: cudnn or xla, which have gradients; default cudnn on a GPU."""
    layers: int = len(CONFIG.layers)
    """Layers of the model; fewer for a trial on a CPU."""
    context: int = CONFIG.max_positions
    """Tokens of a window; fewer for a trial on a CPU."""
    seed: int = 0
    """Seed of the initial weights, the order of windows, and the facts."""

    @property
    def config(self) -> ModelConfig:
        """Architecture."""
        return replace(CONFIG, layers=CONFIG.layers[: self.layers], max_positions=self.context)

    @property
    def steps(self) -> int:
        """Most steps of training."""
        return max(1, self.tokens // (self.batch * self.context))


class Losses(NamedTuple):
    """Cross entropies of one step in nats per token: of all tokens, and of numbers in answers."""

    text: Array
    answers: Array


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


def make_optimizer() -> optax.GradientTransformation:
    """Return AdamW without its learning rate; only projections of attention decay."""

    def choose_decayed(params: Transformer) -> Transformer:
        return jax.tree.map(is_projection, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.add_decayed_weights(0.1, mask=choose_decayed),
    )


def is_projection(weight: Array) -> bool:
    """Return whether a weight has an axis of heads."""
    return weight.ndim > 2


def choose_rate(progress: float, highest: float) -> float:
    """Return the learning rate after a share of training: a short rise, then a cosine to a tenth."""
    if progress < WARM_UP:
        return highest * progress / WARM_UP
    falling = (progress - WARM_UP) / (1 - WARM_UP)
    return highest * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, falling))) / 2)


def cast_weight(weight: Array) -> Array:
    """Cast a weight to bfloat16."""
    return weight.astype(jnp.bfloat16)


def compute_loss(
    network: Transformer,
    tokens: Int[Array, "B T"],
    answers: Bool[Array, "B T"],
    *,
    answer_weight: float,
    attention: Implementation,
) -> tuple[Float[Array, ""], Losses]:
    """Return the weighted cross entropy, computed in bfloat16 from float32 parameters, and its parts."""
    network = jax.tree.map(cast_weight, network)
    logits = network(tokens, attention)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    marked = answers[:, 1:].astype(jnp.float32)
    weights = 1 + (answer_weight - 1) * marked
    weighted = (weights * losses).sum() / weights.sum()
    return weighted, Losses(losses.mean(), (marked * losses).sum() / jnp.maximum(1, marked.sum()))


def train(options: Options, windows: Int[np.ndarray, "W T"], encode: Encode) -> tuple[Transformer, int]:
    """Train on windows that are shuffled every epoch; return float32 parameters and the tokens seen."""
    params = random_params(replace(options.config, dtype="float32"), jax.random.key(options.seed))
    plan = CompressionPlan.full(options.config)
    network = Transformer(options.config, plan, params["embeddings"], params["layers"])
    optimizer = make_optimizer()
    attention = options.attention or ("cudnn" if jax.default_backend() == "gpu" else "xla")
    loss = partial(compute_loss, answer_weight=options.answer_weight, attention=attention)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(network: Transformer, state: optax.OptState, tokens: Array, answers: Array, rate: Array) -> Any:
        (_, losses), gradients = jax.value_and_grad(loss, has_aux=True)(network, tokens, answers)
        updates, state = optimizer.update(gradients, state, network)
        return optax.apply_updates(network, jax.tree.map(lambda x: -rate * x, updates)), state, losses

    state = optimizer.init(network)
    rng = np.random.default_rng(options.seed)
    order = np.empty(0, int)
    began, elapsed, index, progress, reports = time.perf_counter(), 0.0, 0, 0.0, 0
    while progress < 1:
        if len(order) < options.batch:
            order = rng.permutation(len(windows))
        picked, order = order[: options.batch], order[options.batch :]
        text = mix(windows[picked], encode, rng, fact_share=options.fact_share)
        rate = jnp.float32(choose_rate(progress, options.learning_rate))
        network, state, losses = step(network, state, text.tokens, text.answers, rate)
        index += 1
        if index == 1:
            jax.block_until_ready(losses)
            print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
            began = time.perf_counter()
        if index % CLOCK_STEPS == 0:
            jax.block_until_ready(losses)
            elapsed = time.perf_counter() - began
        progress = max(index / options.steps, elapsed / (60 * options.minutes))
        if progress * REPORTS >= reports or progress >= 1:
            reports += 1
            report(index, losses, elapsed, index * options.batch * options.context)
    return network, index * options.batch * options.context


def report(index: int, losses: Losses, elapsed: float, tokens: int) -> None:
    """Print one line of progress."""
    text, answers = (float(each) for each in losses)
    print(
        f"step {index}: loss {text:.3f}, of answers {answers:.3f}; {tokens:,} tokens in {elapsed:.0f} s",
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


def measure_retrieval(
    network: Transformer, windows: Int[np.ndarray, "W T"], encode: Encode, *, distance: int
) -> float:
    """Return the share of held-out facts whose number is the most likely continuation at this distance."""
    rng, right = np.random.default_rng(distance), []
    for window, fact in zip(windows, draw_facts(rng, len(windows), held_out=True), strict=True):
        text = stack([end_with_question(window, fact, encode, distance=distance)])
        likeliest = np.asarray(network(jnp.asarray(text.tokens))[0, :-1].argmax(-1))
        marked = text.answers[0, 1:]
        right.append((likeliest[marked] == text.tokens[0, 1:][marked]).all())
    return float(np.mean(right))


def main(options: Options) -> None:
    """Train, evaluate, and write `config.json`, `model.safetensors`, the tokenizer and `training.json`."""
    sources = [options.corpus / topic / "train.txt.xz" for topic in TOPICS]
    began = time.perf_counter()
    print(f"{num_params(options.config):,} parameters on {jax.devices()[0].device_kind}", flush=True)
    tokenizer = train_tokenizer(sources)
    encode = cache_encoding(tokenizer)
    cut = partial(token_windows, tokenizer=tokenizer, length=options.context, eos_id=EOS_ID)
    windows, _ = cut(read_documents(sources))
    print(f"{windows.size:,} tokens of text read in {time.perf_counter() - began:.0f} s", flush=True)
    network, tokens_seen = train(options, windows, encode)
    params = collect_params(network)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.output / "tokenizer.json"))
    export_hf(params, options.config, options.output)
    plan = CompressionPlan.full(options.config)
    final = Transformer(options.config, plan, params["embeddings"], params["layers"])
    heldout = {
        topic: cut(read_documents([options.corpus / topic / "heldout.txt.xz"]), num_windows=HELDOUT_WINDOWS)[0]
        for topic in TOPICS
    }
    perplexity = {
        topic: round(float(np.exp(window_nll(final, held, batch=4).mean())), 2)
        for topic, held in heldout.items()
    }
    questioned = np.concatenate(list(heldout.values()))
    questioned = np.random.default_rng(0).permutation(questioned)[:QUESTIONS]
    retrieval = {
        distance: measure_retrieval(final, questioned, encode, distance=distance)
        for distance in DISTANCES
        if distance < options.context - 100
    }
    record = {
        "topics": TOPICS,
        "options": {name: str(value) for name, value in asdict(options).items()},
        "tokens_seen": tokens_seen,
        "tokens_distinct": int(windows.size),
        "parameters": num_params(options.config),
        "heldout_perplexity": perplexity,
        "heldout_retrieval": retrieval,
        "seconds": round(time.perf_counter() - began),
    }
    (options.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main(tyro.cli(Options))

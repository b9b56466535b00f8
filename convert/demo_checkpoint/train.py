"""Trains the demo checkpoint from a folder of topics and writes it in Hugging Face layout.

    python -m convert.demo_checkpoint.train --corpus CORPUS --output convert/demo_checkpoint

`CORPUS/<topic>/train.txt.xz` holds documents between lines `<|endoftext|>`; only the topics of `TOPICS`,
whose text is in the public domain or under a permissive licence, are read. Minutes on one GPU.
"""

import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from convert.hf.export import export_hf
from zdc_jax.axes import Array
from zdc_jax.config import LayerSpec, ModelConfig, RopeConfig
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.model.params import num_params, random_params
from zdc_jax.model.transformer import Transformer
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
    eos_ids=(2,),
)


@dataclass(frozen=True)
class Options:
    """Training options; `tokens` is the total seen, in windows of the model's 2048 positions."""

    corpus: Path
    output: Path
    tokens: int = 400_000_000
    batch: int = 32
    learning_rate: float = 3e-3
    seed: int = 0


def train_tokenizer(paths: list[Path]) -> Tokenizer:
    """Byte-level BPE with the model's vocabulary."""
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


def optimizer(options: Options, steps: int) -> optax.GradientTransformation:
    """AdamW, 2 % warm-up, cosine to a tenth; no decay on norms."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        options.learning_rate,
        max(1, steps // 50),
        max(2, steps),
        options.learning_rate / 10,
    )

    def decayed(params):
        return jax.tree.map(lambda x: x.ndim > 2, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decayed),
    )


def loss_fn(network: Transformer, tokens: Array) -> Array:
    """Mean next-token cross entropy, computed in bfloat16 from float32 parameters."""
    network = jax.tree.map(lambda x: x.astype(jnp.bfloat16), network)
    logits = network(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(options: Options, windows: np.ndarray) -> Transformer:
    """Float32 parameters after `options.tokens` tokens of `windows` [W, T], shuffled every epoch."""
    steps = options.tokens // (options.batch * windows.shape[1])
    params = random_params(replace(CONFIG, dtype="float32"), jax.random.key(options.seed))
    plan = CompressionPlan.full(CONFIG)
    network = Transformer(CONFIG, plan, params["embeddings"], params["layers"])
    tx = optimizer(options, steps)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(network: Transformer, state: optax.OptState, tokens: Array) -> tuple:
        loss, grads = jax.value_and_grad(loss_fn)(network, tokens)
        updates, state = tx.update(grads, state, network)
        return optax.apply_updates(network, updates), state, loss

    state = tx.init(network)
    rng = np.random.default_rng(options.seed)
    order = rng.permutation(len(windows))
    began = time.perf_counter()
    for index in range(steps):
        if len(order) < options.batch:
            order = rng.permutation(len(windows))
        picked, order = order[: options.batch], order[options.batch :]
        network, state, loss = step(network, state, jnp.asarray(windows[picked]))
        if index % max(1, steps // 20) == 0:
            seconds = time.perf_counter() - began
            print(f"step {index}/{steps} loss {float(loss):.3f} {seconds:.0f} s", flush=True)
    return network


def parameters(network: Transformer) -> dict:
    """Parameters of a trained network in the layout of `zdc_jax.model.params`, bfloat16."""

    def cast(x):
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


def main(options: Options) -> None:
    """Trains and writes `config.json`, `model.safetensors`, the tokenizer and `training.json`."""
    sources = [options.corpus / topic / "train.txt.xz" for topic in TOPICS]
    heldout = [options.corpus / topic / "heldout.txt.xz" for topic in TOPICS]
    print(f"{num_params(CONFIG):,} parameters")
    tokenizer = train_tokenizer(sources)
    cut = partial(token_windows, tokenizer=tokenizer, length=CONFIG.max_positions, eos_id=2)
    windows, _ = cut(read_documents(sources))
    print(f"{windows.size:,} tokens")
    network = train(options, windows)
    params = parameters(network)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.output / "tokenizer.json"))
    export_hf(params, CONFIG, options.output)
    final = Transformer(CONFIG, CompressionPlan.full(CONFIG), params["embeddings"], params["layers"])
    perplexity = {}
    for topic, path in zip(TOPICS, heldout, strict=True):
        held, _ = cut(read_documents([path]), num_windows=16)
        perplexity[topic] = round(float(np.exp(window_nll(final, held, batch=4).mean())), 2)
    record = {
        "topics": TOPICS,
        "tokens_seen": options.tokens,
        "tokens_distinct": int(windows.size),
        "parameters": num_params(CONFIG),
        "heldout_perplexity": perplexity,
    }
    (options.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main(tyro.cli(Options))

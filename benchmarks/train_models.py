"""Trains the small models that plans are learned from (`bench_predictor`), a minute or two each.

    python -m benchmarks.train_models --corpus CORPUS --tokenizer FOLDER --output FOLDER [--names opt-32 …]

With torch and transformers, on one GPU, from `CORPUS/<topic>/train.txt.xz`, in windows of 4096 tokens packed
from whole documents. Every model is a Hugging Face folder `OUTPUT/NAME` with the tokenizer of `FOLDER`.
"""

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from zdc_jax.evaluation.text import read_documents

CONTEXT = 4096
LEARNING_RATE, WARMUP = 1e-3, 100
STEPS = {"llama": 1200, "opt": 2500}
"""OPT's learned positions come later than rotary ones."""


@dataclass(frozen=True)
class Shape:
    """Of a model: `layers` of `heads` query and `kv_heads` key-value heads of `head_dim`."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int


SHAPES = {
    "llama-64": Shape("llama", 8, 4, 4, 64, 256, 704),
    "llama-gqa-32": Shape("llama", 12, 8, 2, 32, 256, 512),
    "llama-mqa-128": Shape("llama", 6, 4, 1, 128, 256, 704),
    "llama-gqa-64": Shape("llama", 10, 4, 2, 64, 256, 512),
    "opt-64": Shape("opt", 8, 4, 4, 64, 256, 1024),
    "opt-32": Shape("opt", 12, 8, 8, 32, 256, 768),
}


@dataclass(frozen=True)
class Options:
    """`batch` windows a step; `names` of `SHAPES`."""

    corpus: Path
    tokenizer: Path
    output: Path
    names: tuple[str, ...] = tuple(SHAPES)
    batch: int = 16
    seed: int = 0


def packed_windows(corpus: Path, tokenizer: tokenizers.Tokenizer, eos: int) -> np.ndarray:
    """All training text as windows [W, 4096], documents one after another with `eos` behind each."""
    texts = [document.text for document in read_documents(sorted(corpus.glob("*/train.txt.xz")))]
    order = np.random.default_rng(0).permutation(len(texts))
    encoded = tokenizer.encode_batch_fast([texts[i] for i in order], add_special_tokens=False)
    stream = np.concatenate([np.array([*document.ids, eos], np.int32) for document in encoded])
    return stream[: len(stream) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)


def make_model(shape: Shape, vocabulary: int) -> PreTrainedModel:
    """A model of this shape with random weights."""
    shared = {
        "vocab_size": vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if shape.family == "llama":
        extra = {
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.ffn,
        }
        return LlamaForCausalLM(LlamaConfig(**shared, **extra))
    assert shape.heads == shape.kv_heads
    assert shape.heads * shape.head_dim == shape.hidden
    config = OPTConfig(**shared, ffn_dim=shape.ffn, word_embed_proj_dim=shape.hidden, dropout=0.0)
    return OPTForCausalLM(config)


def train(name: str, windows: np.ndarray, vocabulary: int, options: Options) -> PreTrainedModel:
    """AdamW on random batches, bfloat16 products, warm-up and cosine."""
    torch.manual_seed(options.seed)
    shape = SHAPES[name]
    model, steps = make_model(shape, vocabulary).cuda(), STEPS[shape.family]
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def rate(step):
        return min(step / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.02)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    rng, began = np.random.default_rng(options.seed), time.perf_counter()
    for step in range(steps):
        batch = torch.from_numpy(windows[rng.integers(len(windows), size=options.batch)]).long().cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            seconds = time.perf_counter() - began
            print(f"{name} step {step + 1} loss {loss.item():.3f} {seconds:.0f} s", flush=True)
    return model.to(torch.bfloat16)


def main(options: Options) -> None:
    """Trains the models one after another."""
    torch.backends.cuda.matmul.allow_tf32 = True
    tokenizer = tokenizers.Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    windows = packed_windows(options.corpus, tokenizer, eos=2)
    print(f"{windows.size:,} tokens")
    for name in options.names:
        model = train(name, windows, tokenizer.get_vocab_size(), options)
        model.save_pretrained(options.output / name)
        for file in options.tokenizer.glob("tokenizer*.json"):
            shutil.copy(file, options.output / name)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

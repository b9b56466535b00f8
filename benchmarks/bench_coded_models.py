"""What does a coded cache gain in a whole model? A decoded token of large shapes, beside cuDNN in bfloat16.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m benchmarks.bench_coded_models --plan plan.json

Random weights; codes are random, so that what is chosen lies anywhere. Wall clock, as `decode_times` says.
Near are 512 tokens and 4 sinks in 16 bits, far ones lie in 4 bits. `whole` reads all of them, `chosen` a
sixteenth, chosen by the first quarter of the coordinates of keys; `chosen by 8 bits` an eighth, by an index
of 8 bits a coordinate. `searched` is the plan of a file, found for a small model
(`benchmarks.transferred_plans`).

`delay` is what of a token's time the GPU spends on kernels that choose and on the one that turns, codes and
stores new tokens, though turning is no compression; `kernels` says which takes how long, by CUPTI. `quality`
is that of the same plan on a real model, by shares of the head dim and of the context: from the JSON of
judged plans, none where it was not judged. `tokens` says how many the memory of this GPU holds beside the
weights, by bytes. Models of coded rows turn keys and queries after the rotary embedding, as plans with a
basis do. The JSON file is written anew after each row; other rows stay as they are in it.
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.bench_generate import LLAMA_2_7B, OnCudnn, build, decode_times, extended
from benchmarks.bench_host_memory import LLAMA_3_8B
from benchmarks.coded_shapes import REACHES
from benchmarks.common import RESULTS, commit, earlier, write_result
from benchmarks.one_call import InOneCall
from benchmarks.timing import kernel_times
from benchmarks.transferred_plans import check_on_kernels, is_judged, judged_quality, transferred
from zdc_jax.cache.kv_cache import KVCache, cache_bytes
from zdc_jax.config import ModelConfig
from zdc_jax.generation.steps import Flat
from zdc_jax.methods.coded import Settings
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

SHAPES = {"Llama-2-7B": LLAMA_2_7B, "Llama-3-8B": LLAMA_3_8B}
SINKS, WINDOW = 4, 512
SHARES = {"whole": 0.0, "chosen": 1 / 16, "chosen by 8 bits": 1 / 8}
"""Of the context that is read."""
SEARCHED = "searched"
IDENTITY = ("shape", "rows", "context", "kind", "plan")
"""A row replaces the earlier one that has the same of these."""
PARTS = {
    "choosing": "zdc_coded_scan|zdc_largest",
    "far tokens": "zdc_coded_decode",
    "near tokens": "zdc_decode",
    "new tokens": "zdc_turn_and_store|zdc_encode|zdc_post_rope",
    "merging": "zdc_merge",
    "matrix products": "gemm|cutlass|nvjet|xmma|splitK|sm90_",
}
"""Kernels by what they do, as patterns of their names; all others are small operations. Near tokens of 8 bits
are read by the kernel of far ones, and counted there."""


@dataclass(frozen=True)
class Options:
    """rows and context: of a batch, in tokens. layers shortens the models for a trial.

    kinds: of `SHARES`, and `searched` with a plan (default all). plan: a searched one. judged: JSON of judged
    plans, this one among them at judged_context tokens; from there what it reads grows with the context.
    """

    shapes: tuple[str, ...] = tuple(SHAPES)
    kinds: tuple[str, ...] = ()
    plan: Path | None = None
    judged: Path = RESULTS / "coded-smollm2-135m.json"
    judged_context: int = 8192
    rows: int = 8
    context: int = 16384
    layers: int = 32
    steps: int = 20
    name: str = "coded-models-h200"
    results: Path = RESULTS

    @property
    def chosen_kinds(self) -> tuple[str, ...]:
        """The uniform ones, then the searched one.

        Raises:
          SystemExit: there is no such kind, or no plan for it.
        """
        known = (*SHARES, SEARCHED) if self.plan else tuple(SHARES)
        if unknown := set(self.kinds) - {*known}:
            raise SystemExit(f"kinds={sorted(unknown)} must be of {known}; {SEARCHED!r} needs a plan")
        return self.kinds or known

    @property
    def capacity(self) -> int:
        """Of caches, in tokens."""
        return self.context + 128


def settings_of(kind: str, head_dim: int, context: int) -> Settings:
    """Of all layers of a model whose heads have so many coordinates."""
    if not (share := SHARES[kind]):
        return Settings(index=0, read=0)
    bits = 8 if kind.endswith("8 bits") else 4
    return Settings(index=head_dim // 4, read=int(share * context), bits_index=bits)


def coded_plan(config: ModelConfig, kind: str, context: int) -> CompressionPlan:
    """The same for all layers."""
    H = config.head_dim
    settings = settings_of(kind, H, context)
    near = CompressionPlan.uniform(config, qk=H, v=H, sinks=SINKS, window=WINDOW)
    layers = tuple(replace(ranks, settings=settings) for ranks in near.layers)
    return replace(near, method="coded", settings=settings, layers=layers)


def shape_of(name: str, options: Options) -> ModelConfig:
    """With as many layers as are wanted."""
    return replace(SHAPES[name], layers=SHAPES[name].layers[: options.layers])


def plan_of(kind: str, config: ModelConfig, options: Options) -> CompressionPlan:
    """Of a model of this shape."""
    if kind != SEARCHED:
        return coded_plan(config, kind, options.context)
    assert options.plan is not None
    found = CompressionPlan.load(options.plan)
    return transferred(found, config, options.context / options.judged_context)


@partial(jax.jit, donate_argnums=0)
def any_codes(codes: jax.Array, key: jax.Array) -> jax.Array:
    """Random levels, or reaches if there is one of each token, in the place of zeros."""
    if codes.shape[-1] == 1:
        return codes * 0 + jax.random.randint(key, codes.shape, *REACHES).astype(jnp.uint8)
    return codes ^ jax.random.bits(key, codes.shape, jnp.uint8)


class OnKernels:
    """The product's own path, on a coded cache."""

    def __init__(self, network: Transformer):
        self.network = network
        self.decode = InOneCall(network, "pallas")

    def cache(self, batch: int, capacity: int) -> KVCache:
        """Empty."""
        return self.network.new_cache(batch=batch, capacity=capacity)

    def filled(self, cache: KVCache, length: int) -> KVCache:
        """As if `length` random tokens were held."""
        keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(cache))))

        def codes(leaf):
            return any_codes(leaf, next(keys)) if leaf.dtype == jnp.uint8 else leaf

        layers = jax.tree.map(codes, cache.layers)
        return replace(cache, layers=layers, lengths=jnp.full_like(cache.lengths, length))


def kernel_ms(side: OnKernels, options: Options, *, tokens: int = 4) -> dict[str, float]:
    """Milliseconds of a decoded token on the device, by `PARTS`: the mean over some tokens.

    By a call for each, since CUPTI need not tell of kernels in a graph's loop.
    """
    cache = side.filled(side.cache(options.rows, options.capacity), options.context)
    flat, token = Flat.of(side.network), jnp.zeros((options.rows, 1), jnp.int32)
    token, cache = extended(flat, cache, token)

    def run() -> jax.Array:
        nonlocal token, cache
        for _ in range(tokens):
            token, cache = extended(flat, cache, token)
        return token

    found = dict.fromkeys([*PARTS, "small operations"], 0.0)
    for name, ms in kernel_times(run):
        part = next((part for part, pattern in PARTS.items() if re.search(pattern, name)), "small operations")
        found[part] += ms / tokens
    return found


def quality(kind: str, options: Options) -> dict[str, Any] | None:
    """Of the same plan on the real model: bytes held and read, increase of perplexity, lowest retention."""
    if kind == SEARCHED:
        assert options.plan is not None
        fits = is_judged(CompressionPlan.load(options.plan), options.judged, options.judged_context)
        return judged_quality(options.judged, fits)
    path = options.results / "coded-uniform-smollm2-135m.json"
    return judged_quality(path, lambda row: row["method"] == f"coded, {kind}")


def tokens_held(plan: CompressionPlan, free: int) -> int:
    """Tokens of one row in so many bytes."""
    step = 2**20
    return int(free * step / cache_bytes(plan.layer_caches("bfloat16"), step))


def rows(shape: str, options: Options) -> Iterator[dict[str, Any]]:
    """The peer, then each kind of plan beside it."""
    config = shape_of(shape, options)
    network = build("folded", config)
    stats = jax.local_devices()[0].memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"]

    def time(side):
        return decode_times(side, options.rows, options.context, options.steps)

    base = {"shape": shape, "rows": options.rows, "context": options.context, "commit": commit()}
    peer, dense = time(OnCudnn(network)), tokens_held(network.plan, free)
    yield base | {"kind": "cudnn", "ms": [1e3 * t for t in peer], "tokens": dense}
    del network
    network = build("post_rope", config)
    for kind in options.chosen_kinds:
        network.plan = plan = plan_of(kind, config, options)
        side = OnKernels(network)
        times, held = time(side), tokens_held(plan, free)
        parts = kernel_ms(side, options)
        yield base | {
            "kind": kind,
            "plan": plan.to_json() if kind == SEARCHED else asdict(plan.settings),
            "ms": [1e3 * t for t in times],
            "speedup": float(np.median(peer) / np.median(times)),
            "delay": parts["choosing"] + parts["new tokens"],
            "kernels": parts,
            "tokens": held,
            "tokens_beside_dense": held / dense,
            "quality": quality(kind, options),
        }


def identity(row: dict[str, Any]) -> str:
    """Of a row, as read or as made: JSON has no tuples."""
    return json.dumps([row.get(name) for name in IDENTITY])


def main(options: Options) -> None:
    """Writes one JSON, again after each row; nothing is timed before kernels are known to read all plans."""
    settings = {"steps": options.steps}
    # A trial must not go on from the rows of whole models.
    settings |= {} if options.layers == Options.layers else {"layers": options.layers}
    found: list[dict[str, Any]] = earlier(options.results / f"{options.name}.json", settings)
    for shape, kind in itertools.product(options.shapes, options.chosen_kinds):
        config = shape_of(shape, options)
        check_on_kernels(plan_of(kind, config, options), config, options.rows, options.capacity)
    for shape in options.shapes:
        for row in rows(shape, options):
            print({name: value for name, value in row.items() if name not in ("quality", "plan")}, flush=True)
            found = [*(other for other in found if identity(other) != identity(row)), row]
            path = write_result(options.name, settings, found, options.results)
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Options))

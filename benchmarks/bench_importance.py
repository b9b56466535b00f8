"""Do layers agree on which tokens are important, and what does asking cost?

    python -m benchmarks.bench_importance --model HF_FOLDER --corpus CORPUS --name importance-NAME
    python -m benchmarks.bench_importance --cost --name importance-cost

The first compares all pairs of layers by each way to measure importance (ZDC, Figs. 6 to 8) and draws it; the
second times one layer of Llama-2-7B's shape at 16K tokens with and without it (device time, CUPTI).
"""

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.bench_generate import LLAMA_2_7B
from benchmarks.common import RESULTS, write_result
from convert.calibration.groups import ImportanceMethod, layer_groups, layer_importance, repetition_ratios
from convert.conversion import convert
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.evaluation.text import read_documents, token_windows
from zdc_jax.loading import load
from zdc_jax.model.params import layer_shapes, random_tree
from zdc_jax.model.transformer import Block
from zdc_jax.ops.attention import self_attention
from zdc_jax.ops.importance import column_sums, token_importance

THRESHOLDS = (0.95, 0.8, 0.65, 0.5)
COST_TOKENS = 16384
ROUNDS = 12


@dataclass(frozen=True)
class Options:
    """`cost`: the timing, which needs a GPU, instead of the comparison."""

    name: str
    cost: bool = False
    model: Path | None = None
    corpus: Path | None = None
    windows: int = 8
    length: int = 4096
    results: Path = RESULTS


def compare_layers(importance: np.ndarray) -> dict[str, Any]:
    """Repetition by distance, groups by threshold, and the range of scores of each layer."""
    most, least = (repetition_ratios(importance, most=which) for which in (True, False))
    low, high = np.quantile(importance, [0.05, 0.95], axis=(1, 2))
    spread = importance - importance.mean(-1, keepdims=True)
    return {
        "most": most.tolist(),
        "least": least.tolist(),
        "leaders": {str(t): layer_groups(most, least, threshold=t) for t in THRESHOLDS},
        "range": {"low": low.tolist(), "high": high.tolist(), "std": spread.std((1, 2)).tolist()},
    }


def compare_methods(options: Options) -> dict[str, Any]:
    """Every method on the same windows of held-out text."""
    assert options.model is not None
    assert options.corpus is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "converted"
        convert(options.model, path, progress=False)
        checkpoint, network = Checkpoint.open(path), load(path, dtype="float32").network
        tokens, topics = token_windows(
            read_documents(sorted(options.corpus.glob("*/heldout.txt.xz"))),
            checkpoint.tokenizer(),
            length=options.length,
            num_windows=options.windows,
            eos_id=checkpoint.config.eos_ids[0],
        )
    found: dict[str, Any] = {"topics": topics}
    for method in get_args(ImportanceMethod):
        by_row = [layer_importance(network, row[None], method) for row in tokens]
        found[method] = compare_layers(np.concatenate(by_row, axis=1))
        print(method, {t: len(x) for t, x in found[method]["leaders"].items()}, flush=True)
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    """Repetition of layer pairs as a distribution for each distance, and the range of scores by depth."""
    from matplotlib import pyplot as plt

    methods = get_args(ImportanceMethod)
    figure, axes = plt.subplots(3, len(methods), figsize=(4 * len(methods), 9), layout="constrained")
    for column, method in zip(axes.T, methods, strict=True):
        layers = len(results[method]["most"])
        for axis, kind in zip(column[:2], ("least", "most"), strict=True):
            ratios = np.array(results[method][kind])
            for distance in sorted({1, 2, layers // 4, layers // 2, layers - 1} - {0}):
                pairs = np.sort(np.diag(ratios, distance))
                axis.step(pairs, np.arange(1, len(pairs) + 1) / len(pairs), label=f"distance {distance}")
            axis.set(title=f"{method}: {kind} important", xlabel="repetition ratio", xlim=(0, 1), ylim=(0, 1))
            axis.legend(fontsize=7)
        spread = results[method]["range"]
        column[2].fill_between(range(layers), spread["low"], spread["high"], alpha=0.4)
        column[2].set(title="5th to 95th percentile", xlabel="layer")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def cost() -> dict[str, Any]:
    """Milliseconds of one layer, and of what importance and class order add to it."""
    from benchmarks.timing import device_ms, normal

    T, D, scale = COST_TOKENS, LLAMA_2_7B.embed_dim, LLAMA_2_7B.head_dim**-0.5
    weights = random_tree(layer_shapes(LLAMA_2_7B, 0), LLAMA_2_7B, jax.random.key(0))
    block, x = Block(weights, LLAMA_2_7B, LLAMA_2_7B.layers[0]), normal(0, 1, T, D)
    leaves, tree = jax.tree.flatten(block)
    positions = jnp.arange(T)[None]

    def layer(measure: Callable[..., jax.Array] | None, leaves: Any, x: jax.Array) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
            o, lse = self_attention(q, k, v, scale=scale)
            return o, None if measure is None else measure(q, k, lse)

        return jax.tree.unflatten(tree, leaves)(x, positions, attend)

    def permuted(leaves: Any, x: jax.Array, order: jax.Array) -> Any:
        y, _ = layer(None, leaves, x[:, order])
        return y[:, jnp.zeros_like(order).at[order].set(jnp.arange(T))]

    order = jnp.asarray(np.random.default_rng(0).permutation(T))
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "plain": (partial(layer, None), (leaves, x)),
        "denominator": (partial(layer, lambda q, k, lse: token_importance(lse)), (leaves, x)),
        "detrended": (
            partial(layer, lambda q, k, lse: token_importance(lse, positions + 1)),
            (leaves, x),
        ),
        "column_sum": (
            partial(layer, lambda q, k, lse: column_sums(q, k, lse, scale=scale)),
            (leaves, x),
        ),
        "class order, in and out": (permuted, (leaves, x, order)),
    }
    lse = normal(1, 1, LLAMA_2_7B.num_heads, T, dtype=jnp.float32)
    calls["denominator alone"] = (token_importance, (lse,))
    calls["class order alone, in"] = (lambda x, order: x[:, order], (x, order))
    jitted = {name: jax.jit(call) for name, (call, _) in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    # In turns: the card's clock falls as it warms up.
    for _, (name, (_, args)) in itertools.product(range(ROUNDS), calls.items()):
        times[name] += device_ms(jitted[name], *args, iterations=5)
    plain = float(np.median(times["plain"]))
    rows = {}
    for name, ms in times.items():
        share = float(np.median(ms)) / plain - (0 if "alone" in name else 1)
        rows[name] = {"ms": ms, "of_a_layer" if "alone" in name else "over_plain": share}
        print(f"{name:24} {np.median(ms):8.3f} ms {100 * share:+.2f} %", flush=True)
    return rows


def main(options: Options) -> None:
    """Writes one JSON, and for the comparison a PNG of the same name."""
    results = cost() if options.cost else compare_methods(options)
    settings = (
        {"tokens": COST_TOKENS} if options.cost else {"length": options.length, "windows": options.windows}
    )
    path = write_result(options.name, settings, results, options.results)
    if not options.cost:
        draw(results, path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""Which costs less at the same bits: compressing a model's weights, or its keys and values? (ZDC §2, fig. 3)

    python -m benchmarks.quality.what_to_compress --model CONVERTED --corpus CORPUS --name what-to-compress

All codes have groups of 32 and 16-bit scales. Weights are rounded to what their codes say and stay in the
model's dtype: a study of quality alone. Keys and values are KIVI's, stored in codes, without recent tokens
kept whole but those of an unfinished group.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import write_result
from benchmarks.quality.equal_bytes import PROTOCOLS, Bench, Cell, Options
from benchmarks.quality.plans import method_plan
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

GROUP = 32
PROJECTIONS = frozenset({"q", "k", "v", "o", "gate", "up", "down"})
ATTENTION = frozenset({"q", "k", "v", "o"})


@dataclass(frozen=True)
class WhatOptions(Options):
    """`bits` of a coordinate, its scales not counted; the first of `contexts` is measured."""

    bits: tuple[int, ...] = (8, 4, 3, 2)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Weights [inputs, …] as integers of so many bits say them, by groups of `GROUP` inputs."""
    groups = np.asarray(x, np.float32).reshape(-1, GROUP, *x.shape[1:])
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)

    def half(y):
        return y.astype(jnp.bfloat16).astype(np.float32)

    step, low = half(np.maximum((high - low) / (2**bits - 1), 1e-8)), half(low)
    levels = np.clip(np.round((groups - low) / step), 0, 2**bits - 1)
    return (levels * step + low).reshape(x.shape).astype(x.dtype)


def with_rounded(tree: Any, names: frozenset[str], bits: int) -> Any:
    """A layer's weights with the named projections rounded."""
    return {
        name: with_rounded(value, names, bits)
        if isinstance(value, dict)
        else _projection(name, np.asarray(value), bits)
        if name in names
        else value
        for name, value in tree.items()
    }


def _projection(name: str, x: np.ndarray, bits: int) -> np.ndarray:
    """`rounded`, where the inputs of W_O are those of all heads."""
    return rounded(x.reshape(-1, x.shape[-1]), bits).reshape(x.shape) if name == "o" else rounded(x, bits)


def main(options: WhatOptions) -> None:
    """Weights of all projections, those of attention alone, and keys and values, at the same bits."""
    bench = Bench(options)
    config, rows = bench.config, []
    full = replace(CompressionPlan.full(config), rotated=False)
    layers = [bench.checkpoint.layer(index) for index in range(config.num_layers)]
    for bits in options.bits:
        networks = {
            label: Transformer(
                config,
                full,
                bench.embeddings,
                (jax.device_put(with_rounded(layer, names, bits)) for layer in layers),
            )
            for label, names in (("weights", PROJECTIONS), ("weights of attention", ATTENTION))
        }
        kv = method_plan(config, "kivi", window=GROUP, sinks=0, bits=bits, group=GROUP)
        for protocol in PROTOCOLS:
            for label, network in networks.items():
                cell = Cell(f"{label}, {bits} bits", None, full, options.contexts[0], protocol)
                rows.append(bench.measure(cell, network) | {"bits": bits})
            cell = Cell(f"keys and values, {bits} bits", None, kv, options.contexts[0], protocol)
            rows.append(bench.measure(cell) | {"bits": bits})
        for row in rows[-6:]:
            print(row["method"], row["protocol"], f"{100 * row['increase']:+.2f} %", flush=True)
        write_result(options.name, {"group": GROUP, "context": options.contexts[0]}, rows, options.results)


if __name__ == "__main__":
    main(tyro.cli(WhatOptions))

"""Transfer of searched plans to larger shapes, by shares of layers and of the head dimension."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import index_fits, plane_fits
from kernels_pallas.select.inputs import MOST, THREADS
from zdc_jax.cache.specs.spec import Call, LayerCacheSpec, NewTokens
from zdc_jax.config import ModelConfig
from zdc_jax.errors import PlanError
from zdc_jax.methods.coded import Settings
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.plan import RANK_STEP, CompressionPlan, LayerRanks


def transferred(plan: CompressionPlan, config: ModelConfig, growth: float) -> CompressionPlan:
    """Return the plan for a larger shape: each layer follows the layer of `plan` at the same relative depth.

    Ranks and index scale with the head dimension. Bits and recent tokens stay.

    Args:
      plan: a plan of method `zdc` or `coded`.
      config: the larger shape.
      growth: factor on the number of tokens that layers read.

    Raises:
      PlanError: kernels read the index of a layer at no size near the scaled one.
    """
    count, L = len(plan.layers), config.num_layers
    layers = tuple(_layer(plan, layer * count // L, config.head_dim, growth) for layer in range(L))
    plan = plan.for_model("", "")
    return replace(plan, layers=layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)


def _layer(plan: CompressionPlan, layer: int, H: int, growth: float) -> LayerRanks:
    """Scale one layer of the plan to head dimension H."""
    ranks, settings, wider = plan.layers[layer], plan.settings_of(layer), H / plan.head_dim
    qk, v = (min(H, _multiple(rank * wider, RANK_STEP)) for rank in (ranks.qk, ranks.v))
    if not isinstance(settings, Settings):
        return replace(ranks, qk=qk, v=v)
    index = _index(settings, settings.index * wider, qk) if settings.index and qk else settings.index
    if index is None:
        raise PlanError(
            f"layer {layer} of the plan: kernels read no index of {settings.bits_index} bits together with "
            f"other coordinates of {settings.bits_k} bits, {qk} in all"
        )
    read = settings.read and min(MOST, max(THREADS, _multiple(settings.read * growth, THREADS)))
    return replace(ranks, qk=qk, v=v, settings=replace(settings, index=index, read=read))


def _index(settings: Settings, wanted: float, rank: int) -> int | None:
    """Return the index size nearest to `wanted` that kernels read; None if there is none."""
    fits = index_fits if settings.read else plane_fits
    sizes = [
        size
        for size in range(RANK_STEP, rank, RANK_STEP)
        if fits(size, settings.bits_index) and plane_fits(rank - size, settings.bits_k)
    ]
    return min(sizes, key=lambda size: abs(size - wanted), default=None)


def _multiple(value: float, step: int) -> int:
    """Return the multiple of `step` nearest to a value."""
    return round(value / step) * step


def check_on_kernels(plan: CompressionPlan, config: ModelConfig, rows: int, capacity: int) -> None:
    """Check by shapes alone that kernels decode a token in every layer.

    Raises:
      PlanError: a layer that kernels do not decode, with the reason.
    """
    aux = None
    for layer, spec in enumerate(plan.layer_caches("bfloat16")):
        try:
            aux = jax.eval_shape(partial(_passed_on, spec, config, rows, capacity), aux)
        except NotImplementedError as error:
            raise PlanError(f"layer {layer} of {config.num_layers}: {error}") from error


def _passed_on(spec: LayerCacheSpec, config: ModelConfig, rows: int, capacity: int, aux: object) -> object:
    """Return the result that a layer passes to the next one when it decodes a token."""
    q = jnp.zeros((rows, 1, config.num_heads, config.head_dim), jnp.bfloat16)
    kv = jnp.zeros((rows, 1, config.num_kv_heads, config.head_dim), jnp.bfloat16)
    positions = jnp.zeros((rows, 1), jnp.int32)
    state, call = spec.create(rows, capacity), Call(config.head_dim**-0.5, "pallas")
    return spec.attend(state, q, NewTokens(NewKeys(kv), kv, positions, positions[:, 0] + 1), aux, call).aux


def judged_quality(path: Path, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """Return the quality of the first judged row that fits, read through the cache; None if no row fits.

    The result has shares of bytes stored and read, increase of perplexity and retention of each task.

    Args:
      path: judged plans of the small model; the file may be missing.
      fits: whether a row is wanted.
    """
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    row = next((row for row in rows if row["protocol"] == "cached" and fits(row)), None)
    if row is None:
        return None
    shown = ("method", "context", "bytes_share", "read_share", "increase", "interval")
    retention = {task: judged["retention"] for task, judged in row["tasks"].items()}
    return {name: row[name] for name in shown} | {"retention": retention}


def is_judged(plan: CompressionPlan, path: Path, context: int) -> Callable[[dict[str, Any]], bool]:
    """Return a function that tells whether a row of that file judges this plan at this context."""

    def same(row):
        return CompressionPlan.from_json(row["plan"], path) == plan

    return lambda row: row["context"] == context and same(row)

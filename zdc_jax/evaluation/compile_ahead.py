"""Compiles the layers of a network side by side (ours).

Layers are compiled where a reading first meets them, one after another: minutes, where each has settings of
its own. XLA compiles outside of Python's lock, so threads do it in the time of a few.
"""

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx

from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.model.transformer import Transformer

MOST_THREADS = 8
"""Each holds the activations of one reading."""


def compile_ahead(
    network: Transformer, read: Callable[[Transformer], Any], known: set[LayerCacheSpec] | None = None
) -> set[LayerCacheSpec]:
    """Calls `read` on networks of a single layer, one for each kind of layer, so that all are compiled.

    Where memory is short, fewer are read at a time. Left to `read(network)` are layers that cannot stand
    alone, as where others choose their tokens, and those that have no room even so. read: calls what is to
    be compiled with the shapes that it will have; what it returns is dropped. known: kinds to pass over, as
    an earlier call returned them.

    Returns:
      the kinds to pass over from now on: `known`, those compiled here, and those left to `read(network)`,
      which compiles them.
    """
    kinds = {spec: index for index, spec in enumerate(network.layer_caches)}
    new = {spec: index for spec, index in kinds.items() if spec not in (known or set())}
    alone = [single for spec, index in new.items() if (single := _single(network, index, spec)) is not None]
    if len(alone) > 1 and _tried(read, alone.pop()):  # What is not a layer is compiled here, once.
        threads = min(os.cpu_count() or 1, MOST_THREADS)
        while alone and threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                done = list(pool.map(partial(_tried, read), alone))
            alone = [single for single, had_room in zip(alone, done, strict=True) if not had_room]
            threads //= 2
    return (known or set()) | set(new)


def _tried(read: Callable[[Transformer], Any], single: Transformer) -> bool:
    """Whether memory had room for it."""
    try:
        read(single)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def _single(network: Transformer, index: int, spec: LayerCacheSpec) -> Transformer | None:
    single = copy.copy(network)
    single.layers = nnx.List([network.layers[index]])
    try:
        single.plan = replace(network.plan, layers=(network.plan.layers[index],))
    except PlanError:  # Some settings are lists of what each layer does.
        return None
    return single if single.layer_caches == (spec,) else None

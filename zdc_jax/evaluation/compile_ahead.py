"""Parallel compilation of the layers of a network.

Layers are normally compiled one after another, when the first pass reaches them. This takes minutes if every
layer has settings of its own. XLA releases Python's global lock while it compiles, so threads save time.
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

from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.model.transformer import Transformer

MAX_THREADS = 8
"""Largest number of threads. Each of them holds the activations of one pass."""


def compile_ahead(
    network: Transformer, read: Callable[[Transformer], Any], known: set[LayerCacheSpec] | None = None
) -> set[LayerCacheSpec]:
    """Call `read` on a single-layer network for each kind of layer, in parallel, to compile them all.

    If memory is short, fewer networks run at the same time. Two kinds of layers are left to a later
    `read(network)`: layers that depend on others, for example on the tokens that those choose, and layers
    that do not fit into memory.

    Args:
      network: network to compile.
      read: function that calls the code to compile, with the shapes that it will have. Its result is ignored.
      known: kinds of layers to skip, from an earlier call.

    Returns:
      kinds of layers to skip in the next call: `known` and all kinds of this network.
    """
    known = known or set()
    new = {spec: index for index, spec in enumerate(network.layer_caches) if spec not in known}
    singles = (_extract_layer(network, index, spec) for spec, index in new.items())
    pending = [single for single in singles if single is not None]
    # The first call also compiles everything outside the layers, once.
    if len(pending) > 1 and _try_read(read, pending.pop()):
        threads = min(os.cpu_count() or 1, MAX_THREADS)
        while pending and threads > 1:
            with ThreadPoolExecutor(threads) as pool:
                succeeded = list(pool.map(partial(_try_read, read), pending))
            pending = [single for single, success in zip(pending, succeeded, strict=True) if not success]
            threads //= 2
    return known | set(new)


def _try_read(read: Callable[[Transformer], Any], single: Transformer) -> bool:
    """Call `read` and return whether the memory was sufficient."""
    try:
        read(single)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    return True


def _extract_layer(network: Transformer, index: int, spec: LayerCacheSpec) -> Transformer | None:
    """Return a network of one layer, or None if the layer depends on other layers."""
    single = copy.copy(network)
    single.layers = nnx.List([network.layers[index]])
    try:
        single.plan = replace(network.plan, layers=(network.plan.layers[index],))
    except PlanError:  # Settings of some methods list a value for every layer of the plan.
        return None
    return single if single.layer_caches == (spec,) else None

"""How fast can a device get a few rows of an array that lies in host memory? Several ways, side by side.

    python -m benchmarks.host_fetch --name host-fetch-h200

A layer's store is uint8 [K, S, C], and a decoded token wants `rows` of each of K heads. Times are of the
wall, from the numbers of the rows on the device until the rows are there. A way that fails says why.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental.compute_on import compute_on
from jax.sharding import SingleDeviceSharding

from benchmarks.common import RESULTS, write_result

Fetch = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Options:
    """K heads, S tokens of C bytes; `rows` of a head, by pages of `page`; calls that are timed."""

    name: str
    heads: int = 8
    tokens: int = 131_072
    width: int = 64
    rows: int = 256
    page: int = 16
    calls: int = 30
    results: Path = RESULTS


def gathered(store: jax.Array, slots: jax.Array) -> jax.Array:
    """Rows [K, n, C]."""
    return jnp.take_along_axis(store, slots[..., None], axis=1)


def on_host(store: np.ndarray) -> jax.Array:
    """The store in pinned host memory."""
    return jax.device_put(store, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def kept_on_device(store: np.ndarray, page: int) -> Fetch:
    """No host: the bound."""
    return partial(jax.jit(gathered), jnp.asarray(store))


def copied_whole(store: np.ndarray, page: int) -> Fetch:
    """All of the store goes to the device, then rows are taken."""

    def move(store, slots):
        return gathered(jax.device_put(store, jax.memory.Space.Device), slots)

    return partial(jax.jit(move), on_host(store))


def by_the_hosts_processor(store: np.ndarray, page: int) -> Fetch:
    """XLA takes the rows on the host, inside one program."""

    K, S, C = store.shape

    @jax.jit
    def fetch(store: jax.Array, slots: jax.Array) -> jax.Array:
        of_all = slots + S * jnp.arange(K, dtype=slots.dtype)[:, None]
        take = compute_on(
            lambda store, rows: store[rows],
            compute_type="device_host",
            out_memory_spaces=jax.memory.Space.Host,
        )
        found = take(store, jax.device_put(of_all.reshape(-1), jax.memory.Space.Host))
        return jax.device_put(found, jax.memory.Space.Device).reshape(K, -1, C)

    return partial(fetch, on_host(store.reshape(-1, C)))


def page_by_page(store: np.ndarray, page: int) -> Fetch:
    """A copy for each page of consecutive tokens, inside one program."""

    @jax.jit
    def fetch(store: jax.Array, slots: jax.Array) -> jax.Array:
        K, n = slots.shape

        def one(head: int, start: jax.Array) -> jax.Array:
            part = jax.lax.dynamic_slice(store, (head, start, 0), (1, page, store.shape[2]))
            return jax.device_put(part[0], jax.memory.Space.Device)

        heads = [[one(head, slots[head, i]) for i in range(0, n, page)] for head in range(K)]
        return jnp.stack([jnp.concatenate(pages) for pages in heads])

    return partial(fetch, on_host(store))


def by_numpy(store: np.ndarray, page: int) -> Fetch:
    """The numbers of the rows go to the host, NumPy takes the rows, and they are sent."""
    heads = np.arange(len(store))[:, None]
    return lambda slots: jax.device_put(store[heads, np.asarray(slots)])


def by_callback(store: np.ndarray, page: int) -> Fetch:
    """The same inside one program."""
    heads = np.arange(len(store))[:, None]

    @jax.jit
    def fetch(slots: jax.Array) -> jax.Array:
        found = jax.ShapeDtypeStruct((*slots.shape, store.shape[2]), jnp.uint8)
        return jax.pure_callback(lambda slots: store[heads, np.asarray(slots)], found, slots)

    return fetch


WAYS = (kept_on_device, copied_whole, by_the_hosts_processor, page_by_page, by_numpy, by_callback)


def measured(way: Callable[[np.ndarray, int], Fetch], store: np.ndarray, options: Options) -> dict[str, Any]:
    """Milliseconds of each call, or why there are none."""
    rng = np.random.default_rng(0)
    pages = rng.integers(0, options.tokens // options.page, (options.heads, options.rows // options.page))
    slots = (pages[..., None] * options.page + np.arange(options.page)).reshape(options.heads, -1)
    on_device, ms = jnp.asarray(slots, jnp.int32), []
    try:
        fetch = way(store, options.page)
        found = fetch(on_device)
        for _ in range(options.calls):
            began = time.perf_counter()
            found = jax.block_until_ready(fetch(on_device))
            ms.append(1e3 * (time.perf_counter() - began))
    except Exception as error:
        return {"way": way.__name__, "error": f"{type(error).__name__}: {error!s:.300}"}
    right = bool((np.asarray(found) == store[np.arange(options.heads)[:, None], slots]).all())
    return {"way": way.__name__, "ms": ms, "median_ms": float(np.median(ms)), "right": right}


def main(options: Options) -> None:
    """Writes one JSON."""
    shape = options.heads, options.tokens, options.width
    store = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    rows = [measured(way, store, options) for way in WAYS]
    for row in rows:
        print(row["way"], row.get("error") or f"{row['median_ms']:.3f} ms, right: {row['right']}", flush=True)
    settings = {key: value for key, value in asdict(options).items() if key != "results"}
    print(write_result(options.name, settings, rows, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))

"""Time of the engine's decode program per token, by sequences of the batch, sequences decoded and capacity.

    python -m benchmarks.serving.bench_decode_loop MODEL --plan 3bit --case 64/1/20480 1/1/8320

A case is ROWS/COUNT/LONGEST: sequences of the batch, the first ones of them that decode, and the tokens that
a sequence may have. Each holds `--held` tokens of zeros. One program of four steps is compiled and timed, as
the engine runs it; no engine is started.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import RESULTS, commit, write_result
from zdc_jax.axes import Array
from zdc_jax.engine.layout import Layout
from zdc_jax.engine.programs import FlatState, decode_loop, run_flat
from zdc_jax.engine.runner import STEPS
from zdc_jax.generation.packed_parameters import pack_parameters
from zdc_jax.generation.sampling import Sampling
from zdc_jax.generation.steps import ONE_GRAPH, DecodeState, Flat
from zdc_jax.loading import load
from zdc_jax.model.transformer import Transformer
from zdc_jax.presets import resolve_plan

PAGE = 128
CALLS = 5
"""Calls of a timed repeat."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
      model: converted folder.
      plan: preset or file of a plan; 16 bits by default.
      case: cases to time, each ROWS/COUNT/LONGEST.
      held: tokens that each sequence holds.
      repeats: timed repeats.
    """

    model: Annotated[Path, tyro.conf.Positional]
    plan: str = "none"
    case: tuple[str, ...] = ("64/1/20480",)
    held: int = 8000
    repeats: int = 5
    name: str = "decode-loop"
    results: Path = RESULTS


def parse_case(text: str) -> tuple[int, int, int]:
    """Return sequences of the batch, sequences that decode, and the capacity.

    Raises:
      SystemExit: the text has another form, or more sequences decode than the batch has.
    """
    try:
        rows, count, longest = map(int, text.split("/"))
    except ValueError as error:
        raise SystemExit(f"--case {text}: must be ROWS/COUNT/LONGEST, such as 64/1/20480") from error
    if not 1 <= count <= rows:
        raise SystemExit(f"--case {text}: {count} of {rows} sequences decode; must be 1 to {rows}")
    return rows, count, longest


def time_case(network: Transformer, case: str, *, held: int, repeats: int) -> dict[str, Any]:
    """Compile the program of a case, and return seconds per token of each repeat."""
    rows, count, longest = parse_case(case)
    layout = Layout.of(
        network.device_caches,
        rows=rows,
        longest=longest,
        page=PAGE,
        cache_tokens=max(longest, rows * (held + PAGE)),
        reuse=False,
    )
    cache = network.new_cache(batch=rows, capacity=layout.capacity, specs=layout.specs)
    whole = DecodeState.of(replace(cache, lengths=jnp.full(rows, held, jnp.int32)))
    state = FlatState.of(whole._replace(done=jnp.zeros(rows, bool)))
    own = layout.pages // rows
    slots = np.minimum(np.arange(layout.capacity // PAGE), own - 1)
    table = jnp.asarray(np.arange(rows)[:, None] * own + slots, jnp.int32)
    numbers = pack_parameters(held, longest, (), Sampling(), np.zeros(2, np.uint32))
    packed = jnp.asarray(np.concatenate([[1], numbers])[None].repeat(count, 0), jnp.int32)
    run, flat = compile_loop(network, state, table, packed), Flat.of(network)
    times = []
    for repeat in range(1 + repeats):  # The first one records the graph.
        began = time.perf_counter()
        for _ in range(CALLS):
            state, chosen = run(flat, state, table, packed)
        jax.block_until_ready(chosen)
        times += [(time.perf_counter() - began) / (CALLS * STEPS)] if repeat else []
    return {"rows": rows, "count": count, "longest": longest, "token": times}


def compile_loop(
    network: Transformer, state: FlatState, table: Array, packed: Array
) -> Callable[..., tuple[FlatState, Any]]:
    """Compile the engine's program of several steps."""
    run = partial(run_flat, partial(decode_loop, STEPS, "greedy"))
    options = ONE_GRAPH if jax.default_backend() == "gpu" else {}
    program = jax.jit(run, donate_argnums=1, compiler_options=options)
    return program.lower(Flat.of(network), state, table, packed).compile()


def main(options: Options) -> None:
    """Time all cases and write one JSON file."""
    for case in options.case:  # Refuse before any work.
        parse_case(case)
    network = load(options.model, resolve_plan(options.plan, options.model)).network
    measure = partial(time_case, network, held=options.held, repeats=options.repeats)
    results = []
    for case in options.case:
        results.append({"plan": options.plan} | measure(case) | {"commit": commit()})
        times = 1e3 * np.array(results[-1]["token"])
        print(f"{case}: {np.median(times):.3f} ms a token ({times.min():.3f}-{times.max():.3f})", flush=True)
    settings = {"model": options.model.resolve().name, "held": options.held}
    print(write_result(options.name, settings, results, options.results))


if __name__ == "__main__":
    main(tyro.cli(Options))

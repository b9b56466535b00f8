"""Which order of a step of the prefill kernel is fastest? Every variant beside cuDNN, in turns.

    python -m benchmarks.bench_prefill_schedules

What the card can do comes first: a bf16 product, and exponentials, 16 of which a multiprocessor does each
clock. Then every variant is compiled and checked against float64 in sampled rows of every head, one at a
time, and those that are right are timed. Variants run in a process of their own: one that hangs is ended,
named, and left out of the next process, which goes on from there.
"""

import functools
import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array, lax
from jax.experimental.mosaic.gpu import profiler

from benchmarks.common import RESULTS, write_result
from benchmarks.timing import device_ms, matmul_rate, normal
from kernels_pallas import PrefillConfig, Trailing, prefill_attention

N, H, S, FAR_S = 32, 128, 16384, 32768
NEAR = {"sinks": 4, "window": 512}
WRONG = 0.01
"""Relative error of a head's sampled rows that a right variant stays below."""
SILENT_S = 60.0
"""Without a word for so long a process hangs."""
MULTIPROCESSORS, EXP_PER_CLOCK = 132, 16

config = functools.partial(PrefillConfig, block_kv=128, stages=2, warpgroups=3)
turns = lambda columns, **more: config(lanes=True, turns=columns, **more)
fa3 = lambda **more: PrefillConfig(**{"order": "fa3", "lanes": True} | more)


class Shape(NamedTuple):
    """Ranks, tokens, whether near keys have all coordinates, and what is timed at them; None is cuDNN."""

    R: int
    Z: int
    S: int
    two_ranks: bool
    variants: dict[str, PrefillConfig | None]


SHAPES = {
    "(128,128)": Shape(128, 128, S, False, {
        "cudnn": None, "today": config(), "turns 112": turns(112),
        "fa3 64 keys": fa3(block_kv=64, stages=4),
        "fa3 two warpgroups, turns 112": fa3(warpgroups=2, turns=112),
    }),
    "(64,96)": Shape(64, 96, S, False, {
        "cudnn": None, "today": config(stages=3), "turns 112": turns(112), "turns 96": turns(96),
        "turns 112, 4 stages": PrefillConfig(128, 4, 3, lanes=True, turns=112),
        "fa3 96 keys": fa3(block_kv=96, stages=4),
        "fa3 96 keys, turns 80": fa3(block_kv=96, stages=4, turns=80),
        "fa3 shared": fa3(order="fa3_shared"),
    }),
    "(32,64)": Shape(32, 64, S, False, {
        "cudnn": None, "today": config(overlap=True), "turns 112": turns(112), "turns 96": turns(96),
        "fa3": fa3(), "fa3, turns 112": fa3(turns=112), "fa3, sums each step": fa3(lanes=False),
    }),
    "(64,64)": Shape(64, 64, S, False, {
        "cudnn": None, "today": config(overlap=True), "turns 112": turns(112), "fa3": fa3(),
    }),
    "(48,96)": Shape(48, 96, S, False, {
        "cudnn": None, "today": config(warpgroups=2, overlap=True), "turns 112": turns(112),
    }),
    "(64,96) S=32768": Shape(64, 96, FAR_S, False, {"today": config(stages=3), "turns 112": turns(112)}),
    "(64,96) S=32768, two ranks": Shape(64, 96, FAR_S, True, {"today": config(), "turns 112": turns(112)}),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """`results`: folder of the table. `name`: of its file. `worker`, `skip`: of its own processes."""

    results: Path = RESULTS
    name: str = "prefill-schedules-h200"
    worker: bool = False
    skip: tuple[str, ...] = ()


def exp_rate() -> float:
    """Exponentials per second of the whole card."""
    steps, warpgroups, tile = 4000, 3, (64, 128)

    def kernel(x_ref: Any, o_ref: Any) -> None:
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        x = lax.fori_loop(0, steps, lambda _, x: jnp.exp2(x * 0.5 - 1.0), x)
        o_ref.at[pl.ds((cta * warpgroups + wg) * tile[0], tile[0])][...] = x

    out = jax.ShapeDtypeStruct((MULTIPROCESSORS * warpgroups * tile[0], tile[1]), jnp.float32)
    launch = plgpu.kernel(
        kernel,
        out_type=out,
        grid=(MULTIPROCESSORS,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return steps * out.size / (np.median(device_ms(launch, normal(0, *tile, dtype=jnp.float32))) * 1e-3)


def cudnn(q: Array, k: Array, v: Array) -> Array:
    """The peer, full rank."""
    return jax.nn.dot_product_attention(q, k, v, scale=H**-0.5, is_causal=True, implementation="cudnn")


def arrays(shape: Shape) -> tuple[Any, ...]:
    """q, k, v, and the trailing coordinates of two ranks."""
    R, Z, T = shape.R, shape.Z, shape.S
    q, k, v = normal(0, 1, T, N, H if shape.two_ranks else R), normal(1, 1, N, T, R), normal(2, 1, N, T, Z)
    if not shape.two_ranks:
        return q, k, v, None
    tails = normal(3, 1, N, T, H - R), normal(4, 1, N, T, H - Z)
    return q, k, v, Trailing(*tails, jnp.zeros(1, jnp.int32), *(x[:, :, :8] for x in tails))


def attend(shape: Shape, config: PrefillConfig) -> Callable[..., Array]:
    """The kernel in this config."""
    near = NEAR if shape.two_ranks else {}
    return lambda q, k, v, trailing: prefill_attention(
        q, k, v, scale=H**-0.5, trailing=trailing, config=config, **near
    )[0]


def exact_rows(shape: Shape, q: Array, k: Array, v: Array, trailing: Trailing | None) -> tuple[Array, Any]:
    """Positions [P] and the exact output [N, P, Hv] there, float64."""
    chosen = [0, 1, 130, 777, shape.S // 2 - 1, shape.S - 200, shape.S - 1]
    double = lambda x: np.asarray(x.astype(jnp.float32), np.float64)
    t, j = np.array(chosen)[:, None], np.arange(shape.S)
    near = (j < NEAR["sinks"]) | (j > t - NEAR["window"])
    out, q = [], q[0, jnp.array(chosen)]
    for head in range(N):
        rows, values = double(q[:, head]), double(v[0, head])
        scores = rows[:, : shape.R] @ double(k[0, head]).T
        if trailing is not None:
            scores += np.where(near, rows[:, shape.R :] @ double(trailing.k[0, head]).T, 0.0)
        weights = np.where(j <= t, np.exp(H**-0.5 * (scores - scores.max(1, keepdims=True))), 0.0)
        weights /= weights.sum(1, keepdims=True)
        parts = [weights @ values]
        if trailing is not None:
            parts.append((weights * near) @ double(trailing.v[0, head]))
        out.append(np.concatenate(parts, 1))
    return jnp.array(chosen), np.stack(out)


def worst_error(found: Array, exact: Any) -> float:
    """Largest relative error of a head, in the norm; infinite where a number is none."""
    off = np.linalg.norm(np.asarray(found.swapaxes(0, 1), np.float64) - exact, axis=(1, 2))
    return float(np.nan_to_num(off / np.linalg.norm(exact, axis=(1, 2)), nan=np.inf).max())


def measure(name: str, shape: Shape, skip: tuple[str, ...], *, rounds: int = 4) -> Iterator[dict[str, Any]]:
    """Rows of a shape's variants: first the errors, then the times."""
    data = arrays(shape)
    louder = 6 * data[0], *data[1:]  # Of scores that differ by much: maxima change, and few weights count.
    chosen, exact = exact_rows(shape, *louder)
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for variant, tiles in shape.variants.items():
        key = f"{name}: {variant}"
        if key in skip:
            continue
        yield {"begun": key}
        try:
            if tiles is None:
                args = normal(0, 1, S, N, H), normal(1, 1, S, N, H), normal(2, 1, S, N, H)
                calls[key] = jax.jit(cudnn).lower(*args).compile(), args
                continue
            program = jax.jit(attend(shape, tiles)).lower(*data).compile()
            error = worst_error(program(*louder)[0, chosen], exact)
        except Exception as refusal:  # Whatever it is, the others are measured.
            yield {"key": key, "refused": f"{type(refusal).__name__}: {refusal}"[-400:]}
            if isinstance(refusal, jax.errors.JaxRuntimeError):  # Of the device: a new process is safe.
                sys.exit(3)
            continue
        yield {"key": key, "error": error}
        if error < WRONG:
            calls[key] = program, data
    times: dict[str, list[float]] = {key: [] for key in calls}
    for _, (key, (program, args)) in itertools.product(range(rounds), calls.items()):
        yield {"begun": key}
        times[key] += [float(t) for t in profiler.measure(program, iterations=5)(*args)[1]]
    for key, ms in times.items():
        yield {"key": key, "ms": ms}
    yield {"done": name}


def work(skip: tuple[str, ...]) -> None:
    """One line of JSON for each thing that is known."""
    say = lambda row: print("ROW " + json.dumps(row), flush=True)
    if "ceilings" not in skip:
        say({"begun": "ceilings"})
        try:
            matmul, exps = matmul_rate(), exp_rate()
            per_sm = exps / MULTIPROCESSORS
            say({"matmul": matmul, "exps": exps, "clock": per_sm / EXP_PER_CLOCK})
        except Exception as refusal:
            say({"key": "ceilings", "refused": f"{type(refusal).__name__}: {refusal}"[-400:]})
        say({"done": "ceilings"})
    for name, shape in SHAPES.items():
        if name not in skip:
            for row in measure(name, shape, skip):
                say(row)


def words(skip: list[str]) -> Iterator[dict[str, Any]]:
    """What a worker says, until it ends or hangs; then it is ended and `hung` says so."""
    command = [sys.executable, "-m", "benchmarks.bench_prefill_schedules", "--worker", "--skip", *skip]
    worker = subprocess.Popen(command if skip else command[:-1], stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in worker.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        while (line := lines.get(timeout=SILENT_S)) is not None:
            if line.startswith("ROW "):
                yield json.loads(line[4:])
            else:
                print(line, end="", flush=True)
        yield {"ended": worker.wait()}
    except queue.Empty:
        worker.kill()
        yield {"ended": "hung"}


def main(options: Options) -> None:
    """Runs workers until all is measured, prints a table and writes it; ends with 1 if a variant is wrong."""
    if options.worker:
        work(options.skip)
        return
    rows: dict[str, dict[str, Any]] = {}
    ceilings: dict[str, float] = {}
    skip: list[str] = []
    for _ in range(6):
        begun, ended = "", None
        for word in words(skip):
            if "begun" in word:
                begun = word["begun"]
            elif "done" in word:
                skip.append(word["done"])
            elif "ended" in word:
                ended = word["ended"]
            elif "matmul" in word:
                ceilings = word
            else:
                rows.setdefault(word["key"], {}).update(word)
            if "begun" not in word:
                print(json.dumps(word)[:300], flush=True)
        if ended == 0:
            break
        rows.setdefault(begun, {"key": begun}).setdefault("refused", f"worker ended: {ended}")
        skip.append(begun)
    show(ceilings, rows)
    configs = {
        f"{name}: {variant}": tiles and asdict(tiles)
        for name, shape in SHAPES.items()
        for variant, tiles in shape.variants.items()
    }
    for key, row in rows.items():
        row["config"] = configs.get(key)
    print(
        write_result(options.name, {}, {"ceilings": ceilings, "rows": list(rows.values())}, options.results)
    )
    sys.exit(any("ms" not in row for row in rows.values()))


def show(ceilings: dict[str, float], rows: dict[str, dict[str, Any]]) -> None:
    """The table: median, least and most ms, ratio to cuDNN of the same turns, or of what goes alone."""
    if ceilings:
        print(
            "{:.0f} TFLOP/s, {:.3f} GHz by exponentials".format(
                ceilings["matmul"] / 1e12, ceilings["clock"] / 1e9
            )
        )
    median = lambda key: float(np.median(rows[key]["ms"])) if "ms" in rows.get(key, {}) else float("nan")
    for key, row in rows.items():
        if "ms" not in row:
            print(f"{key:44} FAILED {row.get('refused', '')} error {row.get('error')}")
            continue
        name, variant = key.split(": ")
        peer = median(f"{name}: cudnn")
        ratio = f"{peer / median(key):5.2f}x of cudnn" if peer == peer else ""
        if name.endswith("two ranks"):
            ratio = f"{median(key) / median(f'(64,96) S=32768: {variant}'):5.3f} of it alone"
        ms, error = row["ms"], row.get("error", 0.0)
        print(f"{key:44} {median(key):7.3f} ms ({min(ms):.3f} to {max(ms):.3f})  {ratio}  error {error:.1e}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

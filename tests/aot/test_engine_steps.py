"""Compilation of an engine's steps for an H200: kernels read pages and write pools in place."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest
from abstract_gpu import on_abstract_h200
from compiled import compiled, device

from benchmarks.model.models import LLAMA_2_7B, build
from kernels_pallas import lowering
from kernels_pallas.lowering_processes import Processes
from zdc_jax import methods
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.tails import TailArrays
from zdc_jax.engine import choosing, programs
from zdc_jax.engine.layout import Layout
from zdc_jax.engine.programs import (
    CHUNK_HEADER,
    FlatPrefillState,
    PrefillState,
    run_flat,
)
from zdc_jax.engine.runner import MAX_CHUNKS
from zdc_jax.generation.chunks import BETWEEN_POWERS
from zdc_jax.generation.next_token import Choice
from zdc_jax.generation.packed_parameters import WIDTH
from zdc_jax.generation.shaping import Shaping
from zdc_jax.generation.steps import DecodeState, Flat, Frontier
from zdc_jax.plan import CompressionPlan

CONFIG = replace(
    LLAMA_2_7B,
    layers=LLAMA_2_7B.layers[:2],
    embed_dim=512,
    ffn_dim=1024,
    num_heads=8,
    num_kv_heads=2,
    vocab_size=512,
)
ROWS, TOKENS = 8, 8192
NEAR = {"sinks": 4, "window": 512}
WAITING = re.compile(r" (while|conditional)\(")
"""Operations for which a GPU waits for the host."""
COPY = re.compile(r"\[([\d,]+)\]\S* copy\(")


def coded(**settings) -> CompressionPlan:
    """Return a plan that stores all coordinates of far tokens in 4 bits."""
    made = methods.named("coded").Settings(**settings)
    plan = CompressionPlan.uniform(CONFIG, qk=128, v=128, **NEAR)
    layers = tuple(replace(ranks, settings=made) for ranks in plan.layers)
    return replace(plan, method="coded", settings=made, layers=layers)


PLANS = {
    "dense": (CompressionPlan.full(CONFIG), {"zdc_decode"}),
    "ranks": (CompressionPlan.uniform(CONFIG, qk=64, v=96, **NEAR), {"zdc_decode"}),
    "coded": (coded(index=0, read=0), {"zdc_decode", "zdc_coded_decode"}),
    "chosen": (coded(index=32, read=512), {"zdc_decode", "zdc_coded_decode", "zdc_coded_scan"}),
    "coded near": (coded(index=0, read=0, bits_near=8), {"zdc_coded_decode"}),
}


def arguments(plan: CompressionPlan, longest: int):
    """Return a flattened network, and the shapes of an engine's state."""
    network = build(CONFIG, rotated=True)
    network.plan = plan
    given = {"rows": ROWS, "longest": longest, "page": 128, "cache_tokens": ROWS * TOKENS, "reuse": True}
    layout = Layout.of(network.layer_caches, **given)

    with on_abstract_h200():
        cache = jax.eval_shape(
            lambda: KVCache.create(layout.specs, batch=ROWS, capacity=layout.capacity, join=True)
        )
    tails = (
        jax.eval_shape(lambda: TailArrays.empty(cache, layout.tails, in_place=True)) if layout.tails else None
    )
    return Flat.of(network), FlatPrefillState.of(PrefillState(DecodeState.of(cache), tails))


def program(
    plan: CompressionPlan, step, packed: tuple[int, ...], longest: int = TOKENS, *, prefills: bool = False
) -> tuple[set[str], Any, Any]:
    """Return the names of a step's Mosaic kernels, the compiled step, and the state that it updates."""
    run, given = called(plan, step, packed, longest, prefills=prefills)
    with on_abstract_h200():
        found = {kernel.name for kernel in compiled(run, *given)}
    return found, compile_step(run, given), given[1]


def called(
    plan: CompressionPlan, step, packed: tuple[int, ...], longest: int, *, prefills: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Return a step as a function of arrays, and their shapes."""
    flat, state = arguments(plan, longest)
    table = jax.ShapeDtypeStruct((ROWS, longest // 128), jnp.int32)
    run = partial(run_flat, step)
    state = state if prefills else state.batch
    return run, (flat, state, table, jax.ShapeDtypeStruct(packed, jnp.int32))


def compile_step(run: Any, given: tuple[Any, ...]) -> Any:
    """Compile a step that updates its state in place."""
    sharding = jax.sharding.SingleDeviceSharding(device())

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    with on_abstract_h200():
        traced = jax.jit(run, donate_argnums=1).trace(*jax.tree.map(placed, given))
        return traced.lower(lowering_platforms=("cuda",)).compile()


def has(found: set[str], kernels: set[str]) -> bool:
    """Return whether every kernel's name is found."""
    return all(any(kernel in name for name in found) for kernel in kernels)


def assert_in_place(step: Any, state: Any) -> None:
    """Assert that a program updates a cache where it lies, and copies no array of a layer."""
    memory, leaves = step.memory_analysis(), state.cache.leaves
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    cache = state.cache.whole
    sharing = max(Counter(place.holder for place in cache.places).values(), default=1)
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in leaves) / sharing
    assert memory.temp_size_in_bytes < largest / 4


@pytest.mark.aot
@pytest.mark.parametrize("name", PLANS)
def test_decoding_reads_and_writes_pages_where_they_lie(on_kernels, name):
    plan, kernels = PLANS[name]
    found, step, state = program(plan, programs.decode_once, (ROWS, 1 + WIDTH))
    assert has(found, kernels), found
    assert not WAITING.search(step.as_text())
    assert_in_place(step, state)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "rows"), [*((name, ROWS) for name in PLANS), ("dense", 1), ("coded near", 1)]
)
def test_several_steps_in_one_program_ask_the_host_nothing(on_kernels, name, rows):
    # XLA knows the loop's trip count, and pools stay in place in the loop.
    plan, kernels = PLANS[name]
    in_one = partial(programs.decode_loop, 4, "greedy")
    found, step, state = program(plan, in_one, (rows, 1 + WIDTH))
    assert has(found, kernels), found
    loops = [line for line in step.as_text().splitlines() if WAITING.search(line)]
    assert len(loops) == 1, loops
    assert '"known_trip_count":{"n":"4"}' in loops[0], loops
    assert_in_place(step, state)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "width", "share"),
    [
        ("dense", 16, 1 / ROWS),
        ("dense", 512, 1 / 2),
        ("ranks", 16, 1 / ROWS),
        ("ranks", 512, 1 / 2),
        ("coded", 16, 5 / 4),  # Far tokens of one sequence in 16 bits are as large as the pool in 4.
        ("chosen", 16, 1 / 2),
        ("chosen", 512, 5),  # Index scores of all far tokens, for each token of the chunk.
    ],
)
def test_pieces_of_prompts_are_written_and_read_where_they_lie(on_kernels, name, width, share):
    # No pool is copied. If a chunk is so short that its own arrays are small, no sequence is copied either,
    # and no loop makes the host wait.
    plan, _ = PLANS[name]
    alone = partial(programs.prefill_and_decode, 1, 0, 0)
    found, step, state = program(plan, alone, (CHUNK_HEADER + width,), prefills=True)
    chooses = {"zdc_coded_scan", "zdc_largest", "zdc_coded_decode"} if name == "chosen" else set()
    assert has(found, {"zdc_prefill"} | chooses), found
    memory, text = step.memory_analysis(), step.as_text()
    assert (name == "coded") == ("zdc_dequantise" in text)
    assert width > 16 or not WAITING.search(text)
    pools = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)]
    assert memory.alias_size_in_bytes == sum(pools)
    assert memory.temp_size_in_bytes < share * max(pools), (memory.temp_size_in_bytes, max(pools))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "chunks", "longest", "share"),
    [
        ("dense", 1, TOKENS, 1 / 2),
        ("ranks", 1, TOKENS, 5 / 8),
        ("coded", 1, TOKENS, 7 / 4),
        ("chosen", 1, TOKENS, 5),
        ("coded near", 1, 8 * TOKENS, 16),  # Dequantized values are many times as large.
        ("dense", MAX_CHUNKS, TOKENS, 1),
        ("ranks", MAX_CHUNKS, TOKENS, 1),
        ("coded", MAX_CHUNKS, TOKENS, 5),
    ],
)
def test_pieces_and_tokens_beside_them_take_the_kernels_of_both(on_kernels, name, chunks, longest, share):
    plan, kernels = PLANS[name]
    width, rows = 512, ROWS * (1 + WIDTH)
    step = partial(programs.prefill_and_decode, chunks, width, ROWS)
    numbers = chunks * CHUNK_HEADER + width + rows
    found, step, state = program(plan, step, (numbers,), longest, prefills=True)
    assert has(found, kernels | {"zdc_prefill"}), found
    memory, text = step.memory_analysis(), step.as_text()
    assert ("coded" in name) == ("zdc_dequantise" in text)
    assert not WAITING.search(text)
    sizes = [math.prod(map(int, shape.split(","))) for shape in COPY.findall(text)]
    assert max(sizes, default=0) <= ROWS, "neither pools nor rings are copied"
    pools = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)]
    assert memory.alias_size_in_bytes == sum(pools)
    assert memory.temp_size_in_bytes < share * max(pools), (memory.temp_size_in_bytes, max(pools))


@pytest.mark.aot
def test_snapshots_of_layers_that_choose_are_not_copied(on_kernels):
    # XLA writes these rings. It would copy an array that several layers share.
    plan, alone = coded(index=32, read=512, bits_near=8), partial(programs.prefill_and_decode, 1, 0, 0)
    _, step, _ = program(plan, alone, (CHUNK_HEADER + 512,), prefills=True)
    sizes = [math.prod(map(int, shape.split(","))) for shape in COPY.findall(step.as_text())]
    assert max(sizes, default=0) <= ROWS


@pytest.mark.aot
@pytest.mark.parametrize(("name", "most"), [("dense", 66), ("coded near", 66)])
def test_a_short_chunk_and_tokens_take_few_kernels(on_kernels, name, most):
    # The host needs longer to start them than the GPU to run them. With a plan they were about 100.
    rows = ROWS * (1 + WIDTH)
    step = partial(programs.prefill_and_decode, 1, 512, ROWS)
    _, step, _ = program(PLANS[name][0], step, (CHUNK_HEADER + 512 + rows,), prefills=True)
    entry = step.as_text().partition("\nENTRY")[2]
    assert len(re.findall(r" (?:fusion|custom-call|copy)\(", entry)) <= most


@pytest.mark.aot
@pytest.mark.parametrize("width", BETWEEN_POWERS)
@pytest.mark.parametrize("name", ["dense", "coded near"])
def test_chunks_between_powers_of_two_take_the_kernels_of_others(on_kernels, name, width):
    plan, kernels = PLANS[name]

    def run(width):
        step = partial(programs.prefill_and_decode, 1, width, ROWS)
        return program(plan, step, (CHUNK_HEADER + width + ROWS * (1 + WIDTH),), prefills=True)[:2]

    (found, step), (others, _) = run(width), run(1024)
    assert has(found, kernels | {"zdc_prefill"}), found
    assert len(found) == len(others)
    assert not WAITING.search(step.as_text())


@pytest.mark.aot
@pytest.mark.parametrize("is_shaped", [False, True])
@pytest.mark.parametrize("choice", get_args(Choice))
def test_choosing_tokens_never_waits_for_the_host(choice, is_shaped):
    # The vocabulary is sorted where a request samples.
    network = build(replace(CONFIG, vocab_size=32_000), rotated=True)
    leaves, tree = jax.tree.flatten(network.embeddings)
    sharding = jax.sharding.SingleDeviceSharding(device())

    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    frontier = Frontier(
        shape(jnp.bfloat16, ROWS, CONFIG.embed_dim), shape(bool, ROWS), shape(jnp.int32, ROWS)
    )
    given = shape(jnp.int32, ROWS), shape(bool, ROWS), frontier, shape(jnp.int32, ROWS, 1 + WIDTH)
    placed = [shape(leaf.dtype, *leaf.shape) for leaf in leaves]
    arrays = shape(jnp.int32, ROWS, 32_000), shape(jnp.float32, ROWS, 32_000), shape(jnp.int32, ROWS, 1_000)
    shaping = Shaping(*arrays) if is_shaped else None

    def run(leaves, shaping, *given):
        changes = (None, None, None) if shaping is None else shaping
        embeddings = jax.tree.unflatten(tree, leaves)
        return choosing.choose_in_batch(embeddings, *changes, *given, step="next", choice=choice)

    step = jax.jit(run).trace(placed, shaping, *given).lower(lowering_platforms=("cuda",)).compile()
    assert not WAITING.search(step.as_text())


@pytest.mark.aot
@pytest.mark.parametrize("name", PLANS)
def test_programs_with_copies_of_kernels_are_those_that_lower_them(on_kernels, monkeypatch, name):
    # Only names differ: not the kernels, nor the order in which they run.
    plan, _ = PLANS[name]
    in_one = partial(programs.decode_loop, 4, "greedy")
    run, given = called(plan, in_one, (ROWS, 1 + WIDTH), TOKENS, prefills=False)
    monkeypatch.setattr(lowering, "processes", Processes(0))
    texts = []
    for copies in (False, True):
        monkeypatch.setattr(lowering, "takes_copies", lambda copies=copies: copies)
        jax.clear_caches()
        texts.append(compile_step(run, given).as_text())
    assert "call_exported" in texts[1]
    assert renamed(texts[0]) == renamed(texts[1])


def renamed(text: str) -> list[str]:
    """Return the instructions of a program, without metadata, and with numbers in place of names."""
    names: dict[str, str] = {}
    text = re.sub(r", (metadata|frontend_attributes)=\{[^}]*\}|, backend_config=.*", "", text)
    text = re.sub(r"%[\w.\-]+", lambda name: names.setdefault(name[0], f"%{len(names)}"), text)
    return [line for line in text.splitlines() if " = " in line]

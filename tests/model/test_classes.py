"""Token classes compared with a model that masks all other coordinates, and rules of classes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TinyModel
from hypothesis import given, settings
from hypothesis import strategies as st

from zdc_jax import CompressionPlan, generate
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.errors import PlanError, PromptError
from zdc_jax.methods.token_classes import Settings
from zdc_jax.methods.token_classes.cache import ClassBlocks, GroupState, classify
from zdc_jax.parallel.mesh import MeshConfig

BLOCK = 16
LENGTH = 64
"""Padded length unit of rows in masked models."""


def class_plan(tiny: TinyModel, group=3, share=0.4, more=32, less=16, **near) -> CompressionPlan:
    """Return a plan whose layers after each leader keep `more` of important tokens and `less` of others."""
    settings = Settings(group, share, share, less, less, BLOCK)
    plan = CompressionPlan.uniform(tiny.config, qk=more, v=more, **near)
    return replace(plan, method="token_classes", settings=settings)


class Masked:
    """A model with all coordinates of the calibrated basis, of which pairs that a plan drops are masked."""

    def __init__(self, tiny: TinyModel, plan: CompressionPlan):
        self.network = tiny.model(CompressionPlan.full(tiny.config), tiny.basis()).network
        self.plan, self.H = plan, tiny.config.head_dim
        self.group = plan.settings.group
        self.important = {leader: np.zeros(0, bool) for leader in range(0, len(plan.layers), self.group)}

    def run(self, tokens: np.ndarray, classify) -> np.ndarray:
        """Return hidden states [T, D] of one row; `classify(importance, known)` extends the known classes.

        Rows are padded at the end, where no query looks, so that operations compile for one length.
        """
        T, whole = len(tokens), -(-len(tokens) // LENGTH) * LENGTH
        positions = jnp.arange(whole)[None]
        x = self.network.embeddings.embed(jnp.asarray(np.pad(tokens, (0, whole - T)))[None], positions)
        for index, block in enumerate(self.network.layers):
            leads = index % self.group == 0
            less, more = self.plan.settings, self.plan.layers[index]
            important = np.full(whole, leads)
            if not leads:
                important[:T] = self.important[index // self.group * self.group]
            widths = [np.where(important, b, a) for a, b in ((less.rest_qk, more.qk), (less.rest_v, more.v))]
            seen = []

            def attend(q, k, v, widths=widths, seen=seen):
                return self.attend(q, k.keys, v, *widths, seen)

            x, _ = block(x, positions, attend)
            if leads:
                self.important[index] = classify(seen[0][:T], self.important[index])
        return np.asarray(x[0])[:T]

    def attend(self, q, k, v, R, Z, seen):
        T, N = q.shape[1:3]
        k, v = (jnp.repeat(x[0], N // x.shape[2], axis=1) for x in (k, v))
        t, j = np.arange(T)[:, None], np.arange(T)
        sinks, window = self.plan.near(0)
        near = (j < sinks) | (j > t - window) if sinks or window else t < 0
        near = np.broadcast_to(near, (T, T))

        def cut(x, ranks):
            return x * (np.arange(self.H) < ranks[:, None])[:, None]

        def score(key):
            return jnp.einsum("tnh,snh->nts", q[0], key) * self.H**-0.5

        logits = jnp.where(near, score(k), score(cut(k, R)))
        logits = jnp.where(j <= t, logits, -jnp.inf)
        lse = jax.nn.logsumexp(logits, -1)
        seen.append(np.asarray(jax.nn.logsumexp(lse, 0)))
        weights = jnp.exp(logits - lse[..., None])

        def mix(mask, value):
            return jnp.einsum("nts,snh->tnh", jnp.where(mask, weights, 0), value)

        return (mix(near, v) + mix(~near, cut(v, Z)))[None], None


def by_blocks(fraction):
    """Return a function that classifies a whole prompt: the most important tokens of each block."""

    def classify(importance, known):
        out = np.zeros(len(importance), bool)
        for start in range(0, len(importance), BLOCK):
            block = importance[start : start + BLOCK]
            out[start + np.argsort(-block, kind="stable")[: int(np.ceil(fraction * len(block) - 1e-9))]] = (
                True
            )
        return out

    return classify


def one_more(fraction, cap):
    """Return a function that classifies one more token by its rank in its block, while slots remain."""

    def classify(importance, known):
        start = (len(importance) - 1) // BLOCK * BLOCK
        block, mine = importance[start:], known[start:]
        wanted = (block[:-1] >= block[-1]).sum() < int(np.ceil(fraction * len(block) - 1e-9))
        important = mine.sum() < cap if wanted else (~mine).sum() >= BLOCK - cap
        return np.append(known, important)

    return classify


NEAR = [{}, {"window": 8, "sinks": 2}]


@pytest.mark.parametrize(("near", "group"), [(NEAR[0], 2), (NEAR[1], 3)])
@pytest.mark.full
def test_whole_sequences_equal_masked_ones(tiny: TinyModel, near, group):
    plan = class_plan(tiny, group, **near)
    tokens = tiny.tokens(2, 41)
    got = np.asarray(tiny.model(plan).network.hidden(jnp.asarray(tokens)))
    for row, ours in zip(tokens, got, strict=True):
        want = Masked(tiny, plan).run(row, by_blocks(0.4))
        np.testing.assert_allclose(ours, want, atol=2e-4 * np.abs(want).max())


def test_classes_come_from_all_queries_of_a_prompt(tiny_llama: TinyModel, monkeypatch):
    # The last layer needs the result of one query, but its classes need the scores of all.
    plan, seen, attend = class_plan(tiny_llama, group=1), [], PrefixRing.attend

    def attend_and_note(self, *arguments):
        seen.append(arguments[-1].needed_from)
        return attend(self, *arguments)

    monkeypatch.setattr(PrefixRing, "attend", attend_and_note)
    cache = KVCache.create(plan.layer_caches("float32"), batch=1, capacity=64)
    tokens = jnp.asarray(tiny_llama.tokens(1, 32))
    with jax.disable_jit():  # A program that was traced before would not call the function again.
        tiny_llama.model(plan).network.extend_last(cache, tokens, jnp.array([32]))
    assert set(seen) == {None}


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.full
def test_pieces_and_decoded_tokens_equal_masked_ones(tiny_llama: TinyModel, near):
    # A ragged batch comes in two chunks, then token by token over the end of a block.
    plan = class_plan(tiny_llama, **near)
    network = tiny_llama.model(plan).network
    tokens, prompts = tiny_llama.tokens(2, 60), (46, 37)
    cache = KVCache.create(plan.layer_caches("float32"), batch=2, capacity=64)
    for start, width in ((0, 32), (32, 16)):
        end = jnp.minimum(jnp.asarray(prompts), start + width)
        _, cache = network.extend(cache, jnp.asarray(tokens[:, start : start + width]), end)
    steps = []
    for step in range(5):
        at = np.array(prompts) + step
        hidden, cache = network.extend(cache, jnp.asarray(tokens[[0, 1], at][:, None]), jnp.asarray(at + 1))
        steps.append(np.asarray(hidden[:, 0]))
    cap = ClassBlocks(BLOCK, 0.4).important(BLOCK)
    for row, prompt in enumerate(prompts):
        masked = Masked(tiny_llama, plan)
        masked.run(tokens[row, :prompt], by_blocks(0.4))
        for step in range(5):
            want = masked.run(tokens[row, : prompt + step + 1], one_more(0.4, cap))[-1]
            np.testing.assert_allclose(steps[step][row], want, atol=2e-4 * np.abs(want).max())


@pytest.mark.full
def test_equal_classes_are_the_uniform_plan(tiny_opt: TinyModel):
    tokens = jnp.asarray(tiny_opt.tokens(1, 40))
    for rank in (16, 32):
        uniform = CompressionPlan.uniform(tiny_opt.config, qk=rank, v=rank)
        want = tiny_opt.model(uniform).network.hidden(tokens)
        got = tiny_opt.model(class_plan(tiny_opt, more=rank, less=rank)).network.hidden(tokens)
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("near", NEAR)
def test_arrays_are_as_small_as_the_plan_says(tiny: TinyModel, near):
    plan = class_plan(tiny, **near)
    cache = KVCache.create(plan.layer_caches("bfloat16"), batch=3, capacity=70)
    assert cache.bytes() == plan.bytes(70, 3)
    if not near:
        dense = CompressionPlan.full(tiny.config)
        assert plan.bytes(4096) < 0.85 * dense.bytes(4096)
    first = tiny.model(plan).network.layers[1].attention
    assert first.v[...].shape[-1] == 32


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), T=st.integers(1, 50), share=st.floats(0.05, 0.95))
@pytest.mark.full
def test_each_token_has_one_slot_of_its_class(seed, T, share):
    rng = np.random.default_rng(seed)
    importance = rng.normal(size=(2, T)).astype(np.float32)
    end, blocks = rng.integers(0, T + 1, 2), ClassBlocks(BLOCK, share)
    empty = [jnp.full((2, slots), -1) for slots in blocks.segment_slots(64)]
    group = GroupState((empty[0], empty[1]), jnp.full((2, BLOCK), -jnp.inf))
    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    group, slots = classify(group, jnp.asarray(importance), positions, jnp.asarray(end), blocks)
    for row, n in enumerate(end):
        important = by_blocks(share)(importance[row, :n], None)
        for held, slot, mine in zip(group.positions, slots, (important, ~important), strict=True):
            stored = np.asarray(held[row])
            assert sorted(stored[stored >= 0]) == list(np.flatnonzero(mine))
            np.testing.assert_array_equal(stored[np.asarray(slot[row, :n])[mine]], np.flatnonzero(mine))
            used = np.flatnonzero(stored >= 0)
            size = blocks.slots[0] if held is group.positions[0] else blocks.slots[1]
            np.testing.assert_array_equal(used // size, stored[used] // BLOCK)
        newest = importance[row, (n - 1) // BLOCK * BLOCK : n] if n else []
        np.testing.assert_array_equal(group.importance[row, : len(newest)], newest)
        assert (group.importance[row, len(newest) :] == -np.inf).all()


@pytest.mark.full
def test_generation_in_pieces_equals_generation_at_once(tiny_llama: TinyModel):
    model = tiny_llama.model(class_plan(tiny_llama, window=8, sinks=2))
    prompts = [tiny_llama.tokens(1, n, seed=n)[0].tolist() for n in (70, 45)]
    whole = generate(model, prompts, 12)
    pieces = generate(model, prompts, 12, prefill_chunk=32, implementation="xla")
    assert [c.tokens for c in whole.completions] == [c.tokens for c in pieces.completions]
    assert whole.kv_bytes == model.plan.bytes(whole.capacity, 2, "float32")


def test_what_classes_cannot_do_is_said(tiny_llama: TinyModel):
    plan = class_plan(tiny_llama)
    model = tiny_llama.model(replace(plan, settings=replace(plan.settings, block=48)))
    with pytest.raises(PromptError, match="must be a multiple of the plan's blocks of 48"):
        generate(model, [[5, 6, 7]], 2)
    model = tiny_llama.model(plan).network
    with pytest.raises(NotImplementedError, match="it does not read this cache"):
        model.hidden(jnp.zeros((1, 8), jnp.int32), "cudnn")


IMPOSSIBLE = {
    "group": [0, 1.5],
    "first": [0.0, "a"],
    "last": [1.0, float("nan")],
    "rest_qk": [0, 8, 48],
    "rest_v": [0, 24],
    "block": [0],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in IMPOSSIBLE.items() for v in values])
def test_impossible_classes_are_refused(tiny_llama: TinyModel, name, value):
    plan = class_plan(tiny_llama)
    with pytest.raises(PlanError, match=name):
        replace(plan, settings=replace(plan.settings, **{name: value}))


def test_classes_survive_json(tiny_llama: TinyModel, tmp_path):
    plan = class_plan(tiny_llama, 2, window=64)
    plan.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan


def test_plans_that_classes_cannot_follow_are_refused(tiny_llama: TinyModel):
    plan = class_plan(tiny_llama, window=64)
    with pytest.raises(PlanError, match="rotated=False: method 'token_classes' needs a calibrated basis"):
        replace(plan, rotated=False)
    for own in ({"qk": 0, "v": 0, "window": 32}, {"settings": plan.settings}):
        layers = (*plan.layers[:2], replace(plan.layers[2], **own))
        with pytest.raises(PlanError, match="layer 2: method 'token_classes' supports no sliding windows"):
            replace(plan, layers=layers)


def test_a_mesh_is_refused(tiny_llama: TinyModel):
    network = tiny_llama.model(class_plan(tiny_llama)).network
    with pytest.raises(NotImplementedError, match="'token_classes': does not run on a mesh; use 'zdc'"):
        network.on_mesh(MeshConfig().create())


def test_kernels_refuse_classes_by_name(tiny_llama: TinyModel):
    network = tiny_llama.model(class_plan(tiny_llama)).network
    cache = network.new_cache(batch=1, capacity=64)
    with pytest.raises(NotImplementedError, match="'pallas' cannot serve this call"):
        network.extend(cache, jnp.zeros((1, 8), jnp.int32), jnp.full(1, 8, jnp.int32), "pallas")

"""Study of block lists: perplexity and retrieval at several densities of key blocks.

    python -m benchmarks.studies.block_lists --model CONVERTED --corpus CORPUS
        --name block-lists-smollm2-135m --contexts 4096 --split heldout --documents 4
        --choices "keys R=32 m=8 mass=0.98 w=5 Q=64 P=64" "recent share=0.5"

`CONVERTED` is calibrated on windows as long as the contexts. Every layer reads the contexts by lists.
Perplexity of the contexts and the answers to their questions are compared with the unmodified model.
Questions are read by lists and with all blocks. Attention to lists is plain XLA, so there are no times. A run
adds its rows to one JSON file and replaces rows of the same choice, context, split and seed.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Float, Int

from benchmarks.common import commit, environment
from benchmarks.quality.equal_bytes import Bench, Options, save
from benchmarks.quality.material import draw, read
from benchmarks.studies.coding import Varied
from benchmarks.studies.key_blocks import ESTIMATES, RULES, BlockChoice, as_lists, block_lists, visible_blocks
from kernels_pallas import BlockLists
from zdc_jax.axes import Array
from zdc_jax.cache.kv_cache import KVCache
from zdc_jax.cache.specs.prefix_ring import PrefixRing, PrefixRingState
from zdc_jax.cache.specs.spec import Attended, Call
from zdc_jax.evaluation.answers import Answer, answers
from zdc_jax.evaluation.perplexity import bootstrap_interval, next_token_nll
from zdc_jax.evaluation.questions import QUESTION_TOKENS
from zdc_jax.evaluation.retention import retention
from zdc_jax.evaluation.sheets import TaskDocument
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.contract import einsum_f32
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.plan import CompressionPlan


class ListedState(NamedTuple):
    """State of a layer that reads by lists.

    Attributes:
      kept: keys and values, all coordinates.
      listed: number of blocks that each block of queries attended to, int32 [B, K, ⌈S/Q⌉].
    """

    kept: PrefixRingState
    listed: Array


@dataclass(frozen=True, kw_only=True)
class ListedBlocks(PrefixRing):
    """The plain cache, read by lists; without a `choice` every list has all blocks."""

    choice: BlockChoice | None = None
    blocks: tuple[int, int] = (128, 128)

    def create(self, batch: int, capacity: int) -> Any:
        count = -(-capacity // self.blocks[0])
        listed = jnp.zeros((batch, self.num_kv_heads, count), jnp.int32)
        return ListedState(super().create(batch, capacity), listed)

    def attend(
        self,
        state: Any,
        q: Float[Array, "B T N H"],
        k: NewKeys,
        v: Any,
        positions: Int[Array, "B T"],
        end: Int[Array, " B"],
        aux: Any,
        call: Call,
    ) -> Attended:
        kept = self.write(state.kept, k, v, positions, end)
        start = positions[:, 0]
        lists = self.lists(q, kept.k, start, end, call.scale)
        o, lse = list_attention(q, kept.k, kept.v, lists, start, scale=call.scale, blocks=self.blocks)

        def put(row, new, at):
            return jax.lax.dynamic_update_slice(row, new, (0, at))

        width = state.listed.shape[-1]
        listed = jax.vmap(put)(state.listed, lists.counts[..., :width], start // self.blocks[0])
        return Attended(ListedState(kept, listed), o, lse, aux)

    def lists(self, q: Array, k: Array, start: Array, end: Array, scale: float) -> BlockLists:
        """Return the lists of the queries."""
        if self.choice is not None:
            return block_lists(q, k, start, end, scale=scale, choice=self.choice)
        visible = visible_blocks(start, end, q.shape[1], k.shape[2], self.blocks)
        return as_lists(jnp.repeat(visible[:, None], self.num_kv_heads, axis=1))


def list_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S Z"],
    lists: BlockLists,
    start: Int[Array, " B"],
    *,
    scale: float,
    blocks: tuple[int, int],
) -> tuple[Float[Array, "B T N Z"], Float[Array, "B N T"]]:
    """Attend causally to the keys of listed blocks; return the output and the log-sum-exp.

    A query that sees no key gives zeros and a log-sum-exp of -inf.
    """
    (B, T, N, H), (K, S, Z) = q.shape, v.shape[1:]
    (Q, P), G, nq = blocks, N // K, lists.counts.shape[-1]
    q = jnp.pad(q, ((0, 0), (0, nq * Q - T), (0, 0), (0, 0))).reshape(B, nq, Q, K, G, H)
    q = jnp.moveaxis(q, 1, 3).transpose(0, 2, 3, 4, 1, 5).reshape(B * K * nq, G * Q, H)
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, -S % P), (0, 0))).reshape(B * K, -1, x.shape[-1]) for x in (k, v))
    flat = BlockLists(lists.blocks.reshape(B * K * nq, -1), lists.counts.reshape(-1))
    first = jnp.repeat(start[:, None] + jnp.arange(nq) * Q, K, axis=0).reshape(-1)

    def one(inputs: tuple[Array, Array, BlockLists, Array]) -> tuple[Array, Array]:
        index, queries, own, first = inputs
        t = first + jnp.tile(jnp.arange(Q), G)[:, None]
        cut = partial(jax.lax.dynamic_slice, slice_sizes=(1, P, H))

        def step(n: Array, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest, total, out = so_far
            j = own.blocks[n] * P
            scores = scale * einsum_f32("QH,PH->QP", queries, cut(k, (index // nq, j, 0))[0])
            scores = jnp.where(j + jnp.arange(P) <= t, scores, -jnp.inf)
            higher = jnp.maximum(highest, scores.max(-1, keepdims=True))
            finite = jnp.maximum(higher, jnp.finfo(jnp.float32).min)
            weights, kept = jnp.exp(scores - finite), jnp.exp(highest - finite)
            seen = jax.lax.dynamic_slice(v, (index // nq, j, 0), (1, P, Z))[0]
            out = out * kept + einsum_f32("QP,PZ->QZ", weights.astype(v.dtype), seen)
            return higher, total * kept + weights.sum(-1, keepdims=True), out

        rows = jnp.full((G * Q, 1), -jnp.inf), jnp.zeros((G * Q, 1)), jnp.zeros((G * Q, Z))
        highest, total, out = jax.lax.fori_loop(0, own.counts, step, rows)
        return (out / jnp.where(total == 0, 1, total)).astype(v.dtype), highest + jnp.log(total)

    out, lse = jax.lax.map(one, (jnp.arange(B * K * nq), q, flat, first))
    out = out.reshape(B, K, nq, G, Q, Z).transpose(0, 2, 4, 1, 3, 5).reshape(B, nq * Q, N, Z)
    lse = lse.reshape(B, K, nq, G, Q).transpose(0, 1, 3, 2, 4).reshape(B, N, nq * Q)
    return out[:, :T], lse[..., :T]


LENGTHS = (2048, 4096, 8192)
"""Lengths of shorter prompts whose density is reported; their queries are the first ones of the prompt."""
SHORT = 32
"""Length to which short questions are padded; longer ones are padded to `QUESTION_TOKENS`."""
EXTRAPOLATED = (32_768, 131_072)
"""Lengths of prompts whose density is extrapolated."""


@dataclass(frozen=True)
class BlockOptions(Options):
    """Options of the study.

    Attributes:
      choices: choices in the syntax of `choice_of`. Only the first of `contexts` is measured.
      layers: whether the JSON file has the number of blocks by layer, head and query block.
    """

    split: Literal["train", "heldout"] = "heldout"
    choices: tuple[str, ...] = ()
    layers: bool = False
    dtype: str = "float32"


def choice_of(label: str) -> BlockChoice:
    """Parse a choice such as `keys R=32 m=8 mass=0.95 Q=128 P=128 sinks=1 w=2 worst`.

    Raises:
      ValueError: an unknown word, or a value that `BlockChoice` refuses.
    """
    names = {"R": "coordinates", "m": "samples", "sinks": "sinks", "w": "window"}
    settings: dict[str, Any] = {"rule": "mass", "amount": 1.0}
    blocks = {"Q": 128, "P": 128}
    for word in label.split():
        name, _, value = word.partition("=")
        if word in ESTIMATES:
            settings["estimate"] = word
        elif word == "worst":
            settings["worst"] = True
        elif name in RULES:
            settings |= {"rule": name, "amount": float(value)}
        elif name in blocks:
            blocks[name] = int(value)
        elif name in names:
            settings[names[name]] = int(value)
        else:
            raise ValueError(f"choice={label!r}: unknown word {word!r}; see `choice_of` for the syntax")
    return BlockChoice(**settings, blocks=(blocks["Q"], blocks["P"]))


class DocumentResult(NamedTuple):
    """Results of one document.

    Attributes:
      nll: nats of each token of the context except the first.
      answers: answers by way of reading and by task.
      counts: blocks that each block of queries attended to, [L, K, nq].
    """

    nll: np.ndarray
    answers: dict[str, dict[str, list[tuple[Answer, ...]]]]
    counts: np.ndarray


class BlockBench(Bench):
    """Networks by choice, their documents, and the rows so far."""

    options: BlockOptions

    def documents(self) -> tuple[TaskDocument, ...]:
        """Draw the documents of the first context from the split."""
        options = self.options
        drawn = draw(
            self.checkpoint,
            options.corpus,
            options.split,
            context=options.contexts[0],
            windows=0,
            documents=options.documents,
            seed=options.seed,
        )
        return drawn.documents

    def by_lists(self, choice: BlockChoice | None) -> Transformer:
        """Return the model in its basis, read by lists; the unmodified one without a choice."""
        plan = replace(CompressionPlan.full(self.config), rotated=choice is not None)
        blocks = choice.blocks if choice else ListedBlocks.blocks
        return self.network(Varied.of(plan, partial(ListedBlocks, choice=choice, blocks=blocks)))

    def results(
        self, choice: BlockChoice | None, documents: tuple[TaskDocument, ...]
    ) -> list[DocumentResult]:
        """Return results by document, with one thread each."""
        network, context = self.by_lists(choice), self.options.contexts[0]
        with ThreadPoolExecutor(self.options.threads) as pool:
            return list(pool.map(lambda document: result_of(network, document, context), documents))

    def judged(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each choice."""
        documents = self.documents()
        began = time.perf_counter()
        dense = self.results(None, documents)
        print(f"dense: {time.perf_counter() - began:.0f} s", flush=True)
        for label in self.options.choices:
            began = time.perf_counter()
            results = self.results(choice_of(label), documents)
            yield self.row(label, dense, results) | {"seconds": time.perf_counter() - began}

    def row(self, label: str, dense: list[DocumentResult], measured: list[DocumentResult]) -> dict[str, Any]:
        """Return the cost of a choice against the unmodified model, and its density."""
        choice = choice_of(label)
        by_token = np.stack([one.nll - other.nll for one, other in zip(measured, dense, strict=True)])
        difference = by_token.mean(1)
        quarters = np.array_split(by_token, 4, axis=1)
        counts = np.mean([one.counts for one in measured], axis=0)

        def join(results, how, task):
            return [one for each in results for one in each.answers[how][task]]

        tasks = {
            how: {
                task: asdict(retention(join(dense, "all", task), join(measured, how, task)))
                for task in measured[0].answers[how]
            }
            for how in ("lists", "all")
        }
        return {
            "choice": label,
            **self.drawn_from(),
            "documents": len(measured),
            "dense_perplexity": float(np.exp(np.mean([one.nll for one in dense]))),
            "increase_by_quarter": [float(np.expm1(quarter.mean())) for quarter in quarters],
            "increase": float(np.expm1(difference.mean())),
            "interval": bootstrap_interval(difference),
            "increases": np.expm1(difference).tolist(),
            **densities(counts, choice.blocks),
            **extrapolated(counts.mean((0, 1)), choice.blocks),
            "tasks": tasks,
            "counts": np.round(counts, 2).tolist() if self.options.layers else None,
            "commit": commit(),
        }

    def drawn_from(self) -> dict[str, Any]:
        """Return context, split, seed and dtype of a row."""
        options = self.options
        return {
            "context": options.contexts[0],
            "split": options.split,
            "seed": options.seed,
            "dtype": options.dtype,
        }

    def run(self) -> None:
        """Add rows to the JSON file one by one."""

        def key(row):
            return (row["choice"], row["context"], row["split"], row["seed"])

        rows = json.loads(self.path.read_text())["rows"] if self.path.exists() else []
        for row in self.judged():
            rows = [other for other in rows if key(other) != key(row)] + [row]
            self.save_rows(rows)
            print(line(row), flush=True)

    def save_rows(self, rows: list[dict[str, Any]]) -> None:
        """Write the JSON file."""
        basis = {"basis": self.basis_kind, "model": self.checkpoint.fingerprint}
        save(self.path, {"benchmark": self.options.name, **environment(), "config": basis, "rows": rows})


def result_of(network: Transformer, document: TaskDocument, context: int) -> DocumentResult:
    """Read one document by the lists of the network, and its questions by lists and with all blocks."""
    chunks, cache = read(network, document.context[None], context, "cached")
    tokens = jnp.asarray(document.context[None])
    nll = next_token_nll(network.embeddings, jnp.concatenate(chunks, 1), tokens)
    whole = replace(cache, specs=tuple(replace(spec, choice=None) for spec in cache.specs))
    answers = {"all": answers_of(network, whole, document)}
    if whole.specs != cache.specs:
        answers["lists"] = answers_of(network, cache, document)
    counts = np.stack([np.asarray(state.listed[0]) for state in cache.layers])
    queries = cache.specs[0].blocks[0]
    each = np.asarray(nll[0], np.float64)
    return DocumentResult(each, answers, counts[..., : len(document.context) // queries])


def answers_of(
    network: Transformer, cache: KVCache, document: TaskDocument
) -> dict[str, list[tuple[Answer, ...]]]:
    """Answer all questions of a document by task, one at a time to avoid copies of the cache."""

    def width(question):
        return SHORT if len(question.tokens) <= SHORT else QUESTION_TOKENS

    def one(question):
        return answers(network, cache, [question], width=width(question))[0]

    return {task: [tuple(map(one, asked))] for task, asked in document.questions.items()}


def densities(counts: np.ndarray, blocks: tuple[int, int]) -> dict[str, Any]:
    """Return densities from blocks by layer, head and query block, [L, K, nq].

    Densities are shares of the causal blocks: in all, by layer, and for shorter prompts. The result also has
      the mean number of blocks by query block.
    """
    (Q, P), nq = blocks, counts.shape[-1]
    visible = (np.arange(1, nq + 1) * Q - 1) // P + 1

    def share(counts, upto):
        return float(counts[..., :upto].mean((0, 1)).sum() / visible[:upto].sum())

    return {
        "density": share(counts, nq),
        "density_by_length": {n: share(counts, n // Q) for n in LENGTHS if n // Q <= nq},
        "density_by_layer": [round(share(layer[None], nq), 4) for layer in counts],
        "blocks_by_query_block": np.round(counts.mean((0, 1)), 3).tolist(),
    }


def extrapolated(counts: np.ndarray, blocks: tuple[int, int]) -> dict[str, Any]:
    """Predict the density of longer prompts from mean counts [nq].

    The number of listed blocks grows as a power of the position, fitted to the last three quarters of query
    blocks. Measured counts stay; later blocks have n_i = n (i / nq)^exponent, where n is the fitted value of
    the last one. `constant` has exponent 0, and `proportional` has 1.
    """
    (Q, P), nq = blocks, len(counts)
    fitted = np.arange(nq // 4, nq) + 1
    exponent, offset = np.polyfit(np.log(fitted), np.log(counts[fitted - 1]), 1)
    last = np.exp(offset + exponent * np.log(nq))

    def density(tokens: int, exponent: float) -> float:
        i = np.arange(1, tokens // Q + 1)
        visible = (i * Q - 1) // P + 1
        listed = np.concatenate([counts, last * (i[nq:] / nq) ** exponent])
        return float(np.minimum(listed, visible).sum() / visible.sum())

    rules = {"fitted": float(exponent), "constant": 0.0, "proportional": 1.0}
    return {
        "exponent": float(exponent),
        "extrapolated": {
            name: {tokens: density(tokens, power) for tokens in EXTRAPOLATED} for name, power in rules.items()
        },
    }


def line(row: dict[str, Any]) -> str:
    """Return a row in words, with the lowest retention of a task for each way of reading questions."""
    least = {
        how: min((task["retention"], name) for name, task in tasks.items() if task["counts"])
        for how, tasks in row["tasks"].items()
    }
    low, high = (100 * bound for bound in row["interval"])
    return (
        f"{row['choice']:40} {row['context']} density {row['density']:.3f} {100 * row['increase']:+.2f} % "
        f"[{low:+.2f}, {high:+.2f}] {least} {np.round(100 * np.array(row['increase_by_quarter']), 1)} "
        f"({row['seconds']:.0f} s)"
    )


def main(options: BlockOptions) -> None:
    """Measure the choices."""
    BlockBench(options).run()


if __name__ == "__main__":
    main(tyro.cli(BlockOptions))

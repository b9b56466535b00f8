"""What is each part of the method worth? The switches of ZDC §6.5, one at a time, on real arrays.

    python -m benchmarks.bench_ablation --model HF_FOLDER --corpus CORPUS --name ablation-NAME

Perplexity is of held-out text, `over` the paired difference to the row without the switch, times are of the
device. Ranks are written as quarters of the head dim, (Q/K, V); plans have no window unless they say so.

`zo`  compression and decompression at run time instead of inside the weights. At a layer of Llama-2-7B's
      shape (random weights) with both placements of the Q/K basis, and at the model.
`oc`  the basis from the window that it is judged on, as if computed online, instead of from training text;
      and what the decomposition takes: of the stacked rows (the paper's), and of their second moments.
`dt`  one rate for all tokens instead of two classes, at equal bytes; and on a window, which classes keep
      whole beside their segments, so that they take more.
`dl`  the same fraction of important tokens in all groups of layers, and falling, instead of rising.
`lt`  importance by column sums instead of softmax denominators. What both take is in `importance-cost.json`.
"""

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.ablated import Importance, MaskedClasses, OnlineAttention, RestoringAttention, online_network
from benchmarks.bench_generate import LLAMA_2_7B, seconds
from benchmarks.bench_quality import SINKS, Bench, Case
from benchmarks.studies import Options, class_plan, degradation, over, quarters, run_parts, uniform_plan
from benchmarks.timing import costs_in_turns, normal
from zdc_jax.basis import QKKind
from zdc_jax.config import LayerSpec
from zdc_jax.evaluation.perplexity import window_nll
from zdc_jax.loading import LanguageModel
from zdc_jax.model.params import layer_shapes, random_tree
from zdc_jax.model.transformer import Block, Transformer
from zdc_jax.ops.attention import self_attention

LAYER_SHAPE = LLAMA_2_7B
LAYER_TOKENS = 8192
WINDOW = 128
FRACTIONS = {"same": (0.5, 0.5, 0.5), "rising": (0.25, 0.5, 0.75), "falling": (0.75, 0.5, 0.25)}
Kinds = {"online": OnlineAttention, "online, keys and values restored": RestoringAttention}


def zero_overhead(bench: Bench) -> dict[str, Any]:
    """/ZO: perplexity and cost at the model, cost at one large layer."""
    plan = uniform_plan(bench.config, 2, 3)
    models = {"product": bench.model(plan, bench.bases["balanced"])}
    for label, kind in Kinds.items():
        args = bench.dense.network, bench.layers, plan, bench.bases["balanced"], kind
        models[label] = LanguageModel(online_network(*args), None, bench.bases["balanced"])
    rows = [bench.run(Case("zo", label, "balanced", plan), model) for label, model in models.items()]
    tokens = jnp.asarray(bench.heldout[: bench.options.batch])

    def prefill(network: Transformer, tokens: jax.Array) -> jax.Array:
        return network.hidden(tokens)

    networks = {"dense": bench.dense.network} | {label: model.network for label, model in models.items()}
    costs = costs_in_turns({label: (prefill, (network, tokens)) for label, network in networks.items()})
    layer = {name: costs_of_layer(rope=name == "post_rope") for name in ("folded", "post_rope")}
    for where, found in {"model": costs, **layer}.items():
        show(where, found, "product")
    return {"rows": [rows[0], *(over(row, rows[0]) for row in rows[1:])], "model": costs, "layer": layer}


def costs_of_layer(*, rope: bool) -> dict[str, Any]:
    """Time and memory of a prefill through one layer of `LAYER_SHAPE`; random values.

    Without `rope` the Q/K basis is inside the weights, with it it is applied after the rotary embedding.
    """
    spec = LAYER_SHAPE.layers[0] if rope else LayerSpec()
    config = replace(LAYER_SHAPE, layers=(spec,))
    D, K, H = config.embed_dim, config.num_kv_heads, config.head_dim
    ranks, bf16 = quarters(config, 2, 3), jnp.bfloat16
    weights = random_tree(layer_shapes(config, 0), config, jax.random.key(0))
    maps = jnp.linalg.qr(jax.random.normal(jax.random.key(1), (K, H, H)))[0].astype(bf16)
    qk, v, o = maps[..., : ranks.qk], maps[..., : ranks.v], maps[:, : ranks.v]
    dense = weights["attention"]
    cut = {"v": dense["v"][..., : ranks.v], "o": dense["o"][:, : ranks.v]}
    if rope:
        rotation = qk.astype(jnp.float16)  # As `zdc_jax.fold` stores them.
        cut |= {"q": dense["q"], "k": dense["k"], "q_rotation": rotation, "k_rotation": rotation}
    else:
        cut |= {"q": dense["q"][..., : ranks.qk], "k": dense["k"][..., : ranks.qk]}
    blocks = {
        "dense": Block(weights, config, spec),
        "product": Block({**weights, "attention": cut}, config, spec),
    }
    for label, kind in Kinds.items():
        blocks[label] = Block(weights, config, spec)
        named = {"q_map": qk, "k_map": qk, "v_map": v, "o_map": o}
        blocks[label].attention = kind(dense, config, 0, named)

    def prefill(block: Block, x: jax.Array) -> jax.Array:
        def attend(q, k, v):
            return self_attention(q, k, v, scale=block.attention.scale)

        return block(x, jnp.arange(x.shape[1])[None], attend)[0]

    x = normal(2, 1, LAYER_TOKENS, D)
    return costs_in_turns({label: (prefill, (block, x)) for label, block in blocks.items()})


def show(where: str, costs: dict[str, Any], base: str) -> None:
    """Prints what each program takes, and how much more than `base`."""
    for label, cost in costs.items():
        ms = [float(np.median(each["ms"])) if each["ms"] else float("nan") for each in (cost, costs[base])]
        more = cost["peak_bytes"] - costs[base]["peak_bytes"]
        print(f"    {where:10} {label:34} {ms[0]:8.3f} ms {100 * (ms[0] / ms[1] - 1):+6.1f} % "
              f"{cost['peak_bytes'] / 2**20:9.1f} MiB {more / 2**20:+8.1f}", flush=True)  # fmt: skip


def offline_basis(bench: Bench) -> dict[str, Any]:
    """/OC: perplexity with each window's own basis, and seconds of the decomposition of one large layer.

    The window's own basis has seen the very text, future included, that its perplexity is of.
    """
    plan, kinds = uniform_plan(bench.config, 2, 3), ("stacked", "balanced")
    rows = []
    nll: dict[QKKind, list[float]] = {kind: [] for kind in kinds}
    for window in bench.heldout:
        own = window[None]
        moments = bench.collect(own)
        for kind in kinds:
            model = bench.model(plan, bench.make_basis(moments, qk=kind, vo=kind))
            nll[kind].append(window_nll(model.network, own)[0])
    for kind in kinds:
        offline = bench.run(Case("oc", f"offline, {kind}", kind, plan))
        increase = np.array(nll[kind]) - bench.dense_nll
        online = {
            "group": "oc",
            "label": f"online, {kind}",
            **degradation(np.array(nll[kind]), bench.dense_nll),
            "window_increases": np.expm1(increase).tolist(),
        }
        print(f"oc         {online['label']:45} {100 * online['increase']:+.2f} %", flush=True)
        rows += [offline, over(online, offline)]
    return {"rows": rows, "layer_seconds": decomposition_seconds(), "tokens": LAYER_TOKENS}


def decomposition_seconds() -> dict[str, list[float]]:
    """Seconds for all heads of a layer of `LAYER_SHAPE`, by wall clock: the solver waits for the host."""
    config = LAYER_SHAPE
    T, K, H, D = LAYER_TOKENS, config.num_kv_heads, config.head_dim, config.embed_dim
    qk = normal(0, K, 2 * T, H, dtype=jnp.float32)
    vo = normal(1, K, T + D, H, dtype=jnp.float32)

    def singular(x: jax.Array) -> jax.Array:
        return jnp.linalg.svd(x, full_matrices=False)[2]

    gram = partial(jnp.einsum, "KPH,KPI->KHI", precision="highest")
    found = {}
    for label, solve in (
        ("svd of rows", singular),
        ("eigh of moments", lambda x: jnp.linalg.eigh(gram(x, x))[1]),
    ):
        both = jax.jit(lambda qk, vo, solve=solve: (solve(qk), solve(vo)))
        found[label] = [seconds(lambda both=both: both(qk, vo)) for _ in range(4)][1:]
        print(f"    {label:24} {1e3 * np.median(found[label]):9.1f} ms a layer", flush=True)
    return found


def token_classes(bench: Bench) -> dict[str, Any]:
    """/DT: classes against one rate for all tokens, without and with a window."""
    rows = []
    for near in ({}, {"window": WINDOW, "sinks": SINKS}):
        name = f", window {WINDOW}" if near else ""
        plan = class_plan(bench.config, FRACTIONS["same"], **near)
        classes = bench.run(Case("dt", f"classes{name}", "balanced", plan))
        alike = bench.run(Case("dt", f"one rate{name}", "balanced", uniform_plan(bench.config, 2, 3, **near)))
        rows += [classes, over(alike, classes)]
    return {"rows": rows}


def layer_fractions(bench: Bench) -> dict[str, Any]:
    """/DL: fractions of important tokens by depth, at equal bytes."""
    rows = {}
    for name, fraction in FRACTIONS.items():
        plan = class_plan(bench.config, fraction)
        rows[name] = bench.run(Case("dl", name, "balanced", plan, {"fraction": fraction}))
    rising = rows.pop("rising")
    return {"rows": [rising, *(over(row, rising) for row in rows.values())]}


def lightweight_importance(bench: Bench) -> dict[str, Any]:
    """/LT: the product, and the same plan with zeros in place of what is dropped (`MaskedClasses`).

    Its row with denominators tells how far the zeros are from the product.
    """
    plan = class_plan(bench.config, FRACTIONS["same"])
    model = bench.model(plan, bench.bases["balanced"])
    product = bench.run(Case("lt", "product: denominator", "balanced", plan), model)
    rows = {}
    for way in (name for kind in get_args(Importance) for name in (get_args(kind) or (kind,))):
        masked = LanguageModel(MaskedClasses(model.network, way), None, model.basis)
        case = Case("lt", f"masked: {way}", "balanced", plan, {"masked": True})
        rows[way] = bench.run(case, masked)
    base = rows.pop("denominator")
    others = [over(row, base) for row in rows.values()]
    return {"rows": [product, over(base, product), *others], "times": "importance-cost.json"}


PARTS = {
    "zo": zero_overhead,
    "oc": offline_basis,
    "dt": token_classes,
    "dl": layer_fractions,
    "lt": lightweight_importance,
}

if __name__ == "__main__":
    run_parts(tyro.cli(Options, description=__doc__), PARTS, None)

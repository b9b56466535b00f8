"""Which codes lose least, and which choice of what is read? A study of `coded`, the same in all layers.

    python -m benchmarks.quality.coding --model CONVERTED --corpus CORPUS --name coding-smollm2-135m

Parts: `bases` is run with several calibrations; `codes` and `near` read everything; `choice` and `growth`
read few far tokens; `tokens` gives important ones more bits. What no method has is rounded as it would be
(`benchmarks.quality.study_caches`). Variants of searched plans are measured with `--plans`.
Text is `CORPUS/<topic>/train.txt.xz`: what is chosen by it must be judged on other text.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import tyro

from benchmarks.quality import study_caches as study
from benchmarks.quality.equal_bytes import Bench, Cell, Options
from benchmarks.quality.plans import method_plan
from zdc_jax import methods
from zdc_jax.cache.coded_store import CodedStore
from zdc_jax.cache.codes import Code
from zdc_jax.cache.fitted_integers import FittedIntegers
from zdc_jax.cache.gaussian_codes import Gaussian
from zdc_jax.cache.integer_codes import TokenIntegers
from zdc_jax.config import ModelConfig
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan

ALL: dict[str, Any] = {"read": 0, "index": 0}
WINDOW = 64
Named = Iterator[tuple[str, CompressionPlan]]


@dataclass(frozen=True)
class StudyOptions(Options):
    """parts: those to measure (default all, and none where there are `plans`)."""

    parts: tuple[str, ...] = ()


def coded(config: ModelConfig, *, window: int = WINDOW, **settings: Any) -> CompressionPlan:
    """All coordinates of all layers, by method `coded`."""
    H = config.head_dim
    return method_plan(config, "coded", ranks=(H, H), window=window, **settings)


def stored(
    config: ModelConfig, key: Code, value: Code | None = None, blocks: tuple[int, ...] | None = None
) -> CompressionPlan:
    """Everything read, keys and values in these codes, after turns of these blocks of keys."""
    cache = partial(CodedStore, key_code=key, value_code=value or key)
    H = config.head_dim
    return study.Varied.of(coded(config, **ALL), cache, None if blocks is None else (blocks, (H,)))


def bases(config: ModelConfig) -> Named:
    """Keys alone, values alone and the choice alone in few bits: run with several calibrations."""
    for k, v in ((2, 8), (3, 8), (4, 8), (8, 2), (8, 3)):
        yield f"keys {k}, values {v} bits", coded(config, bits_k=k, bits_v=v, **ALL)
    eight = {"bits_k": 8, "bits_v": 8, "bits_index": 8, "read": 128}
    for index in (8, 16):
        yield f"index {index}, read 128, all in 8 bits", coded(config, index=index, **eight)


def codes(config: ModelConfig) -> Named:
    """Bits, turns, levels and scales."""
    H, four = config.head_dim, Gaussian(4)
    for k, v in ((8, 8), (8, 4), (4, 8), (4, 4), (4, 3), (3, 4), (3, 3), (4, 2), (3, 2), (2, 2)):
        yield f"keys {k}, values {v} bits", coded(config, bits_k=k, bits_v=v, **ALL)
    yield "not turned", study.Varied.of(coded(config, **ALL), _store(four), ((), ()))
    prefixes = (
        (16, 4, 4),
        (32, 4, 4),
        (16, 8, 3),
        (16, 4, 3),
        (8, 8, 4),
        (16, 4, 2),
        (32, 4, 2),
        (16, 3, 2),
        (32, 3, 2),
    )
    for index, bits, rest in prefixes:
        parts = study.parts((index, Gaussian(bits)), (H - index, Gaussian(rest)))
        blocks = index, H - index
        yield f"first {index} at {bits} bits, the rest at {rest}", stored(config, parts, four, blocks)
    sixteen = (16,) * (H // 16)
    yield (
        "blocks of 16, a scale each",
        stored(config, study.parts(*((16, four) for _ in sixteen)), four, sixteen),
    )
    yield "blocks of 16, one scale", stored(config, four, four, sixteen)
    yield "two scales", stored(config, study.parts((H // 2, four), (H // 2, four)))
    for name, group in (("one scale", H), ("groups of 32", 32)):
        yield f"integers, {name}", stored(config, TokenIntegers(4, group))
    yield "best levels for a Gaussian", stored(config, four)
    yield "scale a power of two", stored(config, study.PowerOfTwoScale(4))


def near(config: ModelConfig) -> Named:
    """Windows, and their bits."""
    for window in (16, 128, 256, 512):
        yield f"window {window}", coded(config, window=window, **ALL)
    for window in (64, 256):
        cache = partial(study.RoundedNear, key_code=Gaussian(4), value_code=Gaussian(4))
        yield f"window {window} in 8 bits", study.Varied.of(coded(config, window=window, **ALL), cache)


def choice(config: ModelConfig) -> Named:
    """By how many coordinates, how many tokens, in what pages, by whom."""
    for index in (8, 16, 24, 32):
        for read in (64, 128, 256, 512):
            yield f"index {index}, read {read}", coded(config, index=index, read=read)
    for bits in (2, 3, 8):
        yield f"index of {bits} bits", coded(config, bits_index=bits)
    for page in (8, 16, 32):
        yield f"pages of {page}", coded(config, page=page)
        yield f"pages of {page}, read 512", coded(config, page=page, read=512)
        yield f"pages of {page} by the best token", _chosen(config, study.BestTokenOfPage, page=page)
    yield "a layer's choice", _chosen(config, study.LayerChoice)
    group = config.group_size

    def heads(**shape):
        return study.HeadChoice(**shape | {"num_kv_heads": shape["num_kv_heads"] * group, "group": group})

    yield "a head's choice", _chosen(config, heads)
    yield "all mass", _chosen(config, study.WholeMass)
    yield "a copied index", _chosen(config, study.CopiedIndex, blocks=((config.head_dim,),) * 2)
    for every in (2, 3, 6):
        yield f"{every} layers share a choice", _shared(config, every)


def growth(config: ModelConfig) -> Named:
    """How many must be read at each context: run with several `contexts`."""
    for read in (64, 128, 256, 512, 1024):
        for index in (16, 32):
            yield f"index {index}, read {read}", coded(config, index=index, read=read)


def tokens(config: ModelConfig) -> Named:
    """More bits for important tokens, at three bits in the mean; run with the protocol `exact`."""
    yield "all at 3 bits", coded(config, bits_k=3, bits_v=3, **ALL)
    for by in ("denominators", "received"):
        for share, more, less in ((1 / 2, 4, 2), (1 / 6, 8, 2)):
            cache = partial(
                study.ImportantBits,
                key_code=FittedIntegers(8),
                value_code=FittedIntegers(8),
                share=share,
                by=by,
                more=FittedIntegers(more),
                less=FittedIntegers(less),
            )
            label = f"{share:.0%} of tokens at {more} bits, the rest at {less}, by {by}"
            yield label, study.Varied.of(coded(config, **ALL), cache)


PARTS: dict[str, Callable[[ModelConfig], Named]] = {
    "bases": bases,
    "codes": codes,
    "near": near,
    "choice": choice,
    "growth": growth,
    "tokens": tokens,
}


def _store(code: Code) -> Callable[..., CodedStore]:
    return partial(CodedStore, key_code=code, value_code=code)


def _chosen(
    config: ModelConfig, cache: Callable[..., Any], page: int = 1, blocks: methods.Rotations | None = None
) -> CompressionPlan:
    """The default choice by a cache of the study's."""
    own, four = methods.named("coded").Settings(page=page), FittedIntegers(4)
    made = partial(
        cache, index=own.index, read=own.read, page=page, index_code=four, key_code=four, value_code=four
    )
    return study.Varied.of(coded(config, page=page), made, blocks)


def _shared(config: ModelConfig, every: int) -> CompressionPlan:
    """Of so many consecutive layers the first chooses."""
    plan = coded(config)
    follows = replace(plan.settings, index=0)
    layers = (
        ranks if index % every == 0 else replace(ranks, settings=follows)
        for index, ranks in enumerate(plan.layers)
    )
    return replace(plan, layers=tuple(layers))


class StudyBench(Bench):
    """Cells of the parts; nothing is judged on what the report is judged on."""

    split: ClassVar[str] = "train"
    options: StudyOptions

    def measure(self, cell: Cell, network: Transformer | None = None) -> dict[str, Any]:
        """One row, which says whether its bytes are those of a cache that a method has."""
        return super().measure(cell, network) | {"simulated": isinstance(cell.plan, study.Varied)}

    def cells(self) -> Iterator[Cell]:
        """At one context after another."""
        wanted = self.options.parts or (() if self.options.plans else tuple(PARTS))
        if unknown := set(wanted) - PARTS.keys():
            raise SystemExit(f"parts={sorted(unknown)} must be of {sorted(PARTS)}")
        for context in self.options.contexts:
            for part in wanted:
                name = f"{part} ({self.basis_kind})" if part == "bases" else part
                for label, plan in PARTS[part](self.config):
                    for protocol in self.options.protocols:
                        yield Cell(f"{name}: {label}", None, plan, context, protocol)
            yield from self.of_plans(context, "searched: ")


def main(options: StudyOptions) -> None:
    """Measures the cells and writes one JSON."""
    bench = StudyBench(options)
    bench.run()
    print(bench.path)


if __name__ == "__main__":
    main(tyro.cli(StudyOptions))

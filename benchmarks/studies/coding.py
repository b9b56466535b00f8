"""Study of codes for keys and values, and of choices of the tokens to read; the same settings in all layers.

    python -m benchmarks.studies.coding --model CONVERTED --corpus CORPUS --name coding-smollm2-135m

`bases` is run with several calibrations. `codes` and `near` read all tokens; `choice` and `growth` read few
older tokens; `tokens` gives important tokens more bits. Codes that no method has are simulated: values are
rounded, and their bytes are not real. Scales of fewer bits are stored in 16 bits. A choice by each query head
copies keys and values. `--plans` measures variants of searched plans. The text is
`CORPUS/<topic>/train.txt.xz`, so a setting chosen here must be judged on other text.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
import tyro
from jax.nn import logsumexp

from benchmarks.quality.equal_bytes import Bench, Cell, Options
from benchmarks.quality.plans import method_plan
from zdc_jax import methods
from zdc_jax.axes import Array
from zdc_jax.cache.codes.code import SCALE_DTYPE, Code, Coded, Int8, Split, pack
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.codes.gaussian import Gaussian, nearest_levels, turn
from zdc_jax.cache.codes.integers import TokenIntegers
from zdc_jax.cache.specs.choosing import FarTokens
from zdc_jax.cache.specs.coded_choosing import CodedChoosing, put_coded
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.near_far import NearFarState
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.spec import Attended, Call, LayerCacheSpec, NewTokens
from zdc_jax.config import ModelConfig
from zdc_jax.methods import layer_shape
from zdc_jax.model.transformer import Transformer
from zdc_jax.ops.attention import Implementation
from zdc_jax.ops.importance import received_attention, token_importance
from zdc_jax.ops.new_keys import NewKeys
from zdc_jax.ops.xla import by_query_blocks, query_block
from zdc_jax.plan import CompressionPlan
from zdc_jax.planned_layers import Rotations


@dataclass(frozen=True)
class Varied(CompressionPlan):
    """A plan whose layers have caches `cache(**layer_shape)`, with transforms of `blocks` folded in."""

    cache: Callable[..., LayerCacheSpec] = PrefixRing
    blocks: Rotations | None = None

    @classmethod
    def of(
        cls, plan: CompressionPlan, cache: Callable[..., LayerCacheSpec], blocks: Rotations | None = None
    ) -> "Varied":
        """Return such a variant of `plan`; without `blocks` the transforms are its own."""
        return cls(**vars(plan), cache=cache, blocks=blocks)

    def layer_caches(self, dtype: str) -> tuple[LayerCacheSpec, ...]:
        shapes = [layer_shape(self, dtype, index) for index in range(len(self.layers))]
        return tuple((self.cache if shape["R"] else PrefixRing)(**shape) for shape in shapes)

    def rotations(self, layer: int) -> Rotations:
        return super().rotations(layer) if self.blocks is None else self.blocks

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the plan without the variant, which the label of the row names."""
        own = CompressionPlan.__dataclass_fields__
        return CompressionPlan(**{name: getattr(self, name) for name in own}).to_json()


def split_code(*each: tuple[int, Code]) -> Code:
    """Return a code with parts of consecutive coordinates, (coordinates, code) each."""
    (width, code), *others = each
    return Split(width, code, split_code(*others)) if others else code


@dataclass(frozen=True)
class PowerOfTwoScale(Gaussian):
    """`Gaussian` code whose scale is √2 times the next power of two below a token's RMS."""

    def encode(self, x: Array) -> Coded:
        x = x.astype(jnp.float32)
        size = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True))
        _, exponent = jnp.frexp(jnp.maximum(size, jnp.finfo(jnp.float32).tiny))
        coarse = jnp.ldexp(2**-0.5, exponent)
        return pack(nearest_levels(x / coarse, self.bits), self.bits), coarse.astype(SCALE_DTYPE)


@dataclass(frozen=True, kw_only=True)
class BestTokenOfPage(CodedChoosing):
    """Choice of pages by their best token instead of the sum."""

    def of_pages(self, scores: Array) -> Array:
        return scores.max(-1)


@dataclass(frozen=True, kw_only=True)
class LayerChoice(CodedChoosing):
    """Choice of tokens shared by all heads of a layer."""

    def probabilities(self, far: FarTokens, q: Array, positions: Array, call: Call) -> Array:
        of_heads = super().probabilities(far, q, positions, call)
        return jnp.broadcast_to(logsumexp(of_heads, axis=2, keepdims=True), of_heads.shape)


@dataclass(frozen=True, kw_only=True)
class HeadChoice(CodedChoosing):
    """Choice of tokens by each query head, from copies of its KV head.

    `num_kv_heads` is the number of query heads; the ring keeps the KV heads.

    Attributes:
      group: query heads of a KV head.
    """

    group: int

    @property
    def near(self) -> PrefixRing:
        return replace(super().near, num_kv_heads=self.num_kv_heads // self.group)

    def write_far(self, state: NearFarState, new: NewTokens) -> FarTokens:
        keys, v = (jnp.repeat(x, self.group, axis=2) for x in (new.k.keys, new.v))
        return super().write_far(state, replace(new, k=NewKeys(keys), v=v))


@dataclass(frozen=True, kw_only=True)
class WholeMass(CodedChoosing):
    """Choice whose tokens have the weight of all older ones, estimated by the index."""

    def attend_far(self, far: FarTokens, q: Array, positions: Array, call: Call) -> tuple[Array, Array]:
        o, lse = super().attend_far(far, q, positions, call)

        def mass(q: Array, positions: Array) -> Array:
            heads = q.reshape(*q.shape[:2], self.num_kv_heads, -1, q.shape[-1])
            scores = self.page_scores(far, heads, call)
            is_far = self._is_far(jnp.arange(scores.shape[-1]), positions[:, :, None, None, None])
            total = logsumexp(jnp.where(is_far, scores, -jnp.inf), axis=-1)
            return total.reshape(*total.shape[:2], -1)

        block = query_block(q.shape[0] * q.shape[2] * self.capacity(far), q.shape[1])
        of_all = by_query_blocks(mass, block, q, positions).swapaxes(1, 2)
        return o, jnp.where(jnp.isneginf(lse), lse, jnp.maximum(lse, of_all))


@dataclass(frozen=True, kw_only=True)
class CopiedIndex(CodedChoosing):
    """Choice by a copy of the index, stored in addition to keys transformed over all R coordinates.

    Weights transform all coordinates of q and k together, so the index is transformed back here.
    """

    def create_far(self, batch: int, capacity: int) -> FarTokens:
        far = super().create_far(batch, capacity)
        return far._replace(k=self._whole.create_far(batch, capacity).k)

    def write_far(self, state: NearFarState, new: NewTokens) -> FarTokens:
        whole = self._whole.write_far(state, new)
        index = self._index_of(new.k.keys)[..., : self.index]
        put = partial(put_coded, positions=new.positions, end=new.end)
        return whole._replace(index=put(state.far.index, self.index_code, index))

    def all_rows(self, far: FarTokens) -> tuple[Array, Array]:
        return self._whole.all_rows(far._replace(index=()))

    def page_scores(self, far: FarTokens, q: Array, call: Call) -> Array:
        return super().page_scores(far, self._index_of(q), call)

    @property
    def _whole(self) -> CodedChoosing:
        """The same store without an index."""
        own = {each.name: getattr(self, each.name) for each in fields(CodedChoosing)}
        return CodedChoosing(**own | {"index": 0})

    def _index_of(self, x: Array) -> Array:
        return x[..., : self.R] @ jnp.asarray(turn(self.R).T, x.dtype)


@dataclass(frozen=True, kw_only=True)
class RoundedNear(CodedStore):
    """Store whose recent tokens have 8 bits; the ring stores their rounded values."""

    def project(
        self, attention: Any, x: Array, positions: Array, implementation: Implementation | None
    ) -> tuple[Array, NewKeys, Array]:
        """Leave keys unrounded; they are rounded after the transform."""
        return attention.project(x, positions, implementation)

    def write(self, state: NearFarState, new: NewTokens) -> NearFarState:
        return super().write(state, _round_tokens(new))

    def attend(self, state: NearFarState, q: Array, new: NewTokens, *rest: Any) -> Attended:
        return super().attend(state, q, _round_tokens(new), *rest)


@dataclass(frozen=True, kw_only=True)
class ImportantBits(CodedStore):
    """Store that gives the most important tokens of an exact prompt more bits.

    Values are rounded to both codes, and stored in the 8 bits of the store's own code.

    Attributes:
      share: share of important tokens.
      by: importance by `denominators` of the softmax (ZDC §5.2), or by attention `received` (ZipCache, MiKV).
      more: code of important tokens.
      less: code of the others.
    """

    share: float
    by: str
    more: Code
    less: Code

    def keep_prompt(self, q: Array, new: NewTokens, lse: Array, capacity: int, call: Call) -> NearFarState:
        keys = new.k.keys
        if self.by == "received":
            weight = received_attention(q, keys, lse, new.positions, scale=call.scale).swapaxes(1, 2)
        else:
            weight = jnp.broadcast_to(token_importance(lse)[..., None], keys.shape[:3])
        weight = jnp.where(new.kept[..., None], weight, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(-weight, axis=1), axis=1)
        important = (rank < self.share * new.end[:, None, None])[..., None]

        def mixed(x, width):
            return jnp.concatenate(
                [
                    jnp.where(
                        important, _through(self.more, x[..., :width]), _through(self.less, x[..., :width])
                    ),
                    x[..., width:],
                ],
                axis=-1,
            ).astype(x.dtype)

        rounded = replace(new, k=NewKeys(mixed(keys, self.R)), v=mixed(new.v, self.Z))
        far = super().keep_prompt(q, rounded, lse, capacity, call).far
        return NearFarState(super().keep_prompt(q, new, lse, capacity, call).near, far)


def _through(code: Code, x: Array) -> Array:
    """Return vectors rounded to a code of single tokens."""
    return code.decode(code.encode(x[..., None, :]), x.shape[-1])[..., 0, :]


def _round_tokens(new: NewTokens) -> NewTokens:
    """Return tokens whose keys and values have 8 bits."""
    keys, values = (_through(Int8(), x).astype(x.dtype) for x in (new.k.keys, new.v))
    return replace(new, k=new.k._replace(keys=keys), v=values)


ALL: dict[str, Any] = {"read": 0, "index": 0}
WINDOW = 64
Named = Iterator[tuple[str, CompressionPlan]]


@dataclass(frozen=True)
class StudyOptions(Options):
    """Options of the study.

    Attributes:
      parts: parts to measure, all by default; none by default with `plans`.
    """

    parts: tuple[str, ...] = ()


CHOICE = {"bits_k": 4, "bits_v": 4, "bits_index": 4, "index": 16, "read": 256}
"""Settings of this study unless a row names others."""


def coded(config: ModelConfig, *, window: int = WINDOW, **settings: Any) -> CompressionPlan:
    """Return a plan of method `coded` with all coordinates of all layers."""
    H = config.head_dim
    return method_plan(config, "coded", ranks=(H, H), window=window, **CHOICE | settings)


def stored(
    config: ModelConfig, key: Code, value: Code | None = None, blocks: tuple[int, ...] | None = None
) -> CompressionPlan:
    """Return a plan that reads all tokens, with these codes and with transforms of these blocks of keys."""
    cache = partial(CodedStore, key_code=key, value_code=value or key)
    H = config.head_dim
    return Varied.of(coded(config, **ALL), cache, None if blocks is None else (blocks, (H,)))


def bases(config: ModelConfig) -> Named:
    """Yield few bits for keys alone, values alone and the index alone; run with several calibrations."""
    for k, v in ((2, 8), (3, 8), (4, 8), (8, 2), (8, 3)):
        yield f"keys {k}, values {v} bits", coded(config, bits_k=k, bits_v=v, **ALL)
    eight = {"bits_k": 8, "bits_v": 8, "bits_index": 8, "read": 128}
    for index in (8, 16):
        yield f"index {index}, read 128, all in 8 bits", coded(config, index=index, **eight)


def codes(config: ModelConfig) -> Named:
    """Yield bits, transforms, levels and scales."""
    H, four = config.head_dim, Gaussian(4)
    for k, v in ((8, 8), (8, 4), (4, 8), (4, 4), (4, 3), (3, 4), (3, 3), (4, 2), (3, 2), (2, 2)):
        yield f"keys {k}, values {v} bits", coded(config, bits_k=k, bits_v=v, **ALL)
    yield "not turned", Varied.of(coded(config, **ALL), _store(four), ((), ()))
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
        key = split_code((index, Gaussian(bits)), (H - index, Gaussian(rest)))
        blocks = index, H - index
        yield f"first {index} at {bits} bits, the rest at {rest}", stored(config, key, four, blocks)
    sixteen = (16,) * (H // 16)
    yield (
        "blocks of 16, a scale each",
        stored(config, split_code(*((16, four) for _ in sixteen)), four, sixteen),
    )
    yield "blocks of 16, one scale", stored(config, four, four, sixteen)
    yield "two scales", stored(config, split_code((H // 2, four), (H // 2, four)))
    for name, group in (("one scale", H), ("groups of 32", 32)):
        yield f"integers, {name}", stored(config, TokenIntegers(4, group))
    yield "best levels for a Gaussian", stored(config, four)
    yield "scale a power of two", stored(config, PowerOfTwoScale(4))


def near(config: ModelConfig) -> Named:
    """Yield windows, and their bits."""
    for window in (16, 128, 256, 512):
        yield f"window {window}", coded(config, window=window, **ALL)
    for window in (64, 256):
        cache = partial(RoundedNear, key_code=Gaussian(4), value_code=Gaussian(4))
        yield f"window {window} in 8 bits", Varied.of(coded(config, window=window, **ALL), cache)


def choice(config: ModelConfig) -> Named:
    """Yield choices by coordinates of the index, number of tokens, pages, and who chooses."""
    for index in (8, 16, 24, 32):
        for read in (64, 128, 256, 512):
            yield f"index {index}, read {read}", coded(config, index=index, read=read)
    for bits in (2, 3, 8):
        yield f"index of {bits} bits", coded(config, bits_index=bits)
    for page in (8, 16, 32):
        yield f"pages of {page}", coded(config, page=page)
        yield f"pages of {page}, read 512", coded(config, page=page, read=512)
        yield f"pages of {page} by the best token", _chosen(config, BestTokenOfPage, page=page)
    yield "a layer's choice", _chosen(config, LayerChoice)
    group = config.group_size

    def heads(**shape):
        return HeadChoice(**shape | {"num_kv_heads": shape["num_kv_heads"] * group, "group": group})

    yield "a head's choice", _chosen(config, heads)
    yield "all mass", _chosen(config, WholeMass)
    yield "a copied index", _chosen(config, CopiedIndex, blocks=((config.head_dim,),) * 2)
    for every in (2, 3, 6):
        yield f"{every} layers share a choice", _shared(config, every)


def growth(config: ModelConfig) -> Named:
    """Yield numbers of tokens to read; run with several `contexts`."""
    for read in (64, 128, 256, 512, 1024):
        for index in (16, 32):
            yield f"index {index}, read {read}", coded(config, index=index, read=read)


def tokens(config: ModelConfig) -> Named:
    """Yield more bits for important tokens, 3 bits on average; run with the protocol `exact`."""
    yield "all at 3 bits", coded(config, bits_k=3, bits_v=3, **ALL)
    for by in ("denominators", "received"):
        for share, more, less in ((1 / 2, 4, 2), (1 / 6, 8, 2)):
            cache = partial(
                ImportantBits,
                key_code=FittedIntegers(8),
                value_code=FittedIntegers(8),
                share=share,
                by=by,
                more=FittedIntegers(more),
                less=FittedIntegers(less),
            )
            label = f"{share:.0%} of tokens at {more} bits, the rest at {less}, by {by}"
            yield label, Varied.of(coded(config, **ALL), cache)


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
    config: ModelConfig, cache: Callable[..., Any], page: int = 1, blocks: Rotations | None = None
) -> CompressionPlan:
    """Return the default choice with a cache of this study."""
    own, four = methods.named("coded").Settings(**CHOICE), FittedIntegers(4)
    make = partial(
        cache, index=own.index, read=own.read, page=page, index_code=four, key_code=four, value_code=four
    )
    return Varied.of(coded(config, page=page), make, blocks)


def _shared(config: ModelConfig, every: int) -> CompressionPlan:
    """Return a plan in which one of `every` consecutive layers chooses for all."""
    plan = coded(config)
    follows = replace(plan.settings, index=0)
    layers = (
        ranks if index % every == 0 else replace(ranks, settings=follows)
        for index, ranks in enumerate(plan.layers)
    )
    return replace(plan, layers=tuple(layers))


class StudyBench(Bench):
    """Cells of the parts, judged on training text."""

    split: ClassVar[str] = "train"
    options: StudyOptions

    def measure(self, cell: Cell, network: Transformer | None = None) -> dict[str, Any]:
        """Measure one row, marked `simulated` if its bytes are not real."""
        return super().measure(cell, network) | {"simulated": isinstance(cell.plan, Varied)}

    def cells(self) -> Iterator[Cell]:
        """Yield cells, context by context."""
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
    """Measure the cells and write one JSON file."""
    bench = StudyBench(options)
    bench.run()
    print(bench.path)


if __name__ == "__main__":
    main(tyro.cli(StudyOptions))

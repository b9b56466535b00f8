"""token_classes: important tokens keep more coordinates than others (ZDC §5.2).

Consecutive layers form groups. The first layer of a group, its leader, stores all tokens alike and orders
them by importance, which is their softmax denominator. In the other layers of the group, the most important
tokens of each block keep as many coordinates as the plan says, and other tokens keep fewer.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.errors import PlanError
from zdc_jax.fields import MOST
from zdc_jax.methods import check_calibrated, check_range, layer_shape
from zdc_jax.methods.token_classes.cache import ClassBlocks, ClassLeader, ClassMember
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method.

    Attributes:
      group: layers of a group with its leader; the last group may have fewer.
      first: share of important tokens in the first group, in (0, 1). Shares are linear between first and
        last.
      last: share of important tokens in the last group, in (0, 1).
      rest_qk: coordinates of keys of the other tokens.
      rest_v: coordinates of values of the other tokens.
      block: positions among which important tokens are chosen.
    """

    reads_exactly: ClassVar[bool] = False

    group: int = 2
    first: float = 0.5
    last: float = 0.5
    rest_qk: int = 16
    rest_v: int = 16
    block: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("group", "rest_qk", "rest_v", "block"):
            check_range(name, getattr(self, name), 1, MOST)
        for name in ("first", "last"):
            if not 0 < (share := getattr(self, name)) < 1:
                raise PlanError(f"{name}={share} must lie strictly between 0 and 1")


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""
    check_calibrated(plan, "token_classes")
    settings = plan.settings
    assert isinstance(settings, Settings)
    groups = -(-len(plan.layers) // settings.group)
    shares = np.linspace(settings.first, settings.last, groups).round(4).tolist()
    specs: list[LayerCacheSpec] = []
    for index, ranks in enumerate(plan.layers):
        if ranks.window is not None or ranks.settings is not None:
            raise PlanError(
                f"layer {index}: method 'token_classes' supports no sliding windows and no settings of "
                "single layers; use method='zdc'"
            )
        blocks = ClassBlocks(settings.block, shares[index // settings.group])
        shape = layer_shape(plan, dtype, index)
        if index % settings.group == 0:
            specs.append(_create_leader(blocks, **shape))
            continue
        for name, rest, rank in (("qk", settings.rest_qk, ranks.qk), ("v", settings.rest_v, ranks.v)):
            if rest != rank and (rest > rank or rest % 16):
                raise PlanError(
                    f"layer {index}: rest_{name}={rest} must be {name}={rank} or a smaller multiple of 16"
                )
        specs.append(_create_member(blocks, (settings.rest_qk, settings.rest_v), **shape))
    return tuple(specs)


@lru_cache(maxsize=256)  # A search counts the bytes of many plans with few distinct layers.
def _create_leader(blocks: ClassBlocks, **shape: Any) -> ClassLeader:
    own = {name: shape[name] for name in ("num_kv_heads", "head_dim", "dtype")}
    return ClassLeader(**own, blocks=blocks, tokens=PrefixRing(**shape))


@lru_cache(maxsize=256)
def _create_member(blocks: ClassBlocks, rest: tuple[int, int], **shape: Any) -> ClassMember:
    own = {name: shape[name] for name in ("num_kv_heads", "head_dim", "dtype")}
    near = PrefixRing(**shape | {"R": 0, "Z": 0})
    return ClassMember(**own, blocks=blocks, near=near, ranks=((shape["R"], shape["Z"]), rest))

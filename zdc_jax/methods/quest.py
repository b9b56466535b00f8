"""quest: read the pages of far tokens with the largest bounds of scores (Tang et al. 2024, arXiv 2406.10774).

The paper reads prompts exactly and does not compress the first two layers. Here every layer with far tokens
chooses, for tokens of a prompt too, unless the prompt is read exactly.
"""

from dataclasses import dataclass
from typing import Any

from zdc_jax.cache.specs.choosing import PageBounds
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.methods import far_layers
from zdc_jax.planned_layers import MethodSettings, PlannedLayers


@dataclass(frozen=True)
class Settings(MethodSettings):
    """Settings of the method. The window must be at least a page.

    Attributes:
      read: far tokens that the queries of a KV head read, a multiple of `page`.
      page: number of consecutive tokens that are chosen together.
    """

    read: int = 256
    page: int = 16


def layer_caches(plan: PlannedLayers, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """Return the specs of all layers under a plan; `dtype` is the model's."""

    def create_spec(settings: Settings, **shape: Any) -> PageBounds:
        return PageBounds(**shape, read=settings.read, page=settings.page)

    return far_layers(plan, dtype, create_spec)

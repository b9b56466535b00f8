"""quest: pages of far tokens chosen by bounds of their scores (Tang et al. 2024, arXiv 2406.10774).

The paper reads prompts exactly and leaves its first two layers whole; here every layer that keeps far tokens
chooses, for tokens of a prompt too, unless it is read exactly.
"""

from dataclasses import dataclass
from functools import partial

from zdc_jax.cache.choosing import PageBounds
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.methods import MethodSettings, far_layers
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class Settings(MethodSettings):
    """read: far tokens that a KV head's queries read, a multiple of `page`; page: tokens chosen together.

    The window must be at least a page.
    """

    read: int = 256
    page: int = 16


def layer_caches(plan: CompressionPlan, dtype: str) -> tuple[LayerCacheSpec, ...]:
    """How each layer keeps its tokens under a plan; `dtype` is the model's."""
    return far_layers(plan, dtype, lambda own: partial(PageBounds, read=own.read, page=own.page))

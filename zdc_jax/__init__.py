"""ZDC-JAX: zero-delay QKV compression for LLM inference with long prompts.

Load a converted folder, compress its KV cache with a plan, and generate text:

    model = zdc_jax.load("converted-folder", plan="plan.json")
    result = zdc_jax.generate(model, ["Once upon a time"], max_new_tokens=64)
"""

from typing import TYPE_CHECKING, Any

from zdc_jax.basis import Basis as Basis
from zdc_jax.cache.kv_cache import KVCache as KVCache
from zdc_jax.checkpoint import Checkpoint as Checkpoint
from zdc_jax.config import ModelConfig as ModelConfig
from zdc_jax.conversation.chat import Conversation as Conversation
from zdc_jax.conversation.chat import chat as chat
from zdc_jax.conversation.prompt import chat_prompt as chat_prompt
from zdc_jax.conversation.prompt import chat_stop_tokens as chat_stop_tokens
from zdc_jax.errors import ZDCError as ZDCError
from zdc_jax.generation.api import generate as generate
from zdc_jax.generation.api import stream as stream
from zdc_jax.generation.grammar import Grammar as Grammar
from zdc_jax.generation.results import Completion as Completion
from zdc_jax.generation.results import Delta as Delta
from zdc_jax.generation.results import Generation as Generation
from zdc_jax.generation.sampling import Sampling as Sampling
from zdc_jax.loading import LanguageModel as LanguageModel
from zdc_jax.loading import load as load
from zdc_jax.parallel.mesh import MeshConfig as MeshConfig
from zdc_jax.parallel.processes import initialize as initialize
from zdc_jax.plan import CompressionPlan as CompressionPlan
from zdc_jax.plan import LayerRanks as LayerRanks

if TYPE_CHECKING:
    from zdc_jax.planning.choose import choose_plan as choose_plan


def __getattr__(name: str) -> Any:
    """Import `choose_plan` on first access, so that serving does not load the planning code."""
    if name != "choose_plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zdc_jax.planning.choose import choose_plan

    return choose_plan

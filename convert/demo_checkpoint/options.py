"""Architecture of the demo checkpoint, and options of its training."""

from dataclasses import dataclass, replace
from pathlib import Path

from zdc_jax.config import LayerSpec, ModelConfig, RopeConfig
from zdc_jax.ops.attention import Implementation

TOPICS = (
    "books_gutenberg",
    "code_python",
    "dialogue_oasst",
    "law_dc",
    "math_gsm8k",
    "peps_docs",
    "pubmed_abstracts",
    "speeches_us",
    "web_blog_18f",
)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
EOS_ID = 2
CONFIG = ModelConfig(
    family="llama",
    layers=LayerSpec(rope=RopeConfig(theta=10_000.0)).repeated(6),
    norm="rms",
    embed_dim=256,
    ffn_dim=576,
    vocab_size=4096,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=2048,
    norm_eps=1e-6,
    activation="silu",
    dtype="bfloat16",
    tie_embeddings=True,
    bos_id=1,
    eos_ids=(EOS_ID,),
)


@dataclass(frozen=True)
class Options:
    """Training options."""

    corpus: Path
    """Folder of topics."""
    output: Path
    """Folder to write the checkpoint to."""
    tokens: int = 600_000_000
    """Tokens to train on, all epochs together."""
    minutes: float = 4.5
    """Longest training time, without compilation and evaluation; the learning rate then falls sooner."""
    batch: int = 32
    """Windows in one step."""
    learning_rate: float = 3e-3
    """Highest learning rate."""
    fact_share: float = 0.5
    """Share of windows with facts and questions."""
    answer_weight: float = 4.0
    """Weight of a number in an answer, compared with any other token."""
    attention: Implementation | None = None
    """Implementation of attention: cudnn or xla, which have gradients; default cudnn on a GPU."""
    layers: int = len(CONFIG.layers)
    """Layers of the model; fewer for a trial on a CPU."""
    context: int = CONFIG.max_positions
    """Tokens of a window; fewer for a trial on a CPU."""
    seed: int = 0
    """Seed of the initial weights, the order of windows, and the facts."""

    @property
    def config(self) -> ModelConfig:
        """Architecture."""
        return replace(CONFIG, layers=CONFIG.layers[: self.layers], max_positions=self.context)

    @property
    def steps(self) -> int:
        """Most steps of training."""
        return max(1, self.tokens // (self.batch * self.context))

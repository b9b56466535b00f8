"""What a set of replicas is made of."""

from dataclasses import dataclass, field
from typing import Any

from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import Serving
from zdc_jax.errors import PromptError
from zdc_jax.loading import TextModel, TextSide, load
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class ReplicaSettings:
    """Replicas of one model.

    path: converted folder, the same on all machines. name: what clients call the model. plan: a plan, or the
    path of its JSON. replicas, gpus: how many, and of each. engine: fields of `EngineConfig`. dtype,
    max_positions: as `load` takes them. drain_seconds: for requests under way when a replica is to end.

    Raises:
      PromptError: replicas below 1; engine as `EngineConfig` does.
    """

    path: str
    name: str
    plan: CompressionPlan | str | None = None
    replicas: int = 2
    gpus: float = 0
    engine: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    max_positions: int | None = None
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise PromptError(f"replicas={self.replicas} must be at least 1")
        EngineConfig(**self.engine)

    @property
    def room(self) -> int:
        """Requests that one replica takes at once, running or waiting."""
        config = EngineConfig(**self.engine)
        return config.max_sequences + config.max_waiting

    def new_engine(self) -> Serving:
        """Loads the model."""
        model = load(self.path, self.plan, dtype=self.dtype, max_positions=self.max_positions)
        return Engine(model, EngineConfig(**self.engine))

    def text_side(self) -> tuple[TextModel, int]:
        """What the front needs of the model, and the tokens that the engines serve at most.

        Raises:
          CheckpointError: no converted folder at the path.
          PromptError: a max_model_len above the model's positions.
        """
        model = TextSide.load(self.path, self.max_positions)
        return model, EngineConfig(**self.engine).served_length(model.config.max_positions)

"""Settings of an application with replicas."""

from dataclasses import dataclass, field
from typing import Any

from zdc_jax.engine.engine import Engine, EngineConfig
from zdc_jax.engine.request import Serving
from zdc_jax.errors import PromptError
from zdc_jax.loading import TextModel, TextSide, load
from zdc_jax.plan import CompressionPlan


@dataclass(frozen=True)
class ReplicaSettings:
    """Settings of several replicas of one model.

    Attributes:
      path: converted folder, at the same path on all machines.
      name: name of the model in the API.
      aliases: further names of the model in the API.
      plan: compression plan, or the path of its JSON file; None for no compression.
      replicas: number of replicas.
      gpus: GPUs of each replica.
      engine: fields of `EngineConfig`.
      dtype: dtype to run in, as in `load`.
      max_positions: longest context, as in `load`.
      drain_seconds: seconds that accepted requests have when a replica is shut down.
      api_key_file: file with API keys, one per line, at the same path on all machines.
      allowed_origins: origins of web pages that may read answers; `*` for all.

    Raises:
      PromptError: there is no replica, or the engine's configuration is invalid.
    """

    path: str
    name: str
    aliases: tuple[str, ...] = ()
    plan: CompressionPlan | str | None = None
    replicas: int = 2
    gpus: float = 0
    engine: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    max_positions: int | None = None
    reproducible: bool = False
    drain_seconds: float = 30.0
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise PromptError(f"replicas={self.replicas} must be at least 1")
        EngineConfig(**self.engine)

    @property
    def max_requests(self) -> int:
        """Most running and waiting requests of one replica."""
        return EngineConfig(**self.engine).max_requests

    def new_engine(self) -> Serving:
        """Load the model and start an engine."""
        model = load(
            self.path,
            self.plan,
            dtype=self.dtype,
            max_positions=self.max_positions,
            reproducible=self.reproducible,
        )
        return Engine(model, EngineConfig(**self.engine))

    def text_side(self) -> tuple[TextModel, int]:
        """Load the model without weights; return it with the most tokens of a request.

        Raises:
          CheckpointError: there is no converted folder at the path.
          PromptError: `max_model_len` exceeds the model's positions.
        """
        model = TextSide.load(self.path, self.max_positions)
        return model, EngineConfig(**self.engine).served_length(model.config.max_positions)

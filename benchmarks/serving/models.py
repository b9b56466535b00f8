"""Models to serve: a converted folder, or a large shape with random weights.

Times do not depend on the values of weights. In a larger shape a searched plan keeps the same shares of
layers and of the head dimension (`benchmarks.model.transferred_plans`).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benchmarks.model.models import LLAMA_2_7B, LLAMA_2_13B, LLAMA_3_8B, SINKS, WINDOW, build
from benchmarks.model.transferred_plans import transferred
from zdc_jax import load, methods
from zdc_jax.config import ModelConfig
from zdc_jax.loading import LanguageModel
from zdc_jax.parallel.mesh import MeshConfig
from zdc_jax.plan import CompressionPlan

POSITIONS = 2**17
SHAPES = {
    name: replace(config, max_positions=POSITIONS)
    for name, config in {
        "Llama-2-7B": LLAMA_2_7B,
        "Llama-2-13B": LLAMA_2_13B,
        "Llama-3-8B": LLAMA_3_8B,
    }.items()
}


@dataclass(frozen=True)
class ServedModel:
    """Model to serve.

    Attributes:
      model: a converted folder.
      shape: a shape of `SHAPES` with random weights, instead of a folder.
      plan: a plan file.
      kind: plan of a shape without a file. `coded8` quantizes to 8 bits, as fp8 caches do, in integers that
        kernels read. `near` keeps recent tokens only, so it reads next to nothing of the cache: a bound,
        no model.
      growth: factor on the tokens that a plan reads.
      layers: layers of a shape; fewer for a trial.
      mesh: mesh in the syntax of `MeshConfig.parse`; one device by default.
    """

    model: Path | None = None
    shape: str | None = None
    plan: Path | None = None
    kind: Literal["dense", "window", "coded8", "near"] = "dense"
    growth: float = 1.0
    layers: int | None = None
    mesh: str | None = None

    def load(self) -> LanguageModel:
        """Return the model.

        Raises:
          SystemExit: both or neither of model and shape, or an unknown shape.
          MeshError: an impossible mesh; raised before weights are made.
        """
        if (self.model is None) == (self.shape is None):
            raise SystemExit(f"--model={self.model} and --shape={self.shape}: give exactly one of them")
        if self.model is not None:
            return load(self.model, self.plan, mesh=self.mesh)
        if self.shape not in SHAPES:
            raise SystemExit(f"--shape={self.shape}: unknown shape; it must be one of {tuple(SHAPES)}")
        mesh = None if self.mesh is None else MeshConfig.parse(self.mesh).create()
        config = SHAPES[self.shape]
        config = replace(config, layers=config.layers[: self.layers])
        plan = self._plan_of(config)
        network = build(config, plan, rotated=plan != CompressionPlan.full(config))
        return LanguageModel(network if mesh is None else network.on_mesh(mesh))

    @property
    def name(self) -> str:
        """Name in result files; names of trials say so."""
        plan = self.plan.stem if self.plan else self.kind
        trial = f", {self.layers} layers" if self.layers else ""
        growth = f", growth {self.growth:g}" if self.growth != 1 else ""
        mesh = f", {self.mesh}" if self.mesh else ""
        return f"{self.shape or self.model}, {plan}{trial}{growth}{mesh}"

    def _plan_of(self, config: ModelConfig) -> CompressionPlan:
        if self.plan is not None:
            return transferred(CompressionPlan.load(self.plan), config, self.growth)
        H = config.head_dim
        if self.kind == "window":
            return CompressionPlan.uniform(config, qk=H, v=H // 2, window=WINDOW, sinks=SINKS)
        if self.kind == "near":
            return CompressionPlan.uniform(config, qk=0, v=0, window=WINDOW, sinks=SINKS)
        if self.kind == "coded8":
            settings = methods.settings_from_json("coded", {"bits_k": 8, "bits_v": 8, "index": 0, "read": 0})
            return replace(CompressionPlan.uniform(config, qk=H, v=H), method="coded", settings=settings)
        return CompressionPlan.full(config)


ServedFlags = Annotated[ServedModel, tyro.conf.arg(name="")]
"""`ServedModel` as flags of a benchmark."""

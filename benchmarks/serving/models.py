"""The model that is served: a converted folder, or the shape of a large one with random weights.

Times do not depend on the values of weights. A searched plan of a small model keeps in a shape the same
shares of layers and of the head dim (`benchmarks.model.transferred_plans`); what it reads grows with `growth`.
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
from zdc_jax.parallel.transformer import ShardedTransformer
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
    """model: a converted folder; or shape: of `SHAPES`, random. plan: JSON. kind: of a shape without a plan;
    `coded8` has eight bits, as fp8 caches do, in the integers of `coded`, which kernels read; `near` keeps
    near tokens alone, so that what it reads of the cache is next to nothing: a bound, no model.

    growth: of the tokens that a plan reads. layers: shortens a shape for a trial. mesh: as `MeshConfig.parse`
    takes it, default one device.
    """

    model: Path | None = None
    shape: str | None = None
    plan: Path | None = None
    kind: Literal["dense", "window", "coded8", "near"] = "dense"
    growth: float = 1.0
    layers: int | None = None
    mesh: str | None = None

    def load(self) -> LanguageModel:
        """The model.

        Raises:
          SystemExit: both or neither of model and shape, or a shape that there is not.
          MeshError: a mesh that cannot be; before weights are made.
        """
        if (self.model is None) == (self.shape is None):
            raise SystemExit(f"model={self.model} and shape={self.shape}: one of them must be given")
        if self.model is not None:
            return load(self.model, self.plan, mesh=self.mesh)
        if self.shape not in SHAPES:
            raise SystemExit(f"shape={self.shape} must be one of {tuple(SHAPES)}")
        mesh = None if self.mesh is None else MeshConfig.parse(self.mesh).create()
        config = SHAPES[self.shape]
        config = replace(config, layers=config.layers[: self.layers])
        plan = self._plan_of(config)
        network = build(config, plan, rotated=plan != CompressionPlan.full(config))
        return LanguageModel(network if mesh is None else ShardedTransformer.of(network, mesh))

    @property
    def name(self) -> str:
        """What is served, in words; trials say that they are."""
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
"""`ServedModel` as flags of a benchmark's own."""

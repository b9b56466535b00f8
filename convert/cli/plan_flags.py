"""Flags that describe a plan to `zdc plan`."""

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from convert.cli.flags import list_changed, show_default
from zdc_jax import methods
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.config import ModelConfig
from zdc_jax.errors import CalibrationError, PlanError, foreign_errors_as
from zdc_jax.loading import stored_basis
from zdc_jax.plan import RANK_STEP, CompressionPlan
from zdc_jax.planned_layers import MethodSettings
from zdc_jax.planning.certificate import plan_from_error
from zdc_jax.planning.spectrum import plan_from_spectrum
from zdc_jax.presets import preset_plan


@dataclass(kw_only=True)
class PlanFlags:
    """Description of a plan: a preset, the same rank in every layer, ranks per layer, or a method.

    Attributes:
      preset: Preset to write as a file: 8bit, 4bit or 3bit.
      qk: Coordinates of queries and keys (rank R) to keep in every layer.
      v: Coordinates of values and outputs (rank Z) to keep in every layer.
      budget: Share of the KV coordinates to keep for tokens outside the window, in (0, 1]. Ranks per layer
        come from the calibrated spectrum.
      max_score_error: Largest calibrated relative error of scores and values, in (0, 1). Ranks per layer come
        from the calibrated error certificate.
      window: Recent tokens that keep all coordinates.
      sinks: First tokens of a sequence that keep all coordinates.
      method: Storage of the tokens outside the window; see docs/methods.md. A method keeps all coordinates,
        unless --qk, --v, --budget or --max-score-error chooses ranks. Only loki, oscar, palu, token_classes,
        and coded with an index need a calibrated folder then.
      set: Settings of the method, such as bits=4.
    """

    preset: Annotated[Literal["8bit", "4bit", "3bit"] | None, show_default("none")] = None
    qk: Annotated[int | None, show_default("all")] = None
    v: Annotated[int | None, show_default("all")] = None
    budget: Annotated[float | None, show_default("none")] = None
    max_score_error: Annotated[float | None, show_default("none")] = None
    window: int = 0
    sinks: int = 0
    method: Annotated[str | None, show_default("zdc")] = None
    set: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="[NAME=VALUE [NAME=VALUE ...]]", help_behavior_hint="(default: those of the method)"
        ),
    ] = ()

    def build(self, path: Path) -> CompressionPlan | None:
        """Return the plan for the converted folder at `path`, or None where no flag describes one.

        Raises:
          PlanError: a flag has an impossible value, or flags exclude each other.
          CalibrationError: the plan needs a calibrated basis and the folder has none.
        """
        if self.preset is not None:
            if others := [flag for flag in list_changed(self) if flag != "--preset"]:
                raise PlanError(
                    f"{', '.join(others)}: a preset is a whole plan; drop {', '.join(others)} or --preset"
                )
            try:
                return preset_plan(self.preset, Checkpoint.open(path))
            except (PlanError, CalibrationError) as error:  # Its name is that of another flag.
                raise type(error)(str(error).replace("plan='", "preset='")) from error
        if self.method is None:
            if self.set:
                raise PlanError(f"--set {' '.join(self.set)}: applies to a method only; add --method NAME")
            return self._build_from_ranks(path)
        settings = self._parse_settings(self.method)
        if any(each is not None for each in (self.qk, self.v, self.budget, self.max_score_error)):
            plan = self._build_from_ranks(path)
            assert plan is not None  # A choice of ranks is a plan.
            plan = replace(plan.with_shift(()), method=self.method, settings=settings)
            return _bind_to_basis(plan, Checkpoint.open(path))
        return self._keep_all_coordinates(Checkpoint.open(path), self.method, settings)

    def _keep_all_coordinates(
        self, checkpoint: Checkpoint, method: str, settings: MethodSettings
    ) -> CompressionPlan:
        """Return a plan of a method on all coordinates: the model's own, or calibrated ones if needed."""
        plan = self._make_uniform(checkpoint.config).for_model(checkpoint.fingerprint)
        calibrated = (checkpoint.calibration_path / "basis").exists()
        if not (settings.prefers_basis and calibrated):
            with contextlib.suppress(PlanError):
                return replace(plan, rotated=False, method=method, settings=settings)
        plan = replace(plan, method=method, settings=settings)  # Raises too, unless a basis is missing.
        return _bind_to_basis(plan, checkpoint)

    def _parse_settings(self, method: str) -> MethodSettings:
        if method not in methods.names():
            raise PlanError(f"--method {method}: unknown; must be one of {', '.join(methods.names())}")
        values = {}
        for item in self.set:
            name, equals, value = item.partition("=")
            if not equals:
                raise PlanError(f"--set {item}: must be NAME=VALUE, such as bits=4")
            if name in values:
                raise PlanError(f"--set {item}: {name} is given twice; keep one of them")
            with contextlib.suppress(json.JSONDecodeError):  # Anything else is a word.
                value = json.loads(value)
            values[name] = value
        with foreign_errors_as(PlanError, f"--set {' '.join(self.set)}"):
            return methods.settings_from_json(method, values)

    def _build_from_ranks(self, path: Path) -> CompressionPlan | None:
        is_uniform = self.qk is not None or self.v is not None
        if is_uniform + (self.budget is not None) + (self.max_score_error is not None) > 1:
            raise PlanError("give only one of --qk/--v, --budget, --max-score-error")
        checkpoint = Checkpoint.open(path)
        near = {"window": self.window, "sinks": self.sinks}
        if self.max_score_error is not None:
            plan = plan_from_error(stored_basis(checkpoint), max_score_error=self.max_score_error, **near)
            return plan.within(checkpoint.config)
        if self.budget is not None:
            plan = plan_from_spectrum(stored_basis(checkpoint), budget=self.budget, **near)
            return plan.within(checkpoint.config)
        if not (is_uniform or self.window or self.sinks):
            return None
        return _bind_to_basis(self._make_uniform(checkpoint.config), checkpoint)

    def _make_uniform(self, config: ModelConfig) -> CompressionPlan:
        """Return the plan with the same ranks in all layers; all coordinates by default."""
        qk, v = (config.head_dim if rank is None else rank for rank in (self.qk, self.v))
        if (qk == 0) != (v == 0):
            flag, other = ("--qk", "--v") if qk == 0 else ("--v", "--qk")
            raise PlanError(
                f"{flag} 0: a layer without older keys or values drops these tokens; "
                f"add {other} 0 and --window, or keep at least {RANK_STEP} coordinates"
            )
        return CompressionPlan.uniform(config, qk=qk, v=v, window=self.window, sinks=self.sinks)


def _bind_to_basis(plan: CompressionPlan, checkpoint: Checkpoint) -> CompressionPlan:
    """Return the plan bound to a model and to the basis in its folder."""
    basis = stored_basis(checkpoint)
    return plan.for_model(checkpoint.fingerprint, basis.coordinates_hash, basis.shifted)

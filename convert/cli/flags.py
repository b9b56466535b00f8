"""Flags that several commands share: model, dtype, plan and sampling."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from zdc_jax.config import Dtype
from zdc_jax.errors import PromptError, foreign_errors_as
from zdc_jax.files import load_json
from zdc_jax.generation.grammar import Grammar
from zdc_jax.generation.sampling import Sampling
from zdc_jax.plan import CompressionPlan
from zdc_jax.presets import default_plan, resolve_plan


def show_default(words: str) -> Any:
    """Describe in the help a default that depends on the model or on other flags."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {words})")


def call_with_flags[T](function: Callable[..., T], flags: Any, **others: Any) -> T:
    """Call a function or class with the flags that its parameters name, and with other values."""
    names = signature(function).parameters.keys() & {each.name for each in fields(flags)} - others.keys()
    return function(**{name: getattr(flags, name) for name in names}, **others)


def show_repeated(name: str, hint: str = "required") -> Any:
    """Show a positional argument in the help as repeatable, with a hint when it is required."""
    return tyro.conf.arg(metavar=f"{name} [{name} ...]", help_behavior_hint=f"({hint})")


def list_changed(flags: Any) -> list[str]:
    """Return the flags that differ from their defaults, as a user types them."""
    changed = []
    for flag in fields(flags):
        value = getattr(flags, flag.name)
        if value != flag.default:
            changed.append(f"--{'no-' if value is False else ''}{flag.name.replace('_', '-')}")
    return changed


ModelFolder = Annotated[Positional[Path], tyro.conf.arg(metavar="MODEL")]
"""Positional argument: the folder of a converted model."""
DtypeFlag = Annotated[Dtype | None, show_default("dtype of the stored weights")]
"""Flag: dtype of weights, activations and cache."""
MaxPositionsFlag = Annotated[int | None, show_default("positions in the model's config")]
"""Flag: longest context of the model."""


@dataclass(kw_only=True)
class PlanFlag:
    """The compression plan of a model.

    Attributes:
      plan: Preset, or JSON file of a plan as `zdc plan` writes it. 8bit and 4bit need no calibration, 3bit
        does. small is the plan that `zdc compress` stored in the folder, and none keeps 16 bits.
    """

    plan: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="8bit|4bit|3bit|small|none|PLAN.json",
            help_behavior_hint="(default: small if there is one)",
        ),
    ] = None

    def build(self, path: Path) -> CompressionPlan | None:
        """Return the plan for the converted folder at `path`; None keeps the cache in 16 bits.

        Raises:
          PlanError: there is no such plan, or it does not suit the model.
          CalibrationError: the plan needs a calibrated basis and the folder has none.
        """
        return default_plan(path) if self.plan is None else resolve_plan(self.plan, path)


@dataclass(kw_only=True)
class SamplingFlags:
    """Choice of the next token, for `generate` and `chat`.

    Attributes:
      temperature: Softmax temperature; 0 always takes the most likely token.
      top_k: Sample among this many most likely tokens.
      top_p: Sample among the fewest tokens whose probabilities sum to this value, in (0, 1].
      min_p: Sample among tokens with at least this share of the largest probability, from 0 to 1.
      presence_penalty: Lower the logits of tokens that were generated before, from -2 to 2.
      frequency_penalty: Lower a token's logit each time it is generated, from -2 to 2.
      repetition_penalty: Divide the logits of tokens in the prompt or the answer; 1 for none.
      json_schema: File with a JSON schema that the answer fits.
      regex: Regular expression that the answer matches as a whole.
      seed: Seed of the random choice.
    """

    temperature: float = 0.0
    top_k: Annotated[int | None, show_default("all")] = None
    top_p: Annotated[float | None, show_default("1")] = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: Annotated[Path | None, show_default("none")] = None
    regex: Annotated[str | None, show_default("none")] = None
    seed: int = 0

    def build(self) -> Sampling:
        """Return the sampling parameters.

        Raises:
          PromptError: a value is outside its range, or --json-schema is no file of JSON.
        """
        return call_with_flags(Sampling, self, grammar=self._build_grammar())

    def _build_grammar(self) -> Grammar | None:
        if self.json_schema is not None and self.regex is not None:
            raise PromptError("--json-schema and --regex: an answer has one grammar; drop one of them")
        if self.json_schema is not None:
            with foreign_errors_as(PromptError, f"--json-schema {self.json_schema}"):
                return Grammar.json(load_json(self.json_schema))
        return None if self.regex is None else Grammar.regex(self.regex)

"""Plans measured on one set of windows, each only once: a journal on disk remembers what was seen."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from zdc_jax.basis import Basis
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.perplexity import bootstrap_interval, window_nll
from zdc_jax.fold import cast, prepared_layers
from zdc_jax.loading import load, stored_basis
from zdc_jax.model.transformer import Transformer
from zdc_jax.parallel.transformer import ShardedTransformer
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.profile import Profile, stored_profile


@dataclass(frozen=True)
class Trial:
    """A plan and what it costs: `bytes_share` of the dense KV cache at the windows' length, `increase` of
    perplexity over the unmodified model, and its 95 % paired bootstrap `interval` over windows."""

    plan: CompressionPlan
    bytes_share: float
    increase: float
    interval: tuple[float, float]


class TrialBook:
    """Measures plans of one model on `windows` [W, T] with physically smaller arrays.

    Entries of the journal (JSON lines) are of one model, basis, dtype and set of windows each; others are
    kept and passed over, so that a search can be interrupted and taken up, or repeated with another limit.
    basis, profile: default those stored by `zdc calibrate`.

    Raises:
      CheckpointError, CalibrationError: no converted folder, no basis or profile in it.
      PlanError: a journal that is not one.
    """

    def __init__(
        self,
        path: str | Path,
        windows: np.ndarray,
        *,
        basis: Basis | None = None,
        profile: Profile | None = None,
        dtype: str | None = None,
        batch: int = 1,
        journal: Path | None = None,
    ):
        self.checkpoint = Checkpoint.open(path)
        self.config = self.checkpoint.config
        self.basis = basis or stored_basis(self.checkpoint)
        self.basis.check_model(self.checkpoint.fingerprint, self.config)
        self.profile = profile or stored_profile(self.checkpoint)
        self.dtype = jnp.dtype(dtype or self.config.dtype)
        self.windows, self.batch, self.journal = windows, batch, journal
        self.layers = [self.checkpoint.layer(index) for index in range(self.config.num_layers)]
        self.embeddings = cast(self.checkpoint.embeddings(), self.dtype)
        self.key = self._key()
        self.seen: dict[str, np.ndarray] = dict(self._read_journal())
        self.dense_nll = self._nll(None)

    @property
    def trials(self) -> list[Trial]:
        """All plans measured so far, in order."""
        return [self.measure(_plan(name)) for name in self.seen if name != "null"]

    def measure(self, plan: CompressionPlan) -> Trial:
        """What `plan` costs; from the journal where it was measured before."""
        difference = self._nll(plan) - self.dense_nll
        increase = float(np.expm1(difference.mean()))
        return Trial(plan, self.share(plan), increase, bootstrap_interval(difference))

    def bound(self, plan: CompressionPlan) -> CompressionPlan:
        """`plan`, bound to the model and the basis it is measured on."""
        return plan.for_model(self.checkpoint.fingerprint, self.basis.coordinates_hash)

    def share(self, plan: CompressionPlan) -> float:
        """KV bytes of a row as long as the windows, of those of the dense cache."""
        size = lambda plan: plan.bytes(self.windows.shape[1], 1, self.dtype.name)
        return size(plan) / size(CompressionPlan.full(self.config))

    def _nll(self, plan: CompressionPlan | None) -> np.ndarray:
        name = _name(plan)
        if name not in self.seen:
            network = self._network(plan)
            self.seen[name] = window_nll(network, self.windows, batch=self.batch)
            self._write(name)
        return self.seen[name]

    def _network(self, plan: CompressionPlan | None) -> Transformer | ShardedTransformer:
        if plan is None:
            return load(self.checkpoint.path, dtype=self.dtype.name).network
        plan.check_model(self.config, self.checkpoint.fingerprint)
        layers = prepared_layers(iter(self.layers), self.config, plan, self.basis, self.dtype)
        return Transformer(self.config, plan, self.embeddings, layers)

    def _key(self) -> str:
        parts = self.basis.k_map, self.basis.v_map, self.windows
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in parts))
        digest.update(f"{self.checkpoint.fingerprint} {self.dtype}".encode())
        return digest.hexdigest()[:16]

    def _read_journal(self) -> Iterator[tuple[str, np.ndarray]]:
        if self.journal is None or not self.journal.exists():
            return
        text = self.journal.read_text()
        if not text.endswith("\n"):  # The last line was cut off when its writer was.
            text = text[: text.rfind("\n") + 1]
            self.journal.write_text(text)
        for number, line in enumerate(text.splitlines(), 1):
            try:
                entry = json.loads(line)
                key, plan, nll = entry["key"], entry["plan"], np.array(entry["nll"], np.float64)
                if key != self.key:
                    continue
                # Through a plan: older releases wrote plans in another form.
                name = _name(None if plan is None else CompressionPlan.from_json(plan, self.journal))
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                where = f"{self.journal}, line {number}"
                raise PlanError(f"{where} is no entry of a search: {error!r}") from error
            yield name, nll

    def _write(self, name: str) -> None:
        if self.journal is None:
            return
        entry = {"key": self.key, "plan": json.loads(name), "nll": self.seen[name].tolist()}
        with self.journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _name(plan: CompressionPlan | None) -> str:
    """A plan as JSON, for any model of its shape: what tells plans apart."""
    return json.dumps(None if plan is None else plan.for_model("").to_json())


def _plan(name: str) -> CompressionPlan:
    return CompressionPlan.from_json(json.loads(name), "journal")


def undominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (bytes, increase) that no other beats in both, by rising bytes."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Trials that no other beats in both bytes and increase, by falling bytes."""
    return [trials[i] for i in undominated([(t.bytes_share, t.increase) for t in trials])][::-1]


def trial_json(trial: Trial) -> dict[str, Any]:
    """A trial as plain JSON."""
    return {**asdict(trial), "plan": trial.plan.to_json()}

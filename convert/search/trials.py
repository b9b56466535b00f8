"""Plans measured on one set of windows, each only once: a journal on disk remembers what was seen."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from zdc_jax.basis import Basis
from zdc_jax.cache.spec import LayerCacheSpec
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.answers import Answer, answers_on
from zdc_jax.evaluation.compile_ahead import compile_ahead
from zdc_jax.evaluation.perplexity import bootstrap_interval, window_nll
from zdc_jax.evaluation.retention import LEAST_SCORE, log_probability, score
from zdc_jax.evaluation.sheets import TaskDocument
from zdc_jax.fold import cast, prepared_layer, prepared_layers
from zdc_jax.loading import load, stored_basis
from zdc_jax.methods import Rotations
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan
from zdc_jax.planning.profile import Profile, stored_profile

logger = logging.getLogger("zdc_jax")


@dataclass(frozen=True)
class Trial:
    """A plan and what it costs: `bytes_share` of the dense KV cache at the windows' length, `increase` of
    perplexity over the unmodified model, and its 95 % paired bootstrap `interval` over windows.

    retention: of each task that counts (`zdc_jax.evaluation.retention`); none without sheets. read_share: of
    the bytes that decoding a token reads of the dense cache.
    """

    plan: CompressionPlan
    bytes_share: float
    increase: float
    interval: tuple[float, float]
    retention: dict[str, float]
    read_share: float

    @property
    def least_retention(self) -> float:
        """Of the task that suffers most; 1 where no task counts."""
        return min(self.retention.values(), default=1.0)


@dataclass(frozen=True, eq=False)
class Seen:
    """What a model, under a plan or none, made of windows and sheets.

    nll: nats a token of each window [W]. logs: of each task, mean log-probability of a right token by sheet.
    scores: of each task, the share of right tokens that are the most likely.
    """

    nll: Float[np.ndarray, " W"]
    logs: dict[str, list[float]]
    scores: dict[str, float]


class TrialBook:
    """Measures plans of one model on `windows` [W, T] and on `sheets` with physically smaller arrays.

    Entries of the journal (JSON lines) are of one model, basis, dtype, windows and sheets each; others are
    kept and passed over, so that a search can be interrupted and taken up, or repeated with another limit.
    basis, profile: default those stored by `zdc calibrate`.

    Raises:
      CheckpointError, CalibrationError: no converted folder, no basis or profile in it, or one of another.
      PlanError: a journal that is not one.
    """

    def __init__(
        self,
        path: str | Path,
        windows: np.ndarray,
        documents: Sequence[TaskDocument] = (),
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
        if (length := windows.shape[1]) > self.basis.context_length:
            logger.warning(
                "windows of %d tokens, the basis was calibrated on %d: coordinates dropped may matter beyond",
                length,
                self.basis.context_length,
            )
        self.profile = profile or stored_profile(self.checkpoint, self.basis)
        self.dtype = jnp.dtype(dtype or self.config.dtype)
        self.windows, self.documents, self.batch, self.journal = windows, documents, batch, journal
        self.layers = [self.checkpoint.layer(index) for index in range(self.config.num_layers)]
        self.embeddings = cast(self.checkpoint.embeddings(), self.dtype)
        self.whole: dict[int, tuple[Rotations, Any]] = {}
        self.compiled: set[LayerCacheSpec] = set()
        self.key = self._key()
        self.seen: dict[str, Seen] = dict(self._read_journal())
        self.dense = self._seen(None)
        self.counting = [name for name, score in self.dense.scores.items() if score >= LEAST_SCORE]

    @property
    def trials(self) -> list[Trial]:
        """All plans measured so far, in order."""
        return [self.measure(_plan(name)) for name in self.seen if name != "null"]

    def measure(self, plan: CompressionPlan) -> Trial:
        """What `plan` costs; from the journal where it was measured before."""
        seen = self._seen(plan)
        difference = seen.nll - self.dense.nll
        increase = float(np.expm1(difference.mean()))

        def lost(name):
            return np.mean(seen.logs[name]) - np.mean(self.dense.logs[name])

        retention = {name: float(np.exp(lost(name))) for name in self.counting}
        interval, read = bootstrap_interval(difference), self.read_share(plan)
        return Trial(plan, self.share(plan), increase, interval, retention, read)

    def bound(self, plan: CompressionPlan) -> CompressionPlan:
        """`plan`, bound to the model and the basis it is measured on."""
        return plan.for_model(self.checkpoint.fingerprint, self.basis.coordinates_hash)

    def share(self, plan: CompressionPlan) -> float:
        """KV bytes of a row as long as the windows, of those of the dense cache.

        Both in the dtype of the model's weights, whatever is measured in: codes do not grow with the dtype.
        """

        def size(plan):
            return plan.bytes(self.windows.shape[1], 1, self.config.dtype)

        return size(plan) / size(CompressionPlan.full(self.config))

    def read_share(self, plan: CompressionPlan) -> float:
        """Likewise what decoding one more token reads of them."""

        def read(plan):
            return plan.bytes_read(self.windows.shape[1], self.config.dtype)

        return read(plan) / read(CompressionPlan.full(self.config))

    def _seen(self, plan: CompressionPlan | None) -> Seen:
        name, began = _name(plan), time.perf_counter()
        if name not in self.seen:
            network = self._network(plan)

            def first(single):
                return self._read(single, self.windows[: self.batch], self.documents[: self.batch])

            self.compiled = compile_ahead(network, first, self.compiled)
            nll, answered = self._read(network, self.windows, self.documents)
            self.seen[name] = Seen(
                nll,
                {task: log_probability(of_sheets).tolist() for task, of_sheets in answered.items()},
                {task: score(of_sheets) for task, of_sheets in answered.items()},
            )
            self._write(name, time.perf_counter() - began)
        return self.seen[name]

    def _read(
        self, network: Transformer, windows: np.ndarray, documents: Sequence[TaskDocument]
    ) -> tuple[np.ndarray, dict[str, list[tuple[Answer, ...]]]]:
        """Nats a token of windows, and the answers to sheets."""
        nll = window_nll(network, windows, batch=self.batch)
        return nll, answers_on(network, documents, protocol="cached", batch=self.batch)

    def _network(self, plan: CompressionPlan | None) -> Transformer:
        if plan is None:
            network = load(self.checkpoint.path, dtype=self.dtype.name).network
            assert isinstance(network, Transformer)  # No mesh was named.
            return network
        plan.check_model(self.config, self.checkpoint.fingerprint)
        return Transformer(self.config, plan, self.embeddings, self._prepared(plan))

    def _prepared(self, plan: CompressionPlan) -> Iterable[Any]:
        """Folded weights; where all layers have near tokens these are whole, and a layer's the same in all
        plans that turn it alike."""
        given = self.config, plan, self.basis, self.dtype
        if not all(any(plan.near(index)) for index in range(len(plan.layers))):
            return prepared_layers(iter(self.layers), *given)
        for index, layer in enumerate(self.layers):
            rotations = plan.rotations(index)
            if index not in self.whole or self.whole[index][0] != rotations:
                self.whole[index] = rotations, jax.device_put(prepared_layer(index, layer, *given))
        return [self.whole[index][1] for index in range(len(self.layers))]

    def _key(self) -> str:
        asked = (
            question.tokens
            for document in self.documents
            for each in document.questions.values()
            for question in each
        )
        contexts = (document.context for document in self.documents)
        parts = self.basis.k_map, self.basis.v_map, self.windows, *contexts, *asked
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in parts))
        digest.update(f"{self.checkpoint.fingerprint} {self.dtype}".encode())
        return digest.hexdigest()[:16]

    def _read_journal(self) -> Iterator[tuple[str, Seen]]:
        if self.journal is None or not self.journal.exists():
            return
        text = self.journal.read_bytes()
        if not text.endswith(b"\n"):  # The last line was cut off when its writer was.
            text = text[: text.rfind(b"\n") + 1]
            os.truncate(self.journal, len(text))
        for number, line in enumerate(text.splitlines(), 1):
            try:
                entry = json.loads(line)
                key, plan, nll = entry["key"], entry["plan"], np.array(entry["nll"], np.float64)
                if key != self.key:
                    continue
                seen = Seen(nll, entry.get("logs", {}), entry.get("scores", {}))
                # Through a plan: older releases wrote plans in another form.
                name = _name(None if plan is None else CompressionPlan.from_json(plan, self.journal))
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                where = f"{self.journal}, line {number}"
                raise PlanError(f"{where} is no entry of a search: {error!r}") from error
            yield name, seen

    def _write(self, name: str, seconds: float) -> None:
        if self.journal is None:
            return
        entry = {"key": self.key, "plan": json.loads(name), **asdict(self.seen[name])}
        entry |= {"nll": self.seen[name].nll.tolist(), "seconds": seconds}
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

"""Measurement of plans on one set of texts, each plan once; a journal on disk keeps the results.

Plans are measured with arrays of their size, or simulated (`convert.search.simulation`).
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from convert.search.simulation import Simulation
from zdc_jax.basis import Basis
from zdc_jax.cache.specs.spec import LayerCacheSpec
from zdc_jax.checkpoint import Checkpoint
from zdc_jax.errors import PlanError
from zdc_jax.evaluation.answers import Answer, answers_on
from zdc_jax.evaluation.compile_ahead import compile_ahead
from zdc_jax.evaluation.perplexity import Predictions, bootstrap_interval, compare_predictions, predict
from zdc_jax.evaluation.retention import keep_counted, log_probability, mark_counted
from zdc_jax.evaluation.sheets import TaskDocument
from zdc_jax.fold import cast, prepared_layer, prepared_layers
from zdc_jax.loading import choose_dtype, load, stored_basis
from zdc_jax.model.transformer import Transformer
from zdc_jax.plan import CompressionPlan
from zdc_jax.planned_layers import Rotations
from zdc_jax.planning.profile import Profile, stored_profile

logger = logging.getLogger("zdc_jax")

FORMAT = "KL divergence, lengthened vectors"
"""Version of what the journal holds; entries of other versions are ignored."""


@dataclass(frozen=True)
class Trial:
    """A measured plan: its cache size and its losses compared with the unmodified model.

    Attributes:
      plan: the plan.
      bytes_share: bytes of the KV cache at the windows' length, as a share of the dense cache's.
      increase: relative increase of perplexity.
      interval: 95 % paired bootstrap interval of `increase` over windows.
      retention: retention of each task that the unmodified model can solve (`zdc_jax.evaluation.retention`).
      read_share: bytes that decoding a token reads, as a share of the dense cache's.
      kl: mean KL divergence of the next token from the unmodified model, in nats.
    """

    plan: CompressionPlan
    bytes_share: float
    increase: float
    interval: tuple[float, float]
    retention: dict[str, float]
    read_share: float
    kl: float = 0.0

    @property
    def least_retention(self) -> float:
        """Smallest retention of a task; 1 without tasks."""
        return min(self.retention.values(), default=1.0)


@dataclass(frozen=True, eq=False)
class Measurement:
    """Results of one model, compressed or not, on windows and documents.

    Attributes:
      nll: negative log-likelihood of each window, nats per token, [W].
      logs: mean log-probability of right tokens, per task and document, of questions that count.
      kl: mean KL divergence from the unmodified model, in nats.
      marks: questions of each document that count, per task; of the unmodified model only.
    """

    nll: Float[np.ndarray, " W"]
    logs: dict[str, list[float]]
    kl: float = 0.0
    marks: dict[str, list[list[bool]]] = field(default_factory=dict)


class TrialBook:
    """Measurements of plans of one model, kept in a journal.

    The journal, a file of JSON lines, lets a search resume or run again with another limit. An entry belongs
    to one model, basis, dtype, windows and documents; entries of others are ignored and kept.

    Args:
      path: converted and calibrated folder.
      windows: token windows to measure perplexity on, [W, T].
      documents: documents with task questions.
      basis: default the basis stored by `zdc calibrate`.
      profile: default the profile stored by `zdc calibrate`.
      dtype: dtype to run in; default that of the stored weights.
      batch: windows or documents to run at once.
      journal: file of the journal; None keeps none.
      simulation: simulates the plans that it supports; other plans have arrays of their size.

    Raises:
      CheckpointError, CalibrationError: the folder is not converted, or its basis is missing or of another
        model.
      PlanError: the journal has an entry that is not one of a search.
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
        simulation: Simulation | None = None,
    ):
        self.checkpoint = Checkpoint.open(path)
        self.config = self.checkpoint.config
        self.basis = basis or stored_basis(self.checkpoint)
        self.basis.check_model(self.checkpoint.fingerprint, self.config)
        if (length := windows.shape[1]) > self.basis.context_length:
            logger.warning(
                "windows have %d tokens, calibration used %d: dropped coordinates may matter at longer range",
                length,
                self.basis.context_length,
            )
        self._profile, self._simulation = profile, simulation
        self.dtype = jnp.dtype(choose_dtype(self.config, dtype))
        self.windows, self.documents = windows, documents
        self.batch, self.journal = batch, journal
        self.layers = [self.checkpoint.layer(index) for index in range(self.config.num_layers)]
        self.embeddings = cast(self.checkpoint.embeddings(), self.dtype)
        self.prepared: dict[int, tuple[tuple[Rotations, bool], Any]] = {}
        self.compiled: set[LayerCacheSpec] = set()
        self._dense_predictions: Predictions | None = None
        self.key = self._compute_key()
        self.measurements: dict[str, Measurement] = dict(self._read_journal())
        self.dense = self._measure(None)
        self.counting = [task for task, marks in self.dense.marks.items() if any(map(any, marks))]

    @property
    def profile(self) -> Profile:
        """Profile of the model.

        Raises:
          CalibrationError: the folder has no profile, or one of another model or basis.
        """
        self._profile = self._profile or stored_profile(self.checkpoint, self.basis)
        return self._profile

    @property
    def trials(self) -> list[Trial]:
        """All plans measured so far, in order."""
        values = (json.loads(name) for name in self.measurements if name != "null")
        return [self.measure(CompressionPlan.from_json(value, "journal")) for value in values]

    def measure(self, plan: CompressionPlan) -> Trial:
        """Measure a plan, or return its results from the journal."""
        measurement = self._measure(plan)
        difference = measurement.nll - self.dense.nll

        def log_retention(task: str) -> float:
            return float(np.mean(measurement.logs[task]) - np.mean(self.dense.logs[task]))

        return Trial(
            plan,
            bytes_share=self.share(plan),
            increase=float(np.expm1(difference.mean())),
            interval=bootstrap_interval(difference),
            retention={task: float(np.exp(log_retention(task))) for task in self.counting},
            read_share=self.read_share(plan),
            kl=measurement.kl,
        )

    def bind(self, plan: CompressionPlan) -> CompressionPlan:
        """Return the plan bound to the measured model and basis."""
        return plan.for_model(self.checkpoint.fingerprint, self.basis.coordinates_hash, self.basis.shifted)

    def share(self, plan: CompressionPlan) -> float:
        """Return the cache bytes of a sequence of the windows' length, as a share of the dense cache's.

        Both counts assume the dtype of the stored weights, not the dtype of the measurement, because
        quantized values do not grow with the dtype.
        """
        full, length = CompressionPlan.full(self.config), self.windows.shape[1]
        return plan.bytes(length, 1, self.config.dtype) / full.bytes(length, 1, self.config.dtype)

    def read_share(self, plan: CompressionPlan) -> float:
        """Return the bytes that decoding one token after a window reads, as a share of the dense cache's."""
        full, length = CompressionPlan.full(self.config), self.windows.shape[1]
        return plan.bytes_read(length, self.config.dtype) / full.bytes_read(length, self.config.dtype)

    def _measure(self, plan: CompressionPlan | None) -> Measurement:
        name, began = _serialize_plan(plan), time.perf_counter()
        if name not in self.measurements:
            network = self._make_network(plan)

            def run_first_batch(single: Transformer) -> Any:
                return self._run(single, self.windows[: self.batch], self.documents[: self.batch])

            self.compiled = compile_ahead(network, run_first_batch, self.compiled)
            predictions, answers = self._run(network, self.windows, self.documents)
            if plan is None:
                self._dense_predictions = predictions
                marks = {task: mark_counted(documents) for task, documents in answers.items()}
                measurement = replace(summarize(predictions, 0.0, answers, marks), marks=marks)
            else:
                kl = self._compute_kl(predictions)
                measurement = summarize(predictions, kl, answers, self.dense.marks)
            self.measurements[name] = measurement
            self._write_journal(name, time.perf_counter() - began)
        return self.measurements[name]

    def _run(
        self, network: Transformer, windows: np.ndarray, documents: Sequence[TaskDocument]
    ) -> tuple[Predictions, dict[str, list[tuple[Answer, ...]]]]:
        """Return the predictions for windows, and the answers to the questions of documents."""
        predictions = predict(network, windows, batch=self.batch)
        return predictions, answers_on(network, documents, protocol="cached", batch=self.batch)

    def _compute_kl(self, predictions: Predictions) -> float:
        """Return the mean KL divergence from the unmodified model, which runs again if a journal had it."""
        if self._dense_predictions is None:
            self._dense_predictions = predict(self._make_network(None), self.windows, batch=self.batch)
        dense = self._dense_predictions
        kl, _ = compare_predictions(
            dense.embeddings, dense.states, predictions.embeddings, predictions.states
        )
        return float(np.asarray(kl).mean(dtype=np.float64))

    def _make_network(self, plan: CompressionPlan | None) -> Transformer:
        if plan is None:
            return load(self.checkpoint.path, dtype=self.dtype.name).network
        plan.check_model(self.config, self.checkpoint.fingerprint)
        plan = self.bind(plan)
        if self._simulation is not None and self._simulation.supports(plan):
            return self._simulation.network(plan)
        return Transformer(self.config, plan, self.embeddings, self._prepare_layers(plan))

    def _prepare_layers(self, plan: CompressionPlan) -> Iterable[Any]:
        """Return the folded weights of all layers.

        A layer with a window or sinks has unsliced weights, which depend on the plan's rotations and shift.
        If all layers are such, they are kept for further plans.
        """
        if not all(any(plan.near(index)) for index in range(len(plan.layers))):
            return prepared_layers(iter(self.layers), self.config, plan, self.basis, self.dtype)
        for index, layer in enumerate(self.layers):
            form = plan.rotations(index), plan.layers[index].shift
            if index not in self.prepared or self.prepared[index][0] != form:
                weights = prepared_layer(index, layer, self.config, plan, self.basis, self.dtype)
                self.prepared[index] = form, jax.device_put(weights)
        return [self.prepared[index][1] for index in range(len(self.layers))]

    def _compute_key(self) -> str:
        """Return a hash of all that measurements depend on besides the plan."""
        questions = (
            question.tokens
            for document in self.documents
            for of_task in document.questions.values()
            for question in of_task
        )
        contexts = (document.context for document in self.documents)
        parts = self.basis.k_map, self.basis.v_map, self.windows, *contexts, *questions
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in parts))
        kind = "real" if self._simulation is None else "simulated"
        digest.update(f"{self.checkpoint.fingerprint} {self.dtype} {FORMAT} {kind}".encode())
        return digest.hexdigest()[:16]

    def _read_journal(self) -> Iterator[tuple[str, Measurement]]:
        if self.journal is None or not self.journal.exists():
            return
        text = self.journal.read_bytes()
        if not text.endswith(b"\n"):  # The search was interrupted while it wrote the last line.
            text = text[: text.rfind(b"\n") + 1]
            os.truncate(self.journal, len(text))
        for number, line in enumerate(text.splitlines(), 1):
            try:
                entry = json.loads(line)
                key, plan, nll = entry["key"], entry["plan"], np.array(entry["nll"], np.float64)
                if key != self.key:
                    continue
                measurement = Measurement(nll, entry["logs"], entry["kl"], entry["marks"])
                # The name comes from a parsed plan, because older releases wrote plans in another form.
                name = _serialize_plan(
                    None if plan is None else CompressionPlan.from_json(plan, self.journal)
                )
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise PlanError(
                    f"{self.journal}, line {number}: not an entry of a search journal: {error!r}; "
                    "delete the file or choose another output"
                ) from error
            yield name, measurement

    def _write_journal(self, name: str, seconds: float) -> None:
        if self.journal is None:
            return
        entry = {"key": self.key, "plan": json.loads(name), **asdict(self.measurements[name])}
        entry |= {"nll": self.measurements[name].nll.tolist(), "seconds": seconds}
        with self.journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def summarize(
    predictions: Predictions,
    kl: float,
    answers: Mapping[str, Sequence[Sequence[Answer]]],
    marks: Mapping[str, Sequence[Sequence[bool]]],
) -> Measurement:
    """Summarize predictions, and answers by task; where no question counts, all do."""
    counted = {task: keep_counted(documents, marks[task]) or documents for task, documents in answers.items()}
    return Measurement(
        nll=predictions.nll.mean(1, dtype=np.float64),
        logs={task: log_probability(documents).tolist() for task, documents in counted.items()},
        kl=kl,
    )


def _serialize_plan(plan: CompressionPlan | None) -> str:
    """Return a plan as JSON without its model, which serves as its key."""
    return json.dumps(None if plan is None else plan.for_model("").to_json())


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that no other beats in both bytes and increase, by falling bytes."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (trial.bytes_share, trial.increase)):
        if not front or trial.increase < front[-1].increase:
            front.append(trial)
    return front[::-1]


def trial_json(trial: Trial) -> dict[str, Any]:
    """Return a trial as plain JSON."""
    return {**asdict(trial), "plan": trial.plan.to_json()}

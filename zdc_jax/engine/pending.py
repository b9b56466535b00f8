"""Steps that an engine has started on the device, and tokens on their way to the requests they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from zdc_jax.engine.inputs import DecodeInputs
from zdc_jax.engine.job import Job
from zdc_jax.engine.scheduler import PrefillChunk
from zdc_jax.generation.guide import Guide, make_mask
from zdc_jax.generation.next_token import Scores
from zdc_jax.generation.steps import Frontier, SampledTokens


@dataclass
class PendingTokens:
    """Tokens that are being copied to the host.

    Attributes:
      calls: tokens of each program that chooses some, in order; their copies have started (`start_copy`).
      jobs: index in the batch and job of each sequence.
      scored: job, chunk and scores of the prompt tokens after each token of the chunk; None without scores.
    """

    calls: list[SampledTokens]
    jobs: Sequence[tuple[int, Job]]
    scored: tuple[Job, PrefillChunk, Scores] | None = None
    _shown: int = 0

    def show_guides(self) -> None:
        """Wait for tokens of guided sequences, and show them to their guides."""
        new, self._shown = self.calls[self._shown :], len(self.calls)
        guided = [(row, job) for row, job in self.jobs if job.next_guide is not None]
        for call in new if guided else ():
            chosen = jax.device_get(call)
            for row, job in guided:
                tokens, _ = take_tokens(chosen, row)
                job.show_guide(tokens)

    def wait(self) -> SampledTokens:
        """Wait for the tokens of all calls, and join them."""
        *others, last = calls = jax.device_get(self.calls)
        if not others:
            return last
        new = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *(chosen.new for chosen in calls))
        counts: Any = np.sum([chosen.counts for chosen in calls], axis=0)
        return SampledTokens(new, counts, last.lengths)


@dataclass
class DecodeGroup:
    """Sequences that one program decodes.

    Attributes:
      inputs: inputs of the program.
      jobs: index in the batch and job of each sequence.
    """

    inputs: DecodeInputs
    jobs: list[tuple[int, Job]] = field(default_factory=list)

    def add(self, row: int, job: Job) -> None:
        """Add the sequence at index `row` of the batch."""
        self.inputs.add(row, job.numbers, job.choice, job.is_shaped)
        self.jobs.append((row, job))

    @property
    def is_guided(self) -> bool:
        """Whether masks are needed, which depend on the tokens of the step before."""
        return any(job.needs_mask for _, job in self.jobs)

    def make_mask(self, vocab: int) -> np.ndarray:
        """Return the masks of the next tokens of the batch (`make_mask`)."""
        guides: list[Guide | None] = [None] * len(self.inputs.active)
        for row, job in self.jobs:
            guides[row] = job.next_guide
        return make_mask(guides, vocab)


@dataclass
class StartedStep:
    """A step that was started on the device.

    Attributes:
      pending: tokens that are being copied to the host.
      guided: sequences that need masks of the host; None if there are none.
      frontier: result of their layers; None if nothing is started.
      steps: decode steps of these sequences.
    """

    pending: list[PendingTokens] = field(default_factory=list)
    guided: DecodeGroup | None = None
    frontier: Frontier | None = None
    steps: int = 1


def start_copy[T](results: T) -> T:
    """Start the copy of arrays to the host, and return them."""
    for array in jax.tree.leaves(results):
        array.copy_to_host_async()
    return results


def take_tokens(chosen: SampledTokens, row: int) -> tuple[list[int], bool]:
    """Return the tokens at index `row`, and whether logits that are not finite end the sequence."""
    count = int(chosen.counts[row])
    tokens: list[int] = chosen.tokens[row, :count].tolist()
    if broken := count > 0 and not chosen.new.finite[row, count - 1]:
        tokens.pop()
    return tokens, broken

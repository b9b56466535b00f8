"""Engine: a thread that plans steps, starts them on the device, and delivers tokens of the previous step."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from zdc_jax.engine.checks import check_request, check_servable
from zdc_jax.engine.inputs import ChunkInputs
from zdc_jax.engine.job import Job
from zdc_jax.engine.layout import Layout
from zdc_jax.engine.pending import DecodeGroup, PendingTokens, StartedStep, start_copy, take_tokens
from zdc_jax.engine.request import Busy, Closing, EngineRequest, EngineStats, Event
from zdc_jax.engine.runner import Runner
from zdc_jax.engine.scheduler import Plan, PrefillChunk, Scheduler, Work
from zdc_jax.engine.start_report import report_start
from zdc_jax.errors import NonFiniteError, PromptError
from zdc_jax.fields import check_fields
from zdc_jax.generation.chunks import bucket, choose_chunk_tokens, choose_step_tokens, find_block
from zdc_jax.generation.request import check_chunk, warn_beyond_calibration
from zdc_jax.generation.steps import Frontier, SampledTokens
from zdc_jax.loading import LanguageModel

logger = logging.getLogger("zdc_jax")

MOST_SEQUENCES = 4096
"""Most requests at once. Each has arrays as wide as the vocabulary."""


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine.

    Attributes:
      max_sequences: most requests that run at once, up to `MOST_SEQUENCES`.
      max_model_len: most tokens of a prompt and its answer together; default the model's positions.
      cache_tokens: tokens that the cache has room for. By default enough for `max_sequences` requests of
        `max_model_len` tokens, or what fits into memory. Not allowed for plans whose method has no pages.
      page: tokens of a cache page.
      chunk: most prompt tokens prefilled in a step, a power of two >= 32. The default is 2,048 to
        8,192 on GPUs, by the size of the model (`choose_step_tokens`), and 512 elsewhere. On GPUs a prompt
        that runs alone is read in chunks of up to 8,192.
      decode_steps: decode steps in one program if no prompt is prefilled and no request waits. Their tokens
        are delivered together, and tokens after a stop token are discarded. Default 4 on GPUs and on
        a mesh, where the host needs longer for a step than the device. For weights of 8 GB or more on one GPU
        it is 2, and elsewhere 1. More than one compiles two more programs.
      max_waiting: longest request queue; further requests are refused.
      reuse: share cache pages between requests that start with the same tokens. Methods without pages share
        nothing.

    Raises:
      PromptError: a value is out of range.
    """

    max_sequences: int = 8
    max_model_len: int | None = None
    cache_tokens: int | None = None
    page: int = 128
    chunk: int | None = None
    decode_steps: int | None = None
    max_waiting: int = 256
    reuse: bool = True

    def __post_init__(self) -> None:
        check_fields(self, PromptError)
        for name in ("max_sequences", "cache_tokens", "page", "decode_steps", "max_waiting"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise PromptError(f"{name}={value} must be at least 1")
        if self.max_sequences > MOST_SEQUENCES:
            raise PromptError(f"max_sequences={self.max_sequences} must be at most {MOST_SEQUENCES}")
        if self.chunk is not None and self.chunk != bucket(self.chunk):
            raise PromptError(f"chunk={self.chunk} must be a power of two >= 32")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise PromptError(
                f"max_model_len={self.max_model_len} must be at least 2: a prompt token and a generated one"
            )

    @property
    def max_requests(self) -> int:
        """Most running and waiting requests."""
        return self.max_sequences + self.max_waiting

    def served_length(self, positions: int) -> int:
        """Return `max_model_len` for a model with `positions` positions.

        Raises:
          PromptError: the model has fewer positions, or `cache_tokens` have no room for one such request.
        """
        if self.max_model_len is not None and self.max_model_len > positions:
            raise PromptError(
                f"max_model_len={self.max_model_len} must be at most {positions}, the model's positions"
            )
        longest = self.max_model_len or positions
        least = -(-longest // self.page) * self.page
        if self.cache_tokens is not None and self.cache_tokens < least:
            raise PromptError(
                f"cache_tokens={self.cache_tokens} must be at least {least}, one request of "
                f"max_model_len={longest} tokens in pages of {self.page}; raise it, leave it out, or lower "
                "max_model_len"
            )
        return longest


class Engine:
    """Engine that serves one model to many requests at once (`Serving`).

    The answer to a request is that of `generate` for the request alone, greedy or sampled, whatever else
    runs. In 16-bit precision sums of other shapes may round differently, which can change a tie.

    Args:
      model: model to serve.
      config: configuration; default `EngineConfig()`.

    Raises:
      PlanError: the engine cannot serve the model's plan, or `cache_tokens` is set for a plan without pages.
      PromptError: `chunk` does not suit the plan, or `max_model_len` exceeds the model's positions.
      CacheMemoryError: the cache does not fit, or leaves too little memory for the steps.
    """

    def __init__(self, model: LanguageModel, config: EngineConfig | None = None):
        network = check_servable(model.network)
        self.model, self.config = model, config or EngineConfig()
        self._chunk = self.config.chunk or choose_step_tokens(model.config)
        check_chunk(model, self._chunk, name="chunk")
        self.max_model_len = self.config.served_length(model.config.max_positions)
        warn_beyond_calibration(model, self.max_model_len, stacklevel=3)
        layout = Layout.of(
            network.device_caches,
            rows=self.config.max_sequences,
            longest=self.max_model_len,
            page=self.config.page,
            cache_tokens=self.config.cache_tokens,
            reuse=self.config.reuse,
        )
        report_start(network, layout, self.max_model_len)
        self._runner = Runner(network, layout, chunk=self._chunk, steps=self.config.decode_steps)
        self._scheduler = self._new_scheduler()
        self._jobs: dict[Work, Job] = {}
        self._inbox: list[Job] = []
        self._cancelled: list[Job] = []
        self._changed = threading.Condition()
        self.closing = self._stopped = False
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="zdc-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(drain=error is None, timeout=60)

    def submit(self, request: EngineRequest, notify: Callable[[Event], None]) -> Job:
        check_request(self.model, self.max_model_len, request)
        can_go_back = self.config.reuse and self._runner.layout.has_pages
        job = Job(self.model, request, notify, self.cancel, can_go_back=can_go_back)
        with self._changed:
            if self.closing:
                raise Closing("the engine is closing and accepts no more requests")
            ahead = len(self._inbox) + len(self._scheduler.waiting) - len(self._scheduler.free)
            if ahead >= self.config.max_waiting:
                raise Busy(f"the queue is full ({self.config.max_waiting} waiting requests); retry later")
            self._inbox.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a job soon, unless it has ended."""
        with self._changed:
            self._cancelled.append(job)
            self._changed.notify()

    @property
    def max_requests(self) -> int:
        return self.config.max_requests

    @property
    def cache_tokens(self) -> int:
        """Tokens of all requests together that the cache has room for."""
        return self._runner.layout.tokens

    def stats(self) -> EngineStats:
        with self._changed:
            scheduler = self._scheduler
            return EngineStats(
                **self._counts,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting) + len(self._inbox),
                cache_usage=1 - scheduler.pool.available / scheduler.pool.pages,
            )

    def close(self, *, drain: bool, timeout: float) -> None:
        until = time.monotonic() + timeout
        with self._changed:
            self.closing = True
            while drain and (self._inbox or self._jobs) and time.monotonic() < until:
                self._changed.wait(0.05)
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _new_scheduler(self) -> Scheduler:
        layout = self._runner.layout
        return Scheduler(
            self.config.max_sequences,
            self._chunk,
            pages=layout.pages,
            page=layout.page,
            alignment=find_block(self.model),
            steps=self._runner.steps,
            reuse=self.config.reuse and layout.has_pages,
            tails=layout.tails,
            cuts=self._runner.cuts,
            alone=self._runner.alone,
            choose=choose_chunk_tokens,
            whole=self._runner.whole,
        )

    def _run(self) -> None:
        """Run the engine's thread; however it ends, every job gets its last event."""
        failure = None
        try:
            self._work()
        except BaseException as error:  # A tokenizer's panic is not an `Exception`.
            logger.exception("the engine failed and accepts no more requests")
            failure = f"the engine failed: {error}"
        with self._changed:
            self.closing = True
            self._process_inbox()
        for job in list(self._jobs.values()):
            job.end("error" if failure else "cancelled", failure)
        self._jobs.clear()

    def _work(self) -> None:
        """Run steps until the engine is stopped.

        While one step runs on the device, the tokens of the previous step are delivered.
        """
        pending: list[PendingTokens] = []
        while True:
            with self._changed:
                while not (pending or self._inbox or self._cancelled or self._jobs or self._stopped):
                    self._changed.wait()
                self._process_inbox()
                if self._stopped:
                    break
            try:
                if self._scheduler.victim() is not None or self._list_going_back():
                    # A preempted request keeps its output, so pending tokens must be delivered first.
                    self._deliver(pending)
                    pending = []
                plan = self._next_plan()
                started = self._start(plan)
                if started.guided is None:
                    self._deliver(pending)
                    pending = started.pending
                else:
                    pending = started.pending + self._decode_guided(started, pending)
                if plan is not None and self._ends_a_lone_text(plan):
                    # The first token need not wait until the next step has been started.
                    self._deliver(pending)
                    pending = []
            except Exception as error:
                logger.exception(
                    "a step failed: requests %s end with an error, waiting ones continue",
                    ", ".join(self._jobs[work].request.id for work in self._scheduler.running.values()),
                )
                self._fail_running(error)
                pending = []
        # A process that ends while its device computes is aborted.
        jax.block_until_ready([each.calls for each in pending])

    def _ends_a_lone_text(self, plan: Plan) -> bool:
        """Return whether a step reads the last chunk of a text while nothing else runs."""
        return len(self._scheduler.running) == 1 and any(chunk.last for chunk in plan.chunks)

    def _process_inbox(self) -> None:
        """Queue new requests and end cancelled ones; the caller holds the lock."""
        submitted, cancelled = self._inbox, self._cancelled
        self._inbox, self._cancelled = [], []  # A callback may submit or cancel again.
        for job in submitted:
            self._jobs[job.work] = job
            self._scheduler.add(job.work)
        for job in cancelled:
            if job.work in self._jobs:
                job.end("cancelled")
                self._remove(job)

    def _next_plan(self) -> Plan | None:
        with self._changed:
            for job in self._list_going_back():
                self._scheduler.go_back(job.work)
                job.must_go_back = False
                self._count(rewinds=1)
            while (victim := self._scheduler.victim()) is not None:
                self._scheduler.preempt(victim)
                self._count(preemptions=1)
            return self._scheduler.plan()

    def _list_going_back(self) -> list[Job]:
        """Return the running jobs that must go back to the tokens before a refused one."""
        running = (self._jobs[work] for work in self._scheduler.running.values())
        return [job for job in running if job.must_go_back]

    def _start(self, plan: Plan | None) -> StartedStep:
        """Start a step on the device."""
        started = StartedStep()
        if plan is None:
            return started
        for work in plan.changed:
            self._runner.set_pages(work.place, work.pages)
        for work, tail in plan.restored:
            self._runner.restore_tail(work.place, tail)
        decoding = self._new_group()
        for work in plan.decode:
            decoding.add(work.place, self._jobs[work])

        def wants_scores(chunk: PrefillChunk) -> bool:
            return self._jobs[chunk.work].wants_scores(chunk.begin)

        for chunks in self._runner.grouping.groups(plan.chunks, alone=wants_scores):
            chosen, scores, frontier = self._runner.prefill(
                [self._chunk_inputs(chunk) for chunk in chunks], decoding.inputs
            )
            # Chunks that generate no token are pending, too: that limits how far the host runs ahead.
            for chunk, tokens in zip(chunks, chosen, strict=True):
                job = self._jobs[chunk.work]
                scored = None if scores is None else (job, chunk, scores)
                jobs = [(0, job)] if chunk.last else []
                start_copy(scores)
                started.pending.append(PendingTokens([start_copy(tokens)], jobs, scored))
            if frontier is not None:
                self._decode(decoding, started, 1, frontier)
                decoding = self._new_group()
        if decoding.jobs:
            self._decode(decoding, started, plan.steps)
        return started

    def _new_group(self) -> DecodeGroup:
        return DecodeGroup(self._runner.new_decode_inputs())

    def _decode(
        self, group: DecodeGroup, started: StartedStep, steps: int, frontier: Frontier | None = None
    ) -> None:
        """Start decoding of a group, or note that it needs masks; `frontier` is that of the first step."""
        if group.is_guided:
            started.guided, started.frontier, started.steps = group, frontier, steps
            return
        if frontier is not None:
            calls = [self._runner.choose_next(frontier, group.inputs)]
        else:
            calls = self._runner.decode(group.inputs, steps)
        started.pending.append(PendingTokens(start_copy(calls), group.jobs))

    def _decode_guided(self, started: StartedStep, pending: list[PendingTokens]) -> list[PendingTokens]:
        """Decode sequences one step at a time, since masks depend on the tokens of the step before.

        While the layers of a step run on the device, the host makes the masks for the choice of its tokens,
        and delivers a part of the `pending` tokens. The tokens of all steps are delivered together.
        """
        group, frontier = started.guided, started.frontier
        assert group is not None
        calls: list[SampledTokens] = []
        # Each part is delivered in a step of its own, but first tokens at once.
        parts = [PendingTokens(calls, group.jobs[step :: started.steps]) for step in range(started.steps)]
        at_once = [each for each in pending if len(each.calls) == 1]
        later = [each for each in pending if len(each.calls) > 1]
        for step in range(started.steps):
            if frontier is None:
                frontier = self._runner.advance(group.inputs)
            self._deliver(at_once + later[step :: started.steps])
            at_once = []
            for part in (*pending, *parts):
                part.show_guides()
            mask = group.make_mask(self.model.config.vocab_size)
            calls.append(start_copy(self._runner.choose_next(frontier, group.inputs, mask)))
            frontier = None
        return parts

    def _chunk_inputs(self, chunk: PrefillChunk) -> ChunkInputs:
        """Build the runner's inputs for a chunk, and update statistics."""
        work, job = chunk.work, self._jobs[chunk.work]
        if job.note_start():
            length = len(work.text)
            self._count(prompt_tokens=length, prefix_queries=length, prefix_hits=work.cached)
        tokens, following = work.text[chunk.begin : chunk.end], work.text[chunk.end :][:1] or (0,)
        return ChunkInputs(
            row=work.place,
            tokens=tokens,
            begin=chunk.begin,
            last=chunk.last,
            numbers=job.numbers,
            choice=job.choice,
            shaping=job.first_shaping() if chunk.last else None,
            following=following[0] if job.wants_scores(chunk.begin) else None,
            mark=chunk.mark,
            tail=chunk.tail,
        )

    def _deliver(self, results: list[PendingTokens]) -> None:
        """Wait for pending tokens and pass them to their jobs."""
        for result in results:
            result.show_guides()
            chosen = result.wait()
            if result.scored is not None:
                scored_job, chunk, scores = result.scored
                scored_job.add_scores(chunk.begin, chunk.end, jax.device_get(scores))
            receivers = [(row, job) for row, job in result.jobs if not job.ended and chosen.counts[row]]
            self._count(generation_tokens=sum(int(chosen.counts[row]) for row, _ in receivers))
            for row, job in receivers:
                self._deliver_sequence(job, chosen, row)

    def _deliver_sequence(self, job: Job, chosen: SampledTokens, row: int) -> None:
        """Pass the tokens at index `row` to their job, and remove the job if it has ended."""
        tokens, broken = take_tokens(chosen, row)
        scores = jax.tree.map(lambda part: part[row], chosen.new.scores)
        try:
            device_knows = bool(tokens) and job.add_tokens(tokens, scores)
        except PromptError as error:
            logger.warning("request %s ends with an error: %s", job.request.id, error)
            job.end("error", str(error))
            device_knows = False
        if broken:
            self._fail_broken(job)
        elif job.ended:
            self._remove(job, keep=int(chosen.lengths[row]) if device_knows else 0)

    def _fail_broken(self, job: Job) -> None:
        """End a job whose logits are not finite, and clear its part of the cache.

        A product of NaN and a weight of 0 is NaN, so what the job stored must reach no other request.
        """
        error = NonFiniteError("logits are", self.model.network.dtype.name)
        logger.error("request %s failed: %s", job.request.id, error)
        job.end("error", str(error))
        with self._changed:
            pages = self._scheduler.forget(job.work)
        self._runner.clear(job.work.place, pages)
        self._remove(job)

    def _remove(self, job: Job, keep: int = 0) -> None:
        """Remove an ended job; `keep` tokens of its pages stay available for other requests."""
        with self._changed:
            self._scheduler.end(job.work, keep)
            del self._jobs[job.work]

    def _fail_running(self, error: Exception) -> None:
        """End all running requests with an error, and start again with an empty cache."""
        with self._changed:
            waiting, running = self._scheduler.waiting, list(self._scheduler.running.values())
            self._scheduler = self._new_scheduler()
            for work in waiting:
                self._scheduler.add(work)
        for work in running:
            self._jobs.pop(work).end("error", f"{type(error).__name__}: {error}")
        self._runner.reset()

    def _count(self, **increments: int) -> None:
        """Increase counters of the statistics."""
        with self._changed:
            self._counts.update(increments)

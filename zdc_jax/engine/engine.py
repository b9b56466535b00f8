"""Requests in, tokens out: one thread that plans steps, starts them, and hands out what the last one gave."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import jax

from zdc_jax.engine.checks import check_request
from zdc_jax.engine.job import Job
from zdc_jax.engine.layout import Layout
from zdc_jax.engine.request import Busy, Closing, EngineRequest, EngineStats, Event
from zdc_jax.engine.runner import ChunkInputs, Runner, servable
from zdc_jax.engine.scheduler import Plan, PrefillChunk, Scheduler, Work
from zdc_jax.errors import PromptError
from zdc_jax.fields import check_fields
from zdc_jax.generation.next_token import Scores, Token
from zdc_jax.generation.request import check_chunk, warn_beyond_calibration
from zdc_jax.generation.steps import PREFILL_CHUNK, SampledTokens, bucket
from zdc_jax.loading import LanguageModel

logger = logging.getLogger("zdc_jax")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine serves.

    rows: requests that are under way at once. max_model_len: tokens of a prompt and its answer together,
    default the model's positions. cache_tokens: of all rows together; default room for `rows` of the longest,
    or what fits. page: tokens of a page of the cache. chunk: tokens of prompts that a step reads, a power of
    two. steps: of decoding that are one program where nobody reads or waits; tokens come so many at once
    then, those behind a stop token are for nobody, and two more programs are compiled. Default 4 on a mesh,
    where a token took half the time so on four H100, and 1 elsewhere. max_waiting: requests. reuse: whether
    requests share what pages hold of texts that begin alike. A plan whose method has no pages takes no
    cache_tokens, and nothing is shared.

    Raises:
      PromptError: a number below 1, or no whole one; a max_model_len below 2; a chunk that is no power of two
        from 32 on.
    """

    max_sequences: int = 8
    max_model_len: int | None = None
    cache_tokens: int | None = None
    page: int = 128
    chunk: int = PREFILL_CHUNK
    decode_steps: int | None = None
    max_waiting: int = 256
    reuse: bool = True

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ValueError as error:
            raise PromptError(str(error)) from error
        for name in ("max_sequences", "cache_tokens", "page", "decode_steps", "max_waiting"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise PromptError(f"{name}={value} must be at least 1")
        if self.chunk != bucket(self.chunk):
            raise PromptError(f"chunk={self.chunk} must be a power of two >= 32")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise PromptError(
                f"max_model_len={self.max_model_len} must be at least 2, a prompt and an answer"
            )

    def served_length(self, positions: int) -> int:
        """`max_model_len` of a model of so many positions; raises `PromptError` where it has fewer."""
        if self.max_model_len is not None and self.max_model_len > positions:
            raise PromptError(
                f"max_model_len={self.max_model_len} must be at most {positions}, the model's positions"
            )
        return self.max_model_len or positions


@dataclass(frozen=True)
class _Result:
    """Tokens on their way to the host, and whose they are: places in the arrays, and jobs.

    scored: a job, a piece of its prompt, and scores of the tokens behind those of the piece.
    """

    chosen: SampledTokens
    jobs: tuple[tuple[int, Job], ...]
    scored: tuple[Job, PrefillChunk, Scores] | None = None

    def __post_init__(self) -> None:
        for array in jax.tree.leaves((self.chosen, self.scored and self.scored[2])):
            array.copy_to_host_async()


class Engine:
    """Serves one model to many requests at once (`Serving`).

    An answer is that of `generate` for its request alone, greedy or drawn, whatever else is under way. (In 16
    bits sums of other shapes may round otherwise, and a tie may fall to another token.)

    Raises:
      PlanError: the model cannot be served so, with the reason; cache_tokens of a plan without pages.
      PromptError: a chunk that the plan does not take, a max_model_len above the model's positions.
      CacheMemoryError: the cache of all rows does not fit, or what steps need beside it.
    """

    def __init__(self, model: LanguageModel, config: EngineConfig | None = None):
        network = servable(model.network)
        self.model, self.config = model, config or EngineConfig()
        check_chunk(model, self.config.chunk)
        self.max_model_len = self.config.served_length(model.config.max_positions)
        warn_beyond_calibration(model, self.max_model_len, stacklevel=3)
        self._alignment = math.lcm(*(spec.alignment for spec in model.plan.layer_caches("bfloat16")))
        layout = Layout.of(
            network.device_caches,
            rows=self.config.max_sequences,
            longest=self.max_model_len,
            page=self.config.page,
            cache_tokens=self.config.cache_tokens,
            reuse=self.config.reuse,
        )
        self._runner = Runner(network, layout, chunk=self.config.chunk, steps=self.config.decode_steps)
        self._scheduler = self._new_scheduler()
        self._jobs: dict[Work, Job] = {}
        self._inbox: list[Job] = []
        self._cancelled: list[Job] = []
        self._changed = threading.Condition()
        self._closing = self._stopped = False
        self._counts = EngineStats()
        self._thread = threading.Thread(target=self._run, name="zdc-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=error is None, timeout=60)

    def submit(self, request: EngineRequest, notify: Callable[[Event], None]) -> Job:
        """`Serving.submit`."""
        check_request(self.model, self.max_model_len, request)
        job = Job(self.model, request, notify, self.cancel)
        with self._changed:
            if self._closing:
                raise Closing("the engine is closing")
            ahead = len(self._inbox) + len(self._scheduler.waiting) - len(self._scheduler.free)
            if ahead >= self.config.max_waiting:
                raise Busy(f"{self.config.max_waiting} requests wait")
            self._inbox.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Ends a job soon, unless it has ended."""
        with self._changed:
            self._cancelled.append(job)
            self._changed.notify()

    @property
    def cache_tokens(self) -> int:
        """Tokens of all requests together that the cache has room for."""
        return self._runner.layout.pages * self._runner.layout.page

    @property
    def closing(self) -> bool:
        """`Serving.closing`."""
        return self._closing

    def stats(self) -> EngineStats:
        """`Serving.stats`."""
        with self._changed:
            scheduler = self._scheduler
            running = len(scheduler.running)
            return replace(
                self._counts,
                running=running,
                waiting=len(scheduler.waiting) + len(self._inbox),
                cache_usage=1 - scheduler.pool.available / scheduler.pool.pages,
            )

    def close(self, *, drain: bool, timeout: float) -> None:
        """`Serving.close`."""
        until = time.monotonic() + timeout
        with self._changed:
            self._closing = True
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
            self.config.chunk,
            pages=layout.pages,
            page=layout.page,
            alignment=self._alignment,
            steps=self._runner.steps,
            reuse=self.config.reuse and layout.has_pages,
            tails=layout.tails,
            whole=self._runner.whole,
        )

    def _run(self) -> None:
        """The engine's thread; however it ends, nobody waits for it."""
        last = Event(finish_reason="cancelled")
        try:
            self._work()
        except BaseException as error:  # A tokenizer's panic is no `Exception`.
            logger.exception("the engine cannot go on")
            last = Event(finish_reason="error", error=f"the engine cannot go on: {error}")
        with self._changed:
            self._closing = True
            self._take_orders()
        for job in list(self._jobs.values()):
            job.tell(last)
        self._jobs.clear()

    def _work(self) -> None:
        """Until it is told to stop: while one step runs, what the step before gave is handed out."""
        pending: list[_Result] = []
        while True:
            with self._changed:
                while not (pending or self._inbox or self._cancelled or self._jobs or self._stopped):
                    self._changed.wait()
                self._take_orders()
                if self._stopped:
                    return
            try:
                if self._scheduler.victim() is not None:
                    # What it generated so far must be known.
                    self._hand_out(pending)
                    pending = []
                started = self._start(self._next_plan())
                self._hand_out(pending)
                pending = started
            except Exception as error:
                logger.exception("a step failed; requests in it end, the others go on")
                self._fail(error)
                pending = []

    def _take_orders(self) -> None:
        """New requests and cancellations, with the lock held."""
        came, cancelled = self._inbox, self._cancelled
        self._inbox, self._cancelled = [], []  # Who is told may ask again.
        for job in came:
            self._jobs[job.work] = job
            self._scheduler.add(job.work)
        for job in cancelled:
            if job.work in self._jobs:
                job.tell(Event(finish_reason="cancelled"))
                self._forget(job)

    def _next_plan(self) -> Plan | None:
        with self._changed:
            while (victim := self._scheduler.victim()) is not None:
                self._scheduler.preempt(victim)
                self._count(preemptions=1)
            return self._scheduler.plan()

    def _start(self, plan: Plan | None) -> list[_Result]:
        """Starts a step; results follow."""
        if plan is None:
            return []
        results = []
        for work in plan.changed:
            assert work.row is not None
            self._runner.set_pages(work.row, work.pages)
        for work, tail in plan.restored:
            assert work.row is not None
            self._runner.restore(work.row, tail)
        decoding, jobs = self._runner.nobody(), []
        for work in plan.decode:
            assert work.row is not None
            jobs.append((work.row, job := self._jobs[work]))
            decoding.put(work.row, job.numbers, job.choice)

        def scored(chunk):
            return self._jobs[chunk.work].wants_scores(chunk.begin)

        for group in self._runner.grouping.groups(plan.chunks, scored):
            chosen, scores, decoded = self._runner.read(
                [self._chunk_inputs(chunk) for chunk in group], decoding
            )
            results += self._read(group, chosen, scores)
            if decoded is not None:
                results.append(_Result(decoded, tuple(jobs)))
                decoding, jobs = self._runner.nobody(), []
        if jobs:
            found = self._runner.decode(decoding, plan.steps)
            results += [_Result(chosen, tuple(jobs)) for chosen in found]
        return results

    def _chunk_inputs(self, chunk: PrefillChunk) -> ChunkInputs:
        """What the runner is to read."""
        work, job = chunk.work, self._jobs[chunk.work]
        assert work.row is not None
        job.queued = job.queued or time.monotonic() - job.came
        if chunk.begin == work.cached:
            asked = len(work.text)
            self._count(prompt_tokens=asked, prefix_queries=asked, prefix_hits=work.cached)
        tokens, following = work.text[chunk.begin : chunk.end], work.text[chunk.end :][:1] or (0,)
        wanted = following[0] if job.wants_scores(chunk.begin) else None
        return ChunkInputs(work.row, tokens, chunk.begin, chunk.last, job.numbers, job.choice, wanted)

    def _read(
        self, chunks: Sequence[PrefillChunk], chosen: list[SampledTokens], scores: Scores | None
    ) -> list[_Result]:
        """Results of pieces that are being read.

        They are waited for, even where nothing is generated: else many would be started.
        """
        results = []
        for chunk, found in zip(chunks, chosen, strict=True):
            job = self._jobs[chunk.work]
            if chunk.tail is not None:
                assert chunk.work.row is not None
                self._runner.keep(chunk.work.row, chunk.tail)
            scored = None if scores is None else (job, chunk, scores)
            results.append(_Result(found, ((0, job),) if chunk.last else (), scored))
        return results

    def _hand_out(self, results: list[_Result]) -> None:
        """Waits for tokens and gives them to those who asked."""
        for result in results:
            chosen = jax.device_get(result.chosen)
            if result.scored is not None:
                reader, chunk, scores = result.scored
                reader.score(chunk.begin, chunk.end, jax.device_get(scores))
            takers = [(place, job) for place, job in result.jobs if not job.ended and chosen.counts[place]]
            self._count(generation_tokens=sum(int(chosen.counts[place]) for place, _ in takers))
            for place, job in takers:
                tokens = chosen.tokens[place, : chosen.counts[place]].tolist()
                parts = chosen.tokens, *chosen[3:]
                try:
                    known = job.take(tokens, jax.tree.map(lambda x, at=place: x[at], Token(*parts)))
                except PromptError as error:
                    job.tell(Event(finish_reason="error", error=str(error)))
                    known = False
                if job.ended:
                    self._forget(job, keep=int(chosen.lengths[place]) if known else 0)

    def _forget(self, job: Job, keep: int = 0) -> None:
        """keep: tokens that its pages hold for others."""
        with self._changed:
            self._scheduler.end(job.work, keep)
            del self._jobs[job.work]

    def _fail(self, error: Exception) -> None:
        """Ends all that had a row, and begins with an empty cache."""
        with self._changed:
            waiting, running = self._scheduler.waiting, list(self._scheduler.running.values())
            self._scheduler = self._new_scheduler()
            for work in waiting:
                self._scheduler.add(work)
        for work in running:
            self._jobs.pop(work).tell(Event(finish_reason="error", error=f"{type(error).__name__}: {error}"))
        self._runner.reset()

    def _count(self, **more: int) -> None:
        with self._changed:
            counts = self._counts
            sums = {name: getattr(counts, name) + number for name, number in more.items()}
            self._counts = replace(counts, **sums)

"""Loads of the serving comparison: closed loops of equal requests, and slices of traces."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.serving.replay import Arrival, take_slice

LOOP = re.compile(r"([1-9]\d*)/([1-9]\d*)@([1-9]\d*)(?:x([1-9]\d*))?")


@dataclass(frozen=True)
class Load:
    """Requests to send to a server.

    Attributes:
      name: name in results and, as `file_name`, in names of files.
      requests: requests in order; their times are seconds since the start.
      clients: clients of a closed loop; None where requests come at their times.
      left_out: requests of the trace that were longer than the context.
    """

    name: str
    requests: tuple[Arrival, ...]
    clients: int | None = None
    left_out: int = 0

    @property
    def file_name(self) -> str:
        """Name without characters that paths reserve."""
        return re.sub("[/@]", "-", self.name)

    def take_first(self, count: int, most_tokens: int) -> "Load":
        """Return the first requests with short answers, all at once if they have times."""
        first = (
            replace(arrival, time=0.0, answer=min(arrival.answer, most_tokens))
            for arrival in self.requests[:count]
        )
        return replace(self, requests=tuple(first))


def parse_loop(text: str) -> Load:
    """Return the closed loop `PROMPT/OUTPUT@CLIENTSxREQUESTS`; each client sends `REQUESTS`, by default 8.

    Raises:
      SystemExit: the text has another form.
    """
    if (parts := LOOP.fullmatch(text)) is None:
        raise SystemExit(
            f"--loop {text}: must be PROMPT/OUTPUT@CLIENTS or PROMPT/OUTPUT@CLIENTSxREQUESTS in whole "
            "numbers above 0, such as 8000/128@8 or 8000/128@8x2"
        )
    prompt, answer, clients, each = map(int, parts.groups(default="8"))
    requests = (Arrival(0.0, prompt, answer),) * (clients * each)
    return Load(f"{prompt}/{answer}@{clients}", requests, clients)


def parse_loops(texts: Sequence[str], max_model_len: int) -> list[Load]:
    """Return closed loops (`parse_loop`) whose requests have at most `max_model_len` tokens.

    Raises:
      SystemExit: a text has another form, or its requests are longer.
    """
    loads = [parse_loop(text) for text in texts]
    for load in loads:
        if (longest := load.requests[0].prompt + load.requests[0].answer) > max_model_len:
            raise SystemExit(
                f"--loop {load.name}: has {longest} tokens, more than --max-model-len {max_model_len}; "
                "raise it"
            )
    return loads


def slice_trace(
    trace: Path, *, start: float, seconds: float, rates: Sequence[float], max_model_len: int
) -> list[Load]:
    """Return a load for each rate: one slice of a trace, faster or slower than recorded.

    Args:
      trace: file of Azure or Mooncake (`benchmarks.serving.replay.arrivals`).
      start: start of the slice in seconds.
      seconds: length of the slice as recorded.
      rates: mean rates in requests per second.
      max_model_len: most tokens of a prompt and its answer; longer requests are left out.

    Raises:
      SystemExit: no file, another kind of file, a rate that is not above 0, or a slice without requests.
    """
    if wrong := [rate for rate in rates if not 0 < rate < float("inf")]:
        raise SystemExit(f"--rates {wrong[0]:g}: must be above 0 requests per second")
    try:
        inside = take_slice(trace, start, seconds)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--trace {trace}: {error}") from error
    fitting = [each for each in inside if each.prompt + each.answer <= max_model_len]
    if not fitting:
        raise SystemExit(
            f"--start {start:g} --seconds {seconds:g}: {trace} has no request there of at most "
            f"--max-model-len {max_model_len} tokens; choose another slice"
        )
    loads = []
    for rate in rates:
        speed = rate * seconds / len(fitting)
        name = f"{trace.name.partition('.')[0]}-{start:g}-{seconds:g}s@{rate:g}"
        requests = (replace(each, time=each.time / speed) for each in fitting)
        loads.append(Load(name, tuple(requests), left_out=len(inside) - len(fitting)))
    return loads

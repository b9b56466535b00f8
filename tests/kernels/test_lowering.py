"""Launches that are lowered once for several programs, and loaded by later processes."""

import re
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import lowering, lowering_processes
from kernels_pallas.lowering import lower_once
from kernels_pallas.lowering_processes import Processes
from kernels_pallas.rope.post_rope import post_rope


class Pair(NamedTuple):
    """Two arrays."""

    total: jax.Array
    parts: list[jax.Array]


@pytest.fixture
def traces(monkeypatch):
    """Return a list that grows with each trace of `launch`, which is lowered for this machine."""
    monkeypatch.setattr(lowering, "PLATFORM", "cpu")
    monkeypatch.setattr(lowering, "takes_copies", lambda: True)
    monkeypatch.setattr(lowering, "processes", Processes(0))
    forget()
    found.clear()
    yield found
    forget()


found: list[tuple[int, ...]] = []


def forget() -> None:
    """Forget what this process lowered and traced, as a new process has."""
    lowering._launches.clear()
    launch.jitted.clear_cache()


@lower_once("factor", "interpret")
def launch(x, others, *, bias=None, factor=2, interpret=False) -> Pair:
    found.append(x.shape)
    total = factor * x + sum(others)
    return Pair(total if bias is None else total + bias, [x, others[0]])


def plain(x, others, bias=0, factor=2):
    return factor * x + sum(others) + bias


def test_programs_with_equal_shapes_share_one_lowering(traces):
    x, others = jnp.arange(6.0), [jnp.ones(6), jnp.full(6, 3.0)]
    for scale in (1.0, 2.0):  # A new function each time, so two programs.
        pair = jax.jit(lambda x, others, scale=scale: launch(scale * x, others))(x, others)
        np.testing.assert_array_equal(pair.total, plain(scale * x, others))
        np.testing.assert_array_equal(pair.parts[1], others[0])
    assert traces == [(6,)]
    np.testing.assert_array_equal(launch(x, others).total, plain(x, others))
    assert len(traces) == 1
    np.testing.assert_array_equal(launch(x, others, factor=5).total, plain(x, others, factor=5))
    np.testing.assert_array_equal(launch(x, others=others, bias=x).total, plain(x, others, bias=x))
    np.testing.assert_array_equal(launch(x[:2], [x[:2]]).total, plain(x[:2], [x[:2]]))
    assert len(traces) == 4


def test_the_interpreter_takes_no_copies(traces):
    x = jnp.arange(6.0)
    launch(x, [x], interpret=True)
    assert not lowering._launches


def test_a_cpu_takes_no_copies_and_neither_does_a_mesh(monkeypatch):
    assert not lowering.takes_copies()
    monkeypatch.setattr(lowering.jax, "default_backend", lambda: "gpu")
    assert lowering.takes_copies()
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        assert not lowering.takes_copies()


def test_launches_are_kept_on_disk(traces, tmp_path, monkeypatch):
    monkeypatch.setattr(lowering, "_find_file", lambda name: tmp_path / "kernels" / "version" / "one")
    x = jnp.arange(6.0)
    file = tmp_path / "kernels" / "version" / "one"
    first = launch(x, [x])
    assert file.exists()
    forget()
    second = launch(x, [x])
    assert len(traces) == 1
    assert isinstance(second, Pair)
    for ours, theirs in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    file.write_bytes(file.read_bytes()[:100])  # A damaged file is written again.
    forget()
    np.testing.assert_array_equal(launch(x, [x]).total, first.total)
    assert len(traces) == 2
    assert len(file.read_bytes()) > 100


def test_files_of_launches(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        one, again, other = (lowering._find_file(name) for name in ("one", "one", "other"))
        jax.config.update("jax_compilation_cache_dir", None)
        assert lowering._find_file("one") is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert one == again
    assert one.parent == other.parent
    assert one != other
    assert one.is_relative_to(tmp_path / lowering.FOLDER)


def wait_for_end(processes: Processes) -> None:
    for thread in list(processes._threads):
        thread.join()


@pytest.fixture
def replies(monkeypatch):
    """Lower launches in one process, and return a list of its replies."""
    found, ask = [], lowering_processes._ask

    def record(process, request):
        found.append(ask(process, request))
        return found[-1]

    monkeypatch.setattr(lowering_processes, "_ask", record)
    monkeypatch.setattr(lowering_processes, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(lowering_processes, "LEAST_WAITING", 1)
    processes = Processes(1)
    # As if it had started: what is asked waits for it.
    monkeypatch.setattr(processes, "_ready", 1)
    monkeypatch.setattr(lowering, "processes", processes)
    yield found
    wait_for_end(processes)


def test_another_process_lowers_launches_and_this_one_the_rest(traces, replies, monkeypatch):
    x, factors = jnp.arange(6.0), (2, 3, 3)
    with ThreadPoolExecutor(3) as threads:
        pairs = list(threads.map(lambda factor: launch(x, [x], factor=factor), factors))
    assert len(replies) == 2  # Threads share what is equal.
    assert all(replies)
    assert traces == [(6,), (6,)]  # Traced here for the shapes of results.
    for pair, factor in zip(pairs, factors, strict=True):
        np.testing.assert_array_equal(pair.total, plain(x, [x], factor=factor))
        assert isinstance(pair, Pair)
    monkeypatch.setattr(launch.jitted, "__qualname__", "no_such_launch", raising=False)
    np.testing.assert_array_equal(launch(x, [x], factor=4).total, plain(x, [x], factor=4))
    assert replies[2] is None


class Ended:
    """Process of which only its end is seen."""

    is_killed = False

    def kill(self) -> None:
        self.is_killed = True

    def communicate(self) -> None:
        assert self.is_killed


@pytest.fixture
def started(monkeypatch):
    """Return a list of started processes, which reply to numbers with themselves and fail otherwise."""
    found: list[Ended] = []
    monkeypatch.setattr(lowering_processes, "_start", lambda: found.append(Ended()) or found[-1])
    monkeypatch.setattr(lowering_processes, "_ask", lambda process, request: +request)
    monkeypatch.setattr(lowering_processes, "LEAST_WAITING", 1)
    return found


def test_a_process_that_fails_is_replaced_and_an_idle_one_ends(started, monkeypatch):
    processes = Processes(1)
    for request, reply in ((1, 1), ("killed", None), (2, 2)):
        assert processes.submit(request).result() == reply
    assert [process.is_killed for process in started] == [True, False]
    monkeypatch.setattr(lowering_processes, "IDLE_SECONDS", 0.0)
    assert processes.submit(3).result() == 3
    wait_for_end(processes)
    assert [process.is_killed for process in started] == [True, True]
    assert processes.submit(4).result() == 4
    assert len(started) == 3
    wait_for_end(processes)


def test_there_are_no_more_processes_than_allowed(started, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(lowering_processes, "_ask", lambda process, request: goes_on.wait(60) and request)
    monkeypatch.setattr(lowering_processes, "IDLE_SECONDS", 0.0)
    processes = Processes(2)
    futures = list(map(processes.submit, range(5)))
    while len(started) < 2:
        time.sleep(0.001)
    goes_on.set()
    assert [future.result(60) for future in futures] == [0, 1, 2, 3, 4]
    wait_for_end(processes)
    assert len(started) == 2


def test_nobody_waits_for_a_process_that_has_not_started(started, monkeypatch):
    starts, goes_on = threading.Event(), threading.Event()

    def start() -> Ended:
        starts.set()
        assert goes_on.wait(60)
        started.append(Ended())
        return started[-1]

    monkeypatch.setattr(lowering_processes, "_start", start)
    monkeypatch.setattr(lowering_processes, "LEAST_WAITING", 2)
    processes = Processes(1)
    assert processes.take(processes.submit(1)) is None
    assert not processes._threads  # One request starts none, and it is withdrawn.
    first, second = processes.submit(2), processes.submit(3)
    assert starts.wait(60)
    assert processes.take(first) is None
    monkeypatch.setattr(lowering_processes, "IDLE_SECONDS", 0.0)
    goes_on.set()
    assert second.result() == 3
    assert processes.take(second) == 3
    wait_for_end(processes)
    assert len(started) == 1


def test_launches_are_lowered_here_if_no_process_starts(started, monkeypatch):
    monkeypatch.setattr(lowering_processes, "_start", lambda: 1 / 0)
    monkeypatch.setattr(lowering_processes, "IDLE_SECONDS", 0.0)
    processes = Processes(1)
    assert processes.take(processes.submit(1)) is None
    wait_for_end(processes)


def test_programs_are_traced_before_their_launches_are_lowered(traces, monkeypatch):
    x, asked = jnp.arange(6.0), []
    monkeypatch.setattr(lowering, "_submit", lambda *_: asked.append(Future()) or asked[-1])
    traced = jax.jit(lambda x: launch(launch(x, [x]).total, [x], factor=5)).trace(x)
    assert len(asked) == 2
    for future in asked:
        future.set_result(None)
    np.testing.assert_array_equal(traced.lower().compile()(x).total, plain(plain(x, [x]), [x], factor=5))


def test_a_launch_that_fails_is_tried_again(traces):
    with pytest.raises(TypeError, match="incompatible shapes"):
        launch(jnp.zeros(6), [jnp.zeros(5)])
    with pytest.raises(TypeError, match="incompatible shapes"):
        launch(jnp.zeros(6), [jnp.zeros(5)])
    assert traces == [(6,), (6,)]


def rotate_on_gpu():
    """Return rotated vectors, and the lowered launch without the lines of the sources that it comes from."""
    q, k = jnp.ones((1, 64, 4, 64), jnp.bfloat16), jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    angles, rotation = jnp.ones((1, 64, 32)), jnp.ones((2, 64, 64), jnp.bfloat16)
    lowering._launches.clear()
    found = post_rope(q, k, angles, angles, rotation, rotation)
    (made,) = lowering._launches.values()
    text = made.lowered.exported.mlir_module()
    return np.asarray(found[0]), re.sub(r"(^|\n)#loc[^\n]*| loc\([^)]*\)", "", text)


def rotate_without_processes():
    lowering.processes = Processes(0)
    return rotate_on_gpu()


@pytest.mark.gpu
def test_a_process_without_a_gpu_lowers_as_one_with_it(replies):
    without_gpu, text_without_gpu = rotate_on_gpu()
    assert len(replies) == 1
    assert all(replies)
    # A new process, since the text counts the kernels of one name that a process has lowered.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as new:
        with_gpu, text = new.submit(rotate_without_processes).result()
    assert text == text_without_gpu
    np.testing.assert_array_equal(with_gpu, without_gpu)

"""Several processes on one mesh, one a host or one a GPU: they meet, or say who is missing."""

import socket
import time
from contextlib import closing, suppress

import jax
from jax._src.clusters import ClusterEnv

from zdc_jax.errors import ProcessError

_PRESENT = b"all present"
_LONGEST_LINE = 256


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 300.0,
) -> None:
    """Makes this process one of several; call it before anything else of JAX.

    After it `jax.devices()` are those of all processes, in the same order on each, and all must run the same
    calls. On Slurm and Open MPI, as JAX detects them, a process has one GPU; with all three arguments given,
    all that it sees.

    Args:
      coordinator: HOST:PORT of process 0, a free port; num_processes, process_id: how many there are, and
        which this is. What is None is taken from Slurm, Open MPI or Kubernetes (with its Python client).
      timeout: seconds to wait for the others.

    Raises:
      ProcessError: an argument is missing and cannot be detected, or impossible; processes that have not
        come within the timeout, by number.
    """
    local_devices = None
    if None in (coordinator, num_processes, process_id):
        coordinator, num_processes, process_id, local_devices = (
            ClusterEnv.auto_detect_unset_distributed_params(
                coordinator, num_processes, process_id, None, None, round(timeout)
            )
        )
    if coordinator is None or num_processes is None or process_id is None:
        raise ProcessError(
            f"{coordinator=}, {num_processes=}, {process_id=}: give all three; this is no job of Slurm, "
            "Open MPI or Kubernetes that says them"
        )
    if not 0 <= process_id < num_processes:
        raise ProcessError(f"{process_id=} must be at least 0 and below {num_processes=}")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ProcessError(f"{coordinator=} must be HOST:PORT")
    meet(host.strip("[]"), int(port), num_processes, process_id, timeout)
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=round(timeout),
    )


def meet(host: str, port: int, num_processes: int, process_id: int, timeout: float) -> None:
    """Returns when all processes have called it; where they have not, all that have raise.

    JAX itself ends a process that waits in vain, and does not say for whom. The port is free again when this
    returns.

    Raises:
      ProcessError: names the processes that are missing after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    if process_id == 0:
        _call_roll(port, num_processes, timeout, deadline)
        return
    answer = _answer_roll(host, port, process_id, timeout, deadline)
    if answer != _PRESENT:
        raise ProcessError(answer.decode())


def _call_roll(port: int, num_processes: int, timeout: float, deadline: float) -> None:
    present: dict[int, socket.socket] = {}
    try:
        with closing(_server(port)) as server:
            while len(present) < num_processes - 1 and (left := deadline - time.monotonic()) > 0:
                if (caller := _next_caller(server, left, num_processes)) is not None:
                    number, connection = caller
                    if number in present:  # Who calls again has lost the connection, or died and come back.
                        present.pop(number).close()
                    present[number] = connection
        missing = [str(index) for index in range(1, num_processes) if index not in present]
        error = f"process {', '.join(missing)} of {num_processes} did not come within {timeout:g} s"
        for connection in present.values():
            connection.sendall(error.encode() if missing else _PRESENT)
    finally:
        for connection in present.values():
            connection.close()
    if missing:
        raise ProcessError(error)


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _next_caller(server: socket.socket, left: float, num_processes: int) -> tuple[int, socket.socket] | None:
    """Number and connection of another process; None for strangers, and when the time is over."""
    server.settimeout(left)
    try:
        connection, _ = server.accept()
    except OSError:
        return None
    with suppress(OSError):
        connection.settimeout(min(left, 5.0))
        line = connection.recv(_LONGEST_LINE)
        if line.isdigit() and 0 < int(line) < num_processes:
            return int(line), connection
    connection.close()
    return None


def _answer_roll(host: str, port: int, process_id: int, timeout: float, deadline: float) -> bytes:
    """What process 0 says when all have come, or when its time is over."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connection.sendall(str(process_id).encode())
                # Process 0 may have begun to wait only now.
                connection.settimeout(timeout + 5)
                if answer := connection.recv(_LONGEST_LINE):
                    return answer
        except OSError:
            pass
        time.sleep(0.1)
    raise ProcessError(f"process 0 did not come to {host}:{port} within {timeout:g} s")

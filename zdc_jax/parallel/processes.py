"""Start-up of several processes on one mesh, with an error that names the missing ones."""

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
    """Make this process one of several; call it before anything else of JAX.

    Afterwards `jax.devices()` lists the devices of all processes, in the same order on each. All processes
    must then run the same calls. On Slurm and Open MPI, as detected by JAX, a process has one GPU. With all
    three arguments given, it has all GPUs that it sees.

    Args:
      coordinator: HOST:PORT of process 0, a free port. An argument that is None is detected from Slurm, Open
        MPI or Kubernetes (with its Python client).
      num_processes: number of processes.
      process_id: index of this process.
      timeout: seconds to wait for the other processes.

    Raises:
      ProcessError: an argument is invalid, or missing and not detected. Or processes did not connect within
        the timeout; the message lists their indices.
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
            f"{coordinator=}, {num_processes=}, {process_id=}: give all three; "
            "they could not be detected from Slurm, Open MPI or Kubernetes"
        )
    if not 0 <= process_id < num_processes:
        raise ProcessError(f"{process_id=}: must be at least 0 and below {num_processes=}")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ProcessError(f"{coordinator=}: must be HOST:PORT")
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
    """Wait until all processes have called this function; raise in all of them if some do not.

    JAX itself aborts a process that waits in vain, without naming the missing ones. The port is free again on
    return.

    Raises:
      ProcessError: processes are missing after `timeout` seconds; the message lists their indices.
    """
    deadline = time.monotonic() + timeout
    if process_id == 0:
        _collect_processes(port, num_processes, timeout, deadline)
        return
    answer = _report_to_coordinator(host, port, process_id, timeout, deadline)
    if answer != _PRESENT:
        raise ProcessError(answer.decode())


def _collect_processes(port: int, num_processes: int, timeout: float, deadline: float) -> None:
    present: dict[int, socket.socket] = {}
    try:
        with closing(_create_server(port)) as server:
            while len(present) < num_processes - 1 and (left := deadline - time.monotonic()) > 0:
                if (caller := _accept_process(server, left, num_processes)) is not None:
                    number, connection = caller
                    if number in present:  # The process lost its connection or was restarted.
                        present.pop(number).close()
                    present[number] = connection
        missing = [str(index) for index in range(1, num_processes) if index not in present]
        error = f"{num_processes=}: process {', '.join(missing)} did not connect within {timeout:g} s"
        for connection in present.values():
            connection.sendall(error.encode() if missing else _PRESENT)
    finally:
        for connection in present.values():
            connection.close()
    if missing:
        raise ProcessError(error)


def _create_server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _accept_process(
    server: socket.socket, left: float, num_processes: int
) -> tuple[int, socket.socket] | None:
    """Return index and connection of another process, or None for a stranger or after the timeout."""
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


def _report_to_coordinator(host: str, port: int, process_id: int, timeout: float, deadline: float) -> bytes:
    """Return the answer of process 0, once all processes have connected or its time is up."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connection.sendall(str(process_id).encode())
                # Process 0 may only now start its own timeout.
                connection.settimeout(timeout + 5)
                if answer := connection.recv(_LONGEST_LINE):
                    return answer
        except OSError:
            pass
        time.sleep(0.1)
    raise ProcessError(f"coordinator={host}:{port}: process 0 did not answer within {timeout:g} s")

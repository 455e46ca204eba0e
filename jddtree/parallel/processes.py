"""Several processes as one program: start-up, who prints, and how one rank's failure ends all.

Each process (one per host or per GPU) runs the same command. Collectives wait for every rank, so a rank that
fails alone would leave the others waiting: it posts its message to the coordinator, and every rank watches
for one.
"""

import os
import sys
import threading
import time

import jax
from jax._src import distributed  # the coordinator's key-value store has no public name

from jddtree.errors import UserError
from jddtree.streams import answer_stream

FAILURE_KEY = "jddtree/failure"
SHARED_KEY = "jddtree/shared/"
FOREVER_MS = 1000 * 60 * 60 * 24 * 30
ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start(
    coordinator: str | None = None, processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes; does nothing for a single one.

    coordinator: HOST:PORT of process 0; what is None comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES
    and JAX_PROCESS_ID. Must run before JAX looks for devices. Raises UserError when only some of the three
    are known, or when the others cannot be reached.
    """
    given = (coordinator, processes, process_id)
    address, count, index = (
        value if value is not None else os.environ.get(name)
        for value, name in zip(given, ENVIRONMENT, strict=True)
    )
    if address is None and count is None and index is None:
        return
    if address is None or count is None or index is None:
        raise UserError(
            f"coordinator is {address}, processes {count} and process id {index}, but all three are "
            "needed; give "
            f"--coordinator HOST:PORT --processes N --process-id I, or {', '.join(ENVIRONMENT)}"
        )
    _keep_native_output_off_stdout()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(str(address), int(count), int(index))
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"process {index} of {count} could not join {address}: {str(error).splitlines()[0]}"
        ) from None
    threading.Thread(target=_watch, daemon=True).start()


def is_first() -> bool:
    """Whether this process is the one that prints."""
    return jax.process_index() == 0


def from_first(name: str, value: str | None = None) -> str:
    """What the first process gives as `value` under a name that is used once; the others wait for it.

    Theirs is dropped. Raises ValueError when the first process gives nothing.
    """
    client = distributed.global_state.client
    if not is_first() and client is not None:
        return client.blocking_key_value_get(SHARED_KEY + name, FOREVER_MS)
    if value is None:
        raise ValueError(f"the first process must give {name}")
    if client is not None:
        client.key_value_set(SHARED_KEY + name, value)
    return value


def fail(message: str) -> None:
    """Tell the other processes that this one cannot go on, and end it with 1; does nothing for a single
    process.
    """
    if (client := distributed.global_state.client) is not None:
        client.key_value_set(FAILURE_KEY, f"{jax.process_index()} {message}", allow_overwrite=True)
        _end()


def finish() -> None:
    """Leave together with the other processes; does nothing for a single one."""
    if distributed.global_state.client is not None:
        sys.stdout.flush()
        jax.distributed.shutdown()


def _keep_native_output_off_stdout() -> None:
    """Gloo reports its connections on stdout, which belongs to the answer: send what is not Python's to
    stderr
    """
    answer = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = answer_stream(answer, sys.stdout)


def _watch() -> None:
    """End this process with another one's message"""
    client = distributed.global_state.client
    assert client is not None  # start() has just joined
    try:
        index, message = client.blocking_key_value_get(FAILURE_KEY, FOREVER_MS).split(" ", 1)
    except RuntimeError:
        return  # the coordinator went away: this run is over
    if int(index) != jax.process_index():
        print(f"error: process {index} failed: {message}", file=sys.stderr)
        _end()


def _end() -> None:
    """End this process at once, the coordinator last: an orderly end would wait for ranks that wait for this
    one
    """
    time.sleep(2.0 if jax.process_index() == 0 else 0.2)
    sys.stderr.flush()
    os._exit(1)

"""The inside of the sandbox: limits and confines its own process, then runs the job's program.

Run by `execution.run_code` as a script in a fresh interpreter (`python -I -B confinement.py FD`), never
imported; it uses only the standard library. It reads `job.json` from its folder, deletes it, and writes JSON
lines to the pipe FD: {"layers": [...]} before the program starts, then {"nonce": ..., "passed": ..., "note":
...} once it has ended.

In a process namespace the program is a grandchild; this process then ends as the program did, with 128 + the
number of the signal that killed it.
"""

import contextlib
import ctypes
import json
import os
import resource
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

# Numbers from Linux: include/uapi/linux/{prctl,seccomp,landlock,sched,capability}.h and the system call
# tables.
DIE_WITH_PARENT, SET_SECCOMP, NO_NEW_PRIVILEGES, FILTER_MODE = 1, 22, 38, 2
NEW_MEMORY, NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x08000000, 0x10000000, 0x20000000, 0x40000000
CAPABILITIES_VERSION = 0x20080522
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITE_RIGHTS = 0x1FF2  # write, remove and make, of files, folders, links, sockets and devices
MOVE_RIGHT = 0x2000  # between folders; from version 2 on
TRUNCATE_RIGHT = 0x4000  # from version 3 on
SIGNALS_AND_SOCKETS = 3  # to processes outside; from version 6 on
KILL = 9


def limit_resources(job: dict[str, Any]) -> None:
    """Lower this process's limits to the job's; a limit that the system does not have or refuses is left
    out.
    """
    limits = {
        "RLIMIT_CPU": job["processor_seconds"],
        "RLIMIT_AS": job["memory_bytes"],
        "RLIMIT_FSIZE": job["file_bytes"],
        "RLIMIT_NPROC": job["processes"],
        "RLIMIT_NOFILE": job["open_files"],
        "RLIMIT_CORE": 0,
    }
    for name, value in limits.items():
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))


def enter_namespaces(libc: ctypes.CDLL) -> list[str]:
    """Move into namespaces of our own, and go on in a new process there; the names of those that the system
    offers.
    """
    if not hasattr(libc, "unshare"):
        return []
    if libc.unshare(NEW_USER | NEW_NETWORK | NEW_PROCESSES | NEW_MEMORY) == 0:
        # The first process of the namespace: it ignores signals, and all others end with it.
        go_on_in_child(libc)
        go_on_in_child(libc)
        return ["network namespace", "process namespace"]
    return ["network namespace"] if libc.unshare(NEW_USER | NEW_NETWORK) == 0 else []


def go_on_in_child(libc: ctypes.CDLL) -> None:
    """Return in a child that dies with this process; this one waits and ends as the child did."""
    libc.prctl(DIE_WITH_PARENT, KILL, 0, 0, 0)
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    libc.prctl(DIE_WITH_PARENT, KILL, 0, 0, 0)


def fence(libc: ctypes.CDLL) -> list[str]:
    """Allow changes of files only below the current folder and to the null device, and no signals to
    processes outside (Landlock, Linux 5.13 and 6.12); the names of the fences that hold.
    """
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return []
    rights = WRITE_RIGHTS | (MOVE_RIGHT if version >= 2 else 0) | (TRUNCATE_RIGHT if version >= 3 else 0)
    handled = struct.pack("=QQQ", rights, 0, SIGNALS_AND_SOCKETS if version >= 6 else 0)
    rules = libc.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    for path, allowed in ((".", rights), (os.devnull, rights & (2 | TRUNCATE_RIGHT))):
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, place)
        if libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0) != 0:
            return []
        os.close(place)
    if libc.syscall(LANDLOCK_RESTRICT, rules, 0) != 0:
        return []
    return ["write fence", "signal fence"] if version >= 6 else ["write fence"]


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up what makes root more than a user: signals to everybody, other priorities, higher limits."""
    libc.capset(struct.pack("=Ii", CAPABILITIES_VERSION, 0), bytes(24))


def call_filter() -> Callable[[str, int], bytes | None]:
    """`filter_program` of the file beside this one, which no import finds here."""
    module = types.ModuleType("call_filter")
    with open(os.path.join(os.path.dirname(__file__), "call_filter.py"), encoding="utf-8") as file:
        exec(file.read(), module.__dict__)
    return module.filter_program


def filter_calls(libc: ctypes.CDLL) -> bool:
    """Refuse the system calls of `call_filter.py` (seccomp; x86-64 and 64-bit Arm)."""
    instructions = call_filter()(os.uname().machine, os.getpid())
    if instructions is None:
        return False
    code = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(code))
    return bool(libc.prctl(SET_SECCOMP, FILTER_MODE, program, 0, 0) == 0)


def confine() -> list[str]:
    """Apply every layer that this system offers; the names of those that hold."""
    if not sys.platform.startswith("linux"):
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    layers = enter_namespaces(libc)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return layers
    layers += fence(libc)
    drop_capabilities(libc)
    return layers + (["call filter"] if filter_calls(libc) else [])


def describe(error: BaseException) -> str:
    """The error in at most 200 characters; its text is the program's own and may itself fail."""
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except BaseException:
        return type(error).__name__


def run(source: str) -> str:
    """Run the program as a module that is not `__main__`; empty if it reached its end, otherwise why it did
    not.
    """
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except SystemExit as error:
        return f"left with SystemExit({error.code!r})"[:200] + " before its end"
    except BaseException as error:
        return describe(error)
    return ""


def main() -> None:
    report = int(sys.argv[1])
    os.set_inheritable(report, False)
    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)
    os.remove("job.json")
    layers = confine()
    limit_resources(job)  # after it, so that the limit on processes counts those of the namespace only
    os.write(report, (json.dumps({"layers": layers}) + "\n").encode())
    note = run(job["source"])
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os.write(report, (json.dumps({"nonce": job["nonce"], "passed": not note, "note": note}) + "\n").encode())
    os._exit(0)  # no exit handler and no thread of the program runs after the verdict


if __name__ == "__main__":
    main()

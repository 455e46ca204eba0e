"""The inside of the sandbox: limits and confines its own process, then runs the job's program.

Run by `sandbox.run_code` as a script in a fresh interpreter (`python -I -B guard.py FD`), never imported; it imports
only the standard library. It reads `job.json` from its folder, deletes it, and writes JSON lines to the pipe FD:
{"layers": [...]} before the program starts, then {"nonce": ..., "passed": ..., "note": ...} once it has ended.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import struct
import sys
import types
from typing import Any

# Numbers from Linux: include/uapi/linux/{prctl,seccomp,landlock,sched,audit}.h and the system call tables.
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER_MODE = 38, 22, 2
NEW_USER, NEW_NETWORK, THREAD_FLAG = 0x10000000, 0x40000000, 0x10000
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITE_RIGHTS = 0x1FF2  # write, remove and make, of files, folders, links, sockets and devices
TRUNCATE_RIGHT = 0x4000  # from version 3 on
LOAD, JUMP_EQUAL, JUMP_BITS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NOT_PERMITTED, NOT_IMPLEMENTED = 1, 38
# clone; then fork, vfork, kill, tkill, pidfd_open, pidfd_send_signal, execve, execveat, socket, ptrace,
# process_vm_writev, unshare, mount, setns, io_uring_setup
CALLS = {
    "x86_64": (0xC000003E, 56, (57, 58, 62, 200, 434, 424, 59, 322, 41, 101, 311, 272, 165, 308, 425)),
    "aarch64": (0xC00000B7, 220, (129, 130, 434, 424, 221, 281, 198, 117, 271, 97, 40, 268, 425)),
}
CLONE3 = 435


def limit_resources(job: dict[str, Any]) -> None:
    """Lower this process's limits to the job's; a limit that the system does not have or refuses is left out."""
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


def leave_network(libc: ctypes.CDLL) -> bool:
    """Move into a user and a network namespace of our own, which has no connected interface."""
    return hasattr(libc, "unshare") and libc.unshare(NEW_USER | NEW_NETWORK) == 0


def fence_writes(libc: ctypes.CDLL) -> bool:
    """Allow changes of files only below the current folder and to the null device (Landlock, Linux 5.13)."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = WRITE_RIGHTS | (TRUNCATE_RIGHT if version >= 3 else 0)
    handled = struct.pack("=Q", rights)
    rules = libc.syscall(LANDLOCK_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    for path, allowed in ((".", rights), (os.devnull, rights & (2 | TRUNCATE_RIGHT))):
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, place)
        if libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0) != 0:
            return False
        os.close(place)
    return bool(libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0)


def call_filter(architecture: int, clone: int, refused: tuple[int, ...]) -> bytes:
    """The program for the kernel: refuse the calls listed, allow threads but no processes, allow everything else."""
    program = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, architecture), (RETURN, 0, 0, REFUSE | NOT_PERMITTED)]
    program += [(LOAD, 0, 0, 0)]
    for call in refused:
        program += [(JUMP_EQUAL, 0, 1, call), (RETURN, 0, 0, REFUSE | NOT_PERMITTED)]
    program += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, REFUSE | NOT_IMPLEMENTED)]  # libc falls back to clone
    program += [(JUMP_EQUAL, 0, 3, clone), (LOAD, 0, 0, 16), (JUMP_BITS, 1, 0, THREAD_FLAG)]
    program += [(RETURN, 0, 0, REFUSE | NOT_PERMITTED), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def filter_calls(libc: ctypes.CDLL) -> bool:
    """Refuse system calls that start processes, signal others or open sockets (seccomp; x86-64 and 64-bit Arm)."""
    if platform.machine() not in CALLS:
        return False
    code = ctypes.create_string_buffer(call_filter(*CALLS[platform.machine()]))
    program = struct.pack("@HP", (len(code) - 1) // 8, ctypes.addressof(code))
    return bool(libc.prctl(SET_SECCOMP, FILTER_MODE, program, 0, 0) == 0)


def confine() -> list[str]:
    """Apply every layer that this system offers; the names of those that hold."""
    if not sys.platform.startswith("linux"):
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    layers = ["network namespace"] if leave_network(libc) else []
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return layers
    layers += ["write fence"] if fence_writes(libc) else []
    return layers + (["call filter"] if filter_calls(libc) else [])


def describe(error: BaseException) -> str:
    """The error in at most 200 characters; its text is the program's own and may itself fail."""
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except BaseException:
        return type(error).__name__


def run(source: str) -> str:
    """Run the program as a module that is not `__main__`; empty if it reached its end, otherwise why it did not."""
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
    limit_resources(job)
    os.write(report, (json.dumps({"layers": confine()}) + "\n").encode())
    note = run(job["source"])
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os.write(report, (json.dumps({"nonce": job["nonce"], "passed": not note, "note": note}) + "\n").encode())
    os._exit(0)  # no exit handler and no thread of the program runs after the verdict


if __name__ == "__main__":
    main()

"""The call filter: the kernel refuses each call by the filter itself, whatever else would have refused it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jddtree.evaluation.sandbox import call_filter
from jddtree.evaluation.sandbox.execution import run_code

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
# Written down again: a call that falls out of the filter must not fall out of its test. Numbers of x86_64.
REFUSED = {
    "fork": 57,
    "vfork": 58,
    "execve": 59,
    "execveat": 322,
    "kill": 62,
    "tkill": 200,
    "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "pidfd_send_signal": 424,
    "ptrace": 101,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "process_madvise": 440,
    "process_mrelease": 448,
    "kcmp": 312,
    "get_robust_list": 274,
    "migrate_pages": 256,
    "move_pages": 279,
    "perf_event_open": 298,
    "setpriority": 141,
    "ioprio_set": 251,
    "socket": 41,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "shmget": 29,
    "msgget": 68,
    "semget": 64,
    "mq_open": 240,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "memfd_create": 319,
    "memfd_secret": 447,
    "unshare": 272,
    "setns": 308,
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "chroot": 161,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "bpf": 321,
    "userfaultfd": 323,
    "open_by_handle_at": 304,
    "fanotify_init": 300,
    "reboot": 169,
    "settimeofday": 164,
    "clock_settime": 227,
    "adjtimex": 159,
    "clock_adjtime": 305,
    "sethostname": 170,
    "setdomainname": 171,
    "init_module": 175,
    "finit_module": 313,
    "delete_module": 176,
    "kexec_load": 246,
    "kexec_file_load": 320,
    "swapon": 167,
    "swapoff": 168,
    "acct": 163,
    "quotactl": 179,
    "syslog": 103,
    "iopl": 172,
    "ioperm": 173,
    "vhangup": 153,
}
OTHER, OWN, BAD = "other", "own", -1
# Calls that depend on their arguments: what is tried, and whether the filter refuses it.
TRIED = [
    ("tgkill", 234, [OTHER, OTHER, 0], True),
    ("tgkill", 234, [OWN, OWN, 0], False),
    ("prlimit64", 302, [OTHER, 7, 0, 0], True),
    ("prlimit64", 302, [0, 7, 0, 0], False),
    ("prlimit64", 302, [OWN, 7, 0, 0], False),
    ("sched_setaffinity", 203, [OTHER, 8, 0], True),
    ("sched_setaffinity", 203, [0, 8, 0], False),
    ("sched_setparam", 142, [OTHER, 0], True),
    ("sched_setparam", 142, [0, 0], False),
    ("sched_setscheduler", 144, [OTHER, BAD, 0], True),
    ("sched_setscheduler", 144, [0, BAD, 0], False),
    ("sched_setattr", 314, [OTHER, 0, 0], True),
    ("sched_setattr", 314, [0, 0, 0], False),
    ("F_SETOWN", 72, [0, 8, OTHER], True),
    ("F_SETSIG", 72, [0, 10, 10], True),
    ("F_SETOWN_EX", 72, [0, 15, 0], True),
    ("F_SETLEASE", 72, [0, 1024, 2], True),
    ("F_GETFD", 72, [0, 1, 0], False),
    ("FIOSETOWN", 16, [0, 0x8901, 0], True),
    ("SIOCSPGRP", 16, [0, 0x8902, 0], True),
    ("TIOCSPGRP", 16, [0, 0x5410, 0], True),
    ("TIOCSCTTY", 16, [0, 0x540E, 0], True),
    ("TIOCSTI", 16, [0, 0x5412, 0], True),
    ("TCGETS", 16, [0, 0x5401, 0], False),
    ("clone", 56, [17, 0, 0, 0, 0], True),
    ("getpid", 39, [], False),
    ("socketpair", 53, [BAD, BAD, BAD, 0], False),
]
REFUSAL = 118  # an error that the kernel itself gives for none of these calls, in the place of EPERM
TRY = """
import ctypes, json, os, runpy, struct, sys
filter_of = runpy.run_path(sys.argv[1])["filter_program"]
tried = json.loads(sys.argv[2])
refusal = lambda error: struct.pack("=HBBI", 0x06, 0, 0, 0x50000 | error)
program = filter_of("x86_64", os.getpid()).replace(refusal(1), refusal(int(sys.argv[3])))
libc = ctypes.CDLL(None, use_errno=True)
code = ctypes.create_string_buffer(program, len(program))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("@HP", len(program) // 8, ctypes.addressof(code)), 0, 0) == 0
processes = {"other": os.getppid(), "own": os.getpid()}
def errno_of(number, arguments):
    ctypes.set_errno(0)
    libc.syscall(number, *[ctypes.c_long(processes.get(value, value)) for value in arguments])
    return ctypes.get_errno()
print(json.dumps([errno_of(number, arguments) for _, number, arguments in tried]))
"""


def errors(tried: list[tuple[str, int, list]]) -> list[tuple[str, int]]:
    """The errno of each call, tried in one process under the filter."""
    command = [sys.executable, "-I", "-c", TRY, call_filter.__file__, json.dumps(tried), str(REFUSAL)]
    result = subprocess.run(
        command, capture_output=True, stdin=subprocess.DEVNULL, start_new_session=True, check=True
    )
    return [(name, error) for (name, _, _), error in zip(tried, json.loads(result.stdout), strict=True)]


@pytest.fixture(scope="module", autouse=True)
def holds() -> None:
    """There is nothing to test where the kernel takes no filter, or calls have other numbers."""
    if "call filter" not in run_code("").layers or os.uname().machine != "x86_64":
        pytest.skip("no call filter here")


def test_every_call_of_the_list_is_refused_by_the_filter() -> None:
    assert errors([(name, number, [BAD] * 5) for name, number in REFUSED.items()]) == [
        (name, REFUSAL) for name in REFUSED
    ]
    assert REFUSED.keys() == call_filter.REFUSED.keys()


def test_calls_that_depend_on_their_arguments() -> None:
    found = errors([(name, number, arguments) for name, number, arguments, _ in TRIED])
    assert [(name, error == REFUSAL) for name, error in found] == [
        (name, refused) for name, _, _, refused in TRIED
    ]


def test_calls_newer_than_the_table_and_of_another_interface_do_not_exist() -> None:
    newer = [
        ("clone3", 435, [0, 0]),
        ("next", call_filter.NEWEST + 1, []),
        ("x32 getpid", 0x40000000 | 39, []),
    ]
    assert [error for _, error in errors(newer)] == [38, 38, 38]


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("the headers are not installed")
    text = HEADERS[machine].read_text()
    known = {name: int(number) for name, number in re.findall(r"define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    column = list(HEADERS).index(machine)
    table = (
        call_filter.REFUSED
        | call_filter.OWN_PROCESS
        | {name: pair for name, (pair, _) in call_filter.COMMANDS.items()}
    )
    assert {name: numbers[column] for name, numbers in table.items()} == {
        name: known.get(name) for name in table
    }


def test_another_machine_has_no_filter() -> None:
    assert call_filter.filter_program("riscv64", 1) is None

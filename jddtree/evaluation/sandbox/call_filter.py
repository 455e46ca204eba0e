"""Which system calls a sandboxed program may not make, as a program for the kernel's filter (seccomp).

Contract: a pure function of the machine and of the process that will be filtered. `confinement.py` runs this
file by its path, in an interpreter that sees no package; it imports only the standard library.

Refused are calls that start processes or programs, reach other processes, open sockets, hold memory that no
limit counts, or change the system. A call newer than this table does not exist for the program.
"""

import errno
import struct

# Numbers from Linux: the system call tables, include/uapi/linux/{audit,bpf_common,seccomp,sched,fcntl}.h,
# include/uapi/asm-generic/{fcntl,ioctls,sockios}.h.
LOAD, JUMP_EQUAL, JUMP_FROM, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, FIRST, SECOND = 0, 4, 16, 24  # offsets in seccomp_data; of arguments the lower 32 bits
THREAD_FLAG = 0x10000
NEWEST = 462  # mseal, Linux 6.10; from 424 on numbers are the same on every machine
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Name: number on x86_64, on aarch64 (None: not there).
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # processes and programs
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    # signals to others
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    # memory, priority and state of others
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "get_robust_list": (274, 100),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    # the network, and calls that go past this filter
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # memory that outlives the program or that its limit does not count
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # the system
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
}
# Allowed for the program itself only: its process is their first argument, 0 or its number.
OWN_PROCESS = {
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
# Refused with these values of the second argument: who gets a file's signals, leases, and a terminal's input.
COMMANDS = {
    "fcntl": ((72, 25), (8, 10, 15, 1024)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE
    # FIOSETOWN, SIOC- and TIOCSPGRP, TIOCSCTTY, TIOCSTI.
    "ioctl": (
        (16, 29),
        (0x8901, 0x8902, 0x5410, 0x540E, 0x5412),
    ),
}
CLONE, CLONE3 = (56, 220), 435

Instruction = tuple[int, int, int, int]
"""Code, jump where the comparison holds, jump where it does not, operand; jumps are counted from the next
one.
"""
REFUSE: Instruction = (RETURN, 0, 0, FAIL | errno.EPERM)
MISSING: Instruction = (RETURN, 0, 0, FAIL | errno.ENOSYS)
ACCEPT: Instruction = (RETURN, 0, 0, ALLOW)


def filter_program(machine: str, process: int) -> bytes | None:
    """The filter of a process by its number, as an array of `struct sock_filter`; None on a machine without
    one.
    """
    if machine not in MACHINES:
        return None
    column = list(MACHINES).index(machine)
    program = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 1, 0, MACHINES[machine]), REFUSE]
    program += [(LOAD, 0, 0, NUMBER), (JUMP_FROM, 0, 1, NEWEST + 1), MISSING]
    program += _where(CLONE3, [MISSING])  # the C library then takes clone
    for numbers in REFUSED.values():
        program += _where(numbers[column], [REFUSE])
    for numbers in OWN_PROCESS.values():
        program += _where(numbers[column], _none_but(FIRST, (0, process)))
    for numbers, values in COMMANDS.values():
        program += _where(numbers[column], _all_but(SECOND, values))
    program += _where(CLONE[column], [(LOAD, 0, 0, FIRST), (JUMP_BITS, 1, 0, THREAD_FLAG), REFUSE, ACCEPT])
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, ACCEPT])


def _where(call: int | None, then: list[Instruction]) -> list[Instruction]:
    """For one call, instructions that end with a verdict; the loaded number stays for the next comparison"""
    return [] if call is None else [(JUMP_EQUAL, 0, len(then), call), *then]


def _none_but(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    tests = [(JUMP_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [(LOAD, 0, 0, argument), *tests, REFUSE, ACCEPT]


def _all_but(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    tests = [(JUMP_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [(LOAD, 0, 0, argument), *tests, ACCEPT, REFUSE]

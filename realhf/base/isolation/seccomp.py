"""System calls: the seccomp filter for untrusted programs, and how to make a call through the C library."""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables, AUDIT_ARCH value
PIVOT_ROOT = (155, 41)

PROCESSES = {
    "execve": (59, 221), "execveat": (322, 281), "fork": (57,), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "process_madvise": (440, 440),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "sched_setaffinity": (203, 122),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "tkill": (200, 130), "vfork": (58,),
}  # fmt: skip
NETWORK = {"socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426)}
SHARED_MEMORY = {  # not counted by the limit of address space, and visible to other processes
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "mq_open": (240, 180), "msgget": (68, 186),
    "semget": (64, 190), "shmat": (30, 196), "shmget": (29, 194),
}  # fmt: skip
FILES = {  # changes of metadata that Landlock permits on read-only files
    "chmod": (90,), "chown": (92,), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "fchown": (93, 55), "fchownat": (260, 54), "fremovexattr": (199, 16), "fsetxattr": (190, 7), "futimesat": (261,),
    "lchown": (94,), "lremovexattr": (198, 15), "lsetxattr": (189, 6), "removexattr": (197, 14), "setxattr": (188, 5),
    "truncate": (76, 45), "utime": (132,), "utimensat": (280, 88), "utimes": (235,),
}  # fmt: skip
PRIVILEGES = {
    "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280), "chroot": (161, 51), "fanotify_init": (300, 262),
    "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432), "fsopen": (430, 430),
    "init_module": (175, 105), "kexec_load": (246, 104), "keyctl": (250, 219), "mount": (165, 40),
    "mount_setattr": (442, 442), "move_mount": (429, 429), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "perf_event_open": (298, 241), "personality": (135, 92),
    "pivot_root": PIVOT_ROOT, "quotactl": (179, 60), "reboot": (169, 142), "request_key": (249, 218),
    "setns": (308, 268), "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282),
}  # fmt: skip
CLONE, CLONE3, THREAD = (56, 220), 435, 0x10000
KILL, TGKILL, PRLIMIT = (62, 129), (234, 131), (302, 261)
PRCTL, FCNTL, IOCTL = (157, 167), (72, 25), (16, 29)
PARENT_DEATH_SIGNAL, SECCOMP = 1, 22  # of prctl
SIGNALS_BY_FCNTL = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
SIGNALS_BY_IOCTL = (0x8901, 0x8902, 0x5412)  # FIOSETOWN, SIOCSPGRP, TIOCSTI

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, RETURN_ERRNO = 0x7FFF0000, 0x00050000

Instruction = tuple[int, int, int, int]  # operation, skip if true, skip if false, operand
PERMIT: Instruction = (RETURN, 0, 0, ALLOW)
DENY: Instruction = (RETURN, 0, 0, RETURN_ERRNO | errno.EPERM)
NOT_IMPLEMENTED: Instruction = (RETURN, 0, 0, RETURN_ERRNO | errno.ENOSYS)


def table_column() -> int:
    """Return the column of this machine in the tables of call numbers; OSError for an unsupported machine."""
    name = platform.machine()
    if sys.platform != "linux" or name not in MACHINES:
        raise OSError(f"untrusted programs run only on Linux on {' or '.join(MACHINES)}, this is {sys.platform} {name}")
    return MACHINES[name][0]


def program_filter(pid: int) -> list[Instruction]:
    """Return the filter for process ``pid``, which forbids other processes, network and privileged calls.

    Source: seccomp_filter.rst and the system call tables of Linux; the instructions are classic BPF.
    """
    at = table_column()
    lines = [
        (LOAD, 0, 0, 4), (EQUAL, 1, 0, MACHINES[platform.machine()][1]), DENY,  # call numbers of another architecture
        (LOAD, 0, 0, 0), (AT_LEAST, 0, 1, 0x40000000), DENY,  # the x32 ABI
    ]  # fmt: skip
    for numbers in (PROCESSES | NETWORK | SHARED_MEMORY | FILES | PRIVILEGES).values():
        if at < len(numbers):
            lines += [(EQUAL, 0, 1, numbers[at]), DENY]
    lines += [(EQUAL, 0, 1, CLONE3), NOT_IMPLEMENTED]  # libraries fall back to clone, whose flags the filter can read
    blocks = (
        (CLONE, 0, [(ANY_BIT, 0, 1, THREAD), PERMIT, DENY]),
        (KILL, 0, if_in([pid], PERMIT, DENY)),
        (TGKILL, 0, if_in([pid], PERMIT, DENY)),
        (PRLIMIT, 0, if_in([0, pid], PERMIT, DENY)),
        (PRCTL, 0, if_in([PARENT_DEATH_SIGNAL], DENY, PERMIT)),
        (FCNTL, 1, if_in(SIGNALS_BY_FCNTL, DENY, PERMIT)),
        (IOCTL, 1, if_in(SIGNALS_BY_IOCTL, DENY, PERMIT)),
    )
    for call_numbers, argument, block in blocks:  # which decide by an argument
        lines += [(EQUAL, 0, len(block) + 1, call_numbers[at]), (LOAD, 0, 0, 16 + 8 * argument), *block]
    return [*lines, PERMIT]


def if_in(values: Sequence[int], action: Instruction, otherwise: Instruction) -> list[Instruction]:
    return [line for value in values for line in ((EQUAL, 0, 1, value), action)] + [otherwise]


def install_filter() -> None:
    """Apply the filter to this process; it cannot be removed."""
    lines = program_filter(os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    libc_call("prctl", SECCOMP, 2, struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code)), 0, 0)


def libc_call(name: str, *arguments: bytes | int | None) -> int:
    """Call a function of the C library; OSError when it returns less than 0."""
    function = ctypes.CDLL(None, use_errno=True)[name]
    result = function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result

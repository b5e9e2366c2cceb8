"""Isolates a process that is about to run untrusted code: from files, network, other processes and privileges.

`restrict_server` runs once; with namespaces it moves the server to a private root with only the interpreter and system
libraries. `restrict_program` runs in each program's process just before the program; without namespaces it restricts
files by Landlock. Resource limits and the system call filter apply in both cases.
"""

import contextlib
import errno
import os
import resource
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from realhf.base.isolation.seccomp import PARENT_DEATH_SIGNAL, PIVOT_ROOT, install_filter, libc_call, table_column

MIB = 2**20
UNUSED_UID, OVERFLOW_UID = 60_000_000, 65534

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x40000000
BIND, RECURSIVE, PRIVATE, NOSUID, NODEV, DETACH = 0x1000, 0x4000, 0x40000, 2, 4, 2
READ_FILE, WRITE_FILE, READ_FOLDER = 4, 2, 8  # rights of Landlock
MOUNT_SETATTR, LANDLOCK = 442, 444  # call numbers on every machine
DUMPABLE, NO_NEW_PRIVILEGES = 4, 38  # of prctl

SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True)
class Limits:
    """Limits of one program: bytes of address space, output, and per file (a third of its folder); threads."""

    memory: int = 1024 * MIB
    output: int = 1 * MIB
    file: int = 16 * MIB
    threads: int = 64


@dataclass(frozen=True)
class IsolationInfo:
    """How programs are isolated on this machine, determined once by `restrict_server`."""

    namespaces: bool
    landlock: int  # ABI version of the kernel, 0 for none
    uid: int | None  # of programs, if different from the server's
    threads_before: int  # of the user, outside the sandbox

    def describe(self) -> str:
        if self.namespaces:
            files = "own root and network (namespaces)"
        elif self.landlock:
            files = f"files by Landlock {self.landlock}, no namespaces"
        else:
            files = "NO NAMESPACES, NO LANDLOCK: programs can access all files of their user"
        user = "" if self.uid is None else f", uid {self.uid}"
        return f"{files}, system calls filtered, limits{user}"


def restrict_server(namespaces: bool) -> IsolationInfo:
    """Isolate this process from files and network, by namespaces if requested and permitted by the kernel.

    The process must have one thread. OSError if system calls cannot be filtered.
    """
    table_column()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the OOM killer picks programs first
    before = 0 if os.getuid() == 0 else threads_of(os.getuid())
    landlock = landlock_version()
    isolated = namespaces and enter_namespaces()
    libc_call("prctl", DUMPABLE, 0, 0, 0, 0)  # programs of the same user cannot read the server's memory
    drops = os.getuid() == 0 and (isolated or not landlock or all(map(is_world_accessible, readable_paths())))
    return IsolationInfo(isolated, 0 if isolated else landlock, UNUSED_UID + os.getpid() if drops else None, before)


def restrict_program(isolation: IsolationInfo, limits: Limits, seconds: float, folder: str) -> None:
    """Drop all access except to ``folder``, which becomes private; OSError if that fails, and no program may run."""
    parent = os.getppid()
    if isolation.namespaces:
        libc_call("unshare", NEW_MOUNTS)
        options = f"size={3 * limits.file},nr_inodes=4096,mode=0777"
        libc_call("mount", b"scratch", folder.encode(), b"tmpfs", NOSUID | NODEV, options.encode())
    os.chdir(folder)
    set_limits(isolation, limits, seconds)
    libc_call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    drop_privileges(isolation.uid, folder)
    libc_call("prctl", PARENT_DEATH_SIGNAL, 9, 0, 0, 0)  # reset when the uid changes, hence after it
    if os.getppid() != parent:
        raise OSError("the fork server of the sandbox has exited")
    if isolation.landlock:
        landlock_restrict(folder, isolation.landlock)
    install_filter()


def set_limits(isolation: IsolationInfo, limits: Limits, seconds: float) -> None:
    """Lower the soft and hard limits of this process."""
    for what, value in {
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits.file,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: isolation.threads_before + limits.threads,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_STACK: 128 * MIB,
    }.items():
        before = resource.getrlimit(what)[1]
        hard = value + 1 if what == resource.RLIMIT_CPU else value  # SIGXCPU before SIGKILL: it names the reason
        hard = hard if before == resource.RLIM_INFINITY else min(hard, before)
        resource.setrlimit(what, (min(value, hard), hard))


def drop_privileges(uid: int | None, folder: str) -> None:
    """Switch to ``uid``, unless None, and drop all capabilities."""
    if uid is not None:
        os.setgroups([])
        for number in (uid, OVERFLOW_UID):  # the first may not be mapped in a container
            try:
                os.chown(folder, number, number)
                os.setresgid(number, number, number)
                os.setresuid(number, number, number)
                break
            except OSError as error:
                if error.errno != errno.EINVAL or number == OVERFLOW_UID:
                    raise
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    libc_call("capset", header, none)


def enter_namespaces() -> bool:
    """Enter new namespaces with a private root; return False, with no changes, if the kernel forbids it."""
    pid = os.fork()  # try in a child first: a partial move cannot be undone
    if pid == 0:
        try:
            pivot_root()
            os._exit(0)
        except BaseException:
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        return False
    pivot_root()
    return True


def pivot_root() -> None:
    uid, gid = os.getuid(), os.getgid()
    libc_call("unshare", NEW_MOUNTS | NEW_NETWORK | NEW_IPC | (NEW_USER if uid else 0))
    if uid:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", file).write_text(text)
    libc_call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    sources = {path: os.open(path, os.O_PATH) for path in (*readable_paths(), *DEVICES)}
    libc_call("mount", b"root", b"/tmp", b"tmpfs", NOSUID, b"mode=0755")
    for path, fd in sources.items():  # by descriptor, since the new mount hides /tmp
        bind(fd, Path("/tmp" + path))
        os.close(fd)
    os.makedirs("/tmp/tmp", exist_ok=True)
    os.chdir("/tmp")
    libc_call("syscall", PIVOT_ROOT[table_column()], b".", b".")
    libc_call("umount2", b".", DETACH)
    os.chdir("/")
    read_only, at_recursive, at_fdcwd = struct.pack("QQQQ", 1 | NOSUID, 0, 0, 0), 0x8000, -100
    libc_call("syscall", MOUNT_SETATTR, at_fdcwd, b"/", at_recursive, read_only, len(read_only))


def bind(source: int, target: Path) -> None:
    """Bind-mount the file or folder that descriptor ``source`` refers to at ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = f"/proc/self/fd/{source}"
    target.mkdir(exist_ok=True) if os.path.isdir(path) else target.touch()
    libc_call("mount", path.encode(), os.fsencode(target), None, BIND | RECURSIVE, None)


def readable_paths() -> list[str]:
    """Return the paths that programs may read: system libraries, and the interpreter with its packages."""
    paths = {*SYSTEM_PATHS, sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    outermost: list[str] = []
    for path in sorted(path for path in paths if os.path.exists(path)):
        if not any(path.startswith(outer + "/") for outer in outermost):
            outermost.append(path)
    return outermost


def is_world_accessible(folder: str) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in (Path(folder), *Path(folder).parents))


def threads_of(uid: int) -> int:
    """Return the number of threads of a user, which RLIMIT_NPROC counts together with the program's."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == uid:
                count += len(os.listdir(process / "task"))
        except OSError:
            continue  # the process has ended
    return count + 256  # margin for threads that it starts later


def landlock_version() -> int:
    try:
        return libc_call("syscall", LANDLOCK, None, 0, 1)
    except OSError:
        return 0


def landlock_restrict(folder: str, version: int) -> None:
    """Restrict this process to reading `readable_paths`, using DEVICES, and full access to ``folder``."""
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1  # all rights of this ABI version
    create, add, apply = LANDLOCK, LANDLOCK + 1, LANDLOCK + 2
    rules = libc_call("syscall", create, struct.pack("Q", everything), 8, 0)
    rights = {path: READ_FILE | READ_FOLDER if os.path.isdir(path) else READ_FILE for path in readable_paths()}
    rights |= dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE) | {folder: everything}
    for path, allowed in rights.items():
        fd = os.open(path, os.O_PATH)
        libc_call("syscall", add, rules, 1, struct.pack("=Qi", allowed, fd), 0)
        os.close(fd)
    libc_call("syscall", apply, rules, 0)
    os.close(rules)

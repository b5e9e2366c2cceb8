"""What a process that will run untrusted code does to itself: it gives up files, network, processes and privileges.

`seal_server` runs once: with namespaces the server moves to a root of its own, which holds the interpreter and nothing
of the user's. `seal_program` runs in every program's process, just before the program: where there are no namespaces
it keeps files out by Landlock. Limits and the filter of calls to the kernel apply in either case.
"""

import contextlib
import errno
import os
import resource
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from realhf.rewards.sandbox.seccomp import (
    DUMPABLE,
    LANDLOCK,
    MOUNT_SETATTR,
    NO_NEW_PRIVILEGES,
    PARENT_DEATH_SIGNAL,
    PIVOT_ROOT,
    call,
    column,
    filter_own_calls,
)

MIB = 2**20
UNUSED_UID, NOBODY = 60_000_000, 65534

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x40000000
BIND, RECURSIVE, PRIVATE, NOSUID, NODEV, DETACH = 0x1000, 0x4000, 0x40000, 2, 4, 2

SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True)
class Limits:
    """What one program may use: bytes of address space, output, and of a file (a third of its folder); threads."""

    memory: int = 1024 * MIB
    output: int = 1 * MIB
    file: int = 16 * MIB
    threads: int = 64


@dataclass(frozen=True)
class IsolationInfo:
    """What keeps programs in on this machine, found out once by `seal_server`."""

    namespaces: bool
    landlock: int  # version of the kernel's interface, 0 for none
    uid: int | None  # programs run under this one instead of the server's
    threads_before: int  # of the user, outside

    def describe(self) -> str:
        """Return it in words."""
        if self.namespaces:
            files = "own root and network (namespaces)"
        elif self.landlock:
            files = f"files by Landlock {self.landlock}, no namespaces"
        else:
            files = "NEITHER NAMESPACES NOR LANDLOCK: programs reach all files of their user"
        user = "" if self.uid is None else f", uid {self.uid}"
        return f"{files}, system calls filtered, limits{user}"


def restrict_server(namespaces: bool) -> IsolationInfo:
    """Shut this process off from files and network, by namespaces if they are wanted and the kernel lets it.

    The process must have one thread. OSError where not even its calls can be filtered.
    """
    column()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # when memory runs out, programs go first
    before = 0 if os.getuid() == 0 else threads_of(os.getuid())
    landlock = landlock_version()
    inside = namespaces and enter_namespaces()
    call("prctl", DUMPABLE, 0, 0, 0, 0)  # programs of the same user cannot look into the server
    drops = os.getuid() == 0 and (inside or not landlock or all(map(open_to_all, readable_paths())))
    return IsolationInfo(inside, 0 if inside else landlock, UNUSED_UID + os.getpid() if drops else None, before)


def restrict_program(guard: IsolationInfo, limits: Limits, seconds: float, folder: str) -> None:
    """Give up all that the program must not have; ``folder`` becomes its own. OSError, and nothing may run, if not."""
    parent = os.getppid()
    if guard.namespaces:
        call("unshare", NEW_MOUNTS)
        options = f"size={3 * limits.file},nr_inodes=4096,mode=0777"
        call("mount", b"scratch", folder.encode(), b"tmpfs", NOSUID | NODEV, options.encode())
    os.chdir(folder)
    set_limits(guard, limits, seconds)
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    drop_privileges(guard.uid, folder)
    call("prctl", PARENT_DEATH_SIGNAL, 9, 0, 0, 0)  # forgotten when the uid changes, hence now
    if os.getppid() != parent:
        raise OSError("the sandbox's server is gone")
    if guard.landlock:
        landlock_restrict(folder, guard.landlock)
    filter_own_calls()


def set_limits(guard: IsolationInfo, limits: Limits, seconds: float) -> None:
    """Lower the limits of this process, hard ones too."""
    for what, value in {
        resource.RLIMIT_AS: limits.memory,
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: limits.file,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: guard.threads_before + limits.threads,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_STACK: 128 * MIB,
    }.items():
        before = resource.getrlimit(what)[1]
        hard = value + 1 if what == resource.RLIMIT_CPU else value  # SIGXCPU first, which says why
        hard = hard if before == resource.RLIM_INFINITY else min(hard, before)
        resource.setrlimit(what, (min(value, hard), hard))


def drop_privileges(uid: int | None, folder: str) -> None:
    """Become ``uid``, unless None, and give up every capability."""
    if uid is not None:
        os.setgroups([])
        for number in (uid, NOBODY):  # a container may not know the first
            try:
                os.chown(folder, number, number)
                os.setresgid(number, number, number)
                os.setresuid(number, number, number)
                break
            except OSError as error:
                if error.errno != errno.EINVAL or number == NOBODY:
                    raise
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    call("capset", header, none)


def enter_namespaces() -> bool:
    """Move to mounts, a network and a root of our own; False, with nothing changed, where the kernel forbids it."""
    pid = os.fork()  # tries first: half a move cannot be taken back
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
    call("unshare", NEW_MOUNTS | NEW_NETWORK | NEW_IPC | (NEW_USER if uid else 0))
    if uid:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", file).write_text(text)
    call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    sources = {path: os.open(path, os.O_PATH) for path in (*readable_paths(), *DEVICES)}
    call("mount", b"root", b"/tmp", b"tmpfs", NOSUID, b"mode=0755")
    for path, fd in sources.items():  # by descriptor: what lies in /tmp is hidden now
        bind(fd, Path("/tmp" + path))
        os.close(fd)
    os.makedirs("/tmp/tmp", exist_ok=True)
    os.chdir("/tmp")
    call("syscall", PIVOT_ROOT[column()], b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/")
    read_only, all_below, here = struct.pack("QQQQ", 1 | NOSUID, 0, 0, 0), 0x8000, -100
    call("syscall", MOUNT_SETATTR, here, b"/", all_below, read_only, len(read_only))


def bind(source: int, target: Path) -> None:
    """Show what ``source`` is open on under the name ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = f"/proc/self/fd/{source}"
    target.mkdir(exist_ok=True) if os.path.isdir(path) else target.touch()
    call("mount", path.encode(), os.fsencode(target), None, BIND | RECURSIVE, None)


def readable_paths() -> list[str]:
    """Return what programs may read: system libraries and the interpreter with its packages; outer folders first."""
    wanted = {*SYSTEM_PATHS, sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    kept: list[str] = []
    for path in sorted(path for path in wanted if os.path.exists(path)):
        if not any(path.startswith(outer + "/") for outer in kept):
            kept.append(path)
    return kept


def open_to_all(folder: str) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in (Path(folder), *Path(folder).parents))


def threads_of(uid: int) -> int:
    """Return how many threads a user has: the kernel's limit counts them together with the program's."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == uid:
                count += len(os.listdir(process / "task"))
        except OSError:
            continue  # gone
    return count + 256  # and what it may start later


READ_FILE, WRITE_FILE, READ_FOLDER = 4, 2, 8


def landlock_version() -> int:
    try:
        return call("syscall", LANDLOCK, None, 0, 1)
    except OSError:
        return 0


def landlock_restrict(folder: str, version: int) -> None:
    """Allow this process to read libraries and interpreter, to use plain devices, and anything inside ``folder``."""
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1  # rights that this version knows
    create, add, apply = LANDLOCK, LANDLOCK + 1, LANDLOCK + 2
    rules = call("syscall", create, struct.pack("Q", everything), 8, 0)
    rights = {path: READ_FILE | READ_FOLDER if os.path.isdir(path) else READ_FILE for path in readable_paths()}
    rights |= dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE) | {folder: everything}
    for path, allowed in rights.items():
        fd = os.open(path, os.O_PATH)
        call("syscall", add, rules, 1, struct.pack("=Qi", allowed, fd), 0)
        os.close(fd)
    call("syscall", apply, rules, 0)
    os.close(rules)

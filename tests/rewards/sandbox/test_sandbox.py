"""Hostile programs: each is contained, has its own reason, and does not affect the next program."""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from realhf.base.errors import UserError
from realhf.base.isolation.restrict import IsolationInfo, Limits
from realhf.base.isolation.seccomp import MACHINES
from realhf.rewards.sandbox.sandbox import (
    ProgramResult,
    ProgramStopped,
    Reason,
    Sandbox,
    describe_sandbox,
    how_it_ended,
)
from tests.conftest import TIMEOUT_S
from tests.rewards.judge.processes import descendants, have_exited

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="the sandbox needs Linux"
)
ROOT = Path(__file__).parents[3]


def skip_without_file_isolation(sandbox: Sandbox) -> None:
    sandbox.open()
    if sandbox.description.startswith("NO NAMESPACES"):
        pytest.skip("this kernel offers no namespaces and no Landlock")


@pytest.fixture(scope="module", params=[True, False], ids=["namespaces", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with closing(Sandbox(namespaces=request.param)) as sandbox:
        skip_without_file_isolation(sandbox)
        yield sandbox


def run_and_check_next(sandbox: Sandbox, source: str, seconds: float = 20.0) -> ProgramResult:
    """Return the result of ``source`` after checking that the next program runs correctly."""
    result = sandbox.run(source, "", seconds)
    assert sandbox.run("print(int(input()) + 1)", "41\n", 20.0) == ProgramResult(Reason.ok, "42\n")
    return result


ATTACKS = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()", Reason.forbidden),
    "double fork": ("import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()", Reason.forbidden),
    "subprocess": ("import subprocess\nsubprocess.Popen(['sleep', '600'])", Reason.forbidden),
    "another program": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'sleep 600'])", Reason.forbidden),
    "memory bomb": ("x = []\nwhile True:\n    x.append(bytearray(2**24))", Reason.memory),
    "huge block": ("x = bytearray(2**35)", Reason.memory),
    "deep recursion": ("def f(n):\n    return f(n + 1)\nf(0)", Reason.error),
    "output": ("while True:\n    print('x' * 1000)", Reason.output),
    "errors": ("import sys\nwhile True:\n    sys.stderr.write('x' * 1000)", Reason.output),
    "large file": ("with open('f', 'w') as f:\n    while True:\n        f.write('x' * 10**6)", Reason.output),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", Reason.forbidden),
    "kill all": ("import os\nos.kill(-1, 9)", Reason.forbidden),
    "kill the group": ("import os\nos.killpg(os.getpgrp(), 9)", Reason.forbidden),
    "signal by a pipe": ("import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())", Reason.forbidden),
    "socket": ("import socket\nsocket.create_connection(('127.0.0.1', 22), 1)", Reason.forbidden),
    "local socket": ("import socket\nsocket.socket(socket.AF_UNIX)", Reason.forbidden),
    "suicide": ("import os\nos.kill(os.getpid(), 9)", Reason.killed),
    "crash": ("import ctypes\nctypes.string_at(0)", Reason.killed),
    "exit": ("import sys\nsys.exit(3)", Reason.error),
    "abrupt exit": ("import os\nos._exit(4)", Reason.error),
    "exception": ("1 / 0", Reason.error),
    "no Python": ("1 +", Reason.error),
    "chmod": ("import os, sys\nos.chmod(sys.prefix, 0)", Reason.forbidden),
    "null byte": ("print(1)\0", Reason.error),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_contained(sandbox: Sandbox, name: str) -> None:
    source, reason = ATTACKS[name]
    assert run_and_check_next(sandbox, source).reason is reason


ENDLESS = {
    "loop": "while True:\n    pass",
    "one long step": "10 ** 10 ** 10",
    "sleep": "import time\ntime.sleep(60)",
    "threads": "import threading, time\nfor _ in range(9):\n    threading.Timer(60, print).start()",
    "signals ignored": "import signal\nfor n in range(1, 65):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "at exit": "import atexit, time\natexit.register(time.sleep, 60)",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_programs_are_stopped(sandbox: Sandbox, name: str) -> None:
    result = run_and_check_next(sandbox, ENDLESS[name], seconds=0.3)
    assert result == ProgramResult(Reason.timeout, "", "not done after 0.3 s")


def test_each_program_has_an_empty_folder(sandbox: Sandbox) -> None:
    source = "import os, tempfile\nprint(os.getcwd(), os.listdir(), os.path.samefile('.', os.environ['HOME']))\n"
    source += "open('a', 'w').write('x'); tempfile.TemporaryFile(); os.mkdir('b'); print(sorted(os.listdir()))"
    for _ in range(2):
        folder, _, rest = sandbox.run(source).stdout.partition(" ")
        assert rest == "[] True\n['a', 'b']\n" and (folder == "/tmp" or not os.path.exists(folder))


def test_files_and_environment_of_the_user_are_inaccessible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("API_KEY", "s3cret")
    tries = [f"open({str(secret)!r}).read()", f"open({str(tmp_path / 'new')!r}, 'w')", f"os.remove({str(secret)!r})"]
    tries += [f"os.listdir({str(Path.home())!r})", f"os.rename({str(secret)!r}, 'mine')", "open('/etc/passwd').read()"]
    tries += [f"open('/proc/{pid}/environ').read()" for pid in ("self", os.getpid(), os.getppid())]
    tries += [f"open({__file__!r}, 'a')", "open('/usr/new', 'w')", "os.environ['API_KEY']", "os.listdir('/proc')"]
    for namespaces in (True, False):
        with closing(Sandbox(namespaces=namespaces)) as sandbox:
            skip_without_file_isolation(sandbox)
            for action in tries:
                result = sandbox.run(f"import os\nprint({action})")
                assert (result.reason, result.stdout) in [(Reason.forbidden, ""), (Reason.error, "")], result
            assert "s3cret" not in sandbox.run("import os\nprint(os.environ)").stdout
    assert secret.read_text() == "s3cret" and os.listdir(tmp_path) == ["secret"]


def test_system_calls_from_c_are_filtered(sandbox: Sandbox) -> None:
    source = "import ctypes, os\nc = ctypes.CDLL(None)\n"
    source += "print(c.fork(), c.socket(2, 1, 0), c.kill(os.getppid(), 9), c.unshare(0x10000000), c.umount2(b'/', 2))"
    source += "\nprint(c.prctl(1, 0, 0, 0, 0), c.ptrace(16, os.getppid(), 0, 0), c.memfd_create(b'', 0))"
    assert run_and_check_next(sandbox, source).stdout == "-1 -1 -1 -1 -1\n-1 -1 -1\n"


def test_only_the_standard_streams_are_open(sandbox: Sandbox) -> None:
    source = "import os\nopen_ones = []\nfor fd in range(200):\n    try:\n        os.fstat(fd)\n"
    source += "        open_ones.append(fd)\n    except OSError:\n        pass\nprint(open_ones)"
    assert run_and_check_next(sandbox, source).stdout == "[0, 1, 2]\n"
    assert run_and_check_next(sandbox, "import os\nos.closerange(0, 100)\nprint(1)") == ProgramResult(Reason.ok)


def test_programs_do_not_share_memory(sandbox: Sandbox) -> None:
    run_and_check_next(sandbox, "import builtins, math\nmath.pi = 3\nbuiltins.print = None\nword = 'left behind'")
    source = "import gc, math\nprint(math.pi == 3, any('left behind' in o for o in gc.get_objects() if type(o) is str))"
    assert sandbox.run(source + "\nprint('word' in globals())").stdout == "False False\nFalse\n"


def test_scripts_run_as_main(sandbox: Sandbox) -> None:
    source = "import sys\nif __name__ == '__main__':\n    print(sys.stdin.read().upper(), end='')\nimport __main__\n"
    source += (
        "print(__main__.sys is sys, sys.argv)\nimport threading\nthreading.Thread(target=print, args=(5,)).start()"
    )
    text = "caf\u00e9\n" * 100_000
    assert sandbox.run(source, text) == ProgramResult(Reason.ok, text.upper() + "True ['program.py']\n5\n")
    assert sandbox.run("from __future__ import annotations\nprint(Counter('aab')['a'], gcd(4, 6))").stdout == "2 2\n"
    assert sandbox.run("print(1)\nexit()\nprint(2)").stdout == "1\n"
    assert sandbox.run("print('no input wanted')", text).stdout == "no input wanted\n"


def test_ask_exchanges_lines(sandbox: Sandbox) -> None:
    program = sandbox.start("for line in open(0):\n    print(len(line) - 1, flush=True)", 20.0)
    assert [program.ask(b"x" * n, 20.0) for n in (1, 100_000, 2)] == [b"1", b"100000", b"2"]
    assert program.finish(b"", 20.0) == ProgramResult(Reason.ok)
    program.close()
    for source, reason in [
        ("input()", Reason.error),
        ("input()\n1/0", Reason.error),
        ("while 1: pass", Reason.timeout),
    ]:
        silent = sandbox.start(source, 20.0)
        with pytest.raises(ProgramStopped) as stopped:
            silent.ask(b"", 0.3 if reason is Reason.timeout else 20.0)
        assert stopped.value.result.reason is reason
        silent.close()


def test_limits_can_be_set() -> None:
    with closing(Sandbox(Limits(output=100, memory=2**29, threads=3))) as sandbox:
        assert sandbox.run("print('x' * 99)").reason is Reason.ok
        assert sandbox.run("print('x' * 100)").reason is Reason.output
        assert sandbox.run("bytearray(2**29)").reason is Reason.memory
        many = "import threading, time\nfor _ in range(600):\n"
        many += "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
        assert sandbox.run(many).detail == "RuntimeError: can't start new thread"


def test_dead_server_is_replaced_and_no_process_remains(sandbox: Sandbox) -> None:
    others = descendants()
    sleeps = "import os, time\nprint(os.getcwd(), flush=True)\ntime.sleep(600)"
    with closing(Sandbox(namespaces=sandbox.description.startswith("own"))) as mine:
        mine.open()
        (server,) = descendants() - others
        program = mine.start(sleeps, 600.0)
        left_behind = program.ask(b"", 20.0).decode()
        os.kill(server, signal.SIGKILL)
        assert program.finish(b"", 20.0).reason is Reason.killed
        program.close()
        if left_behind != "/tmp":
            os.rmdir(left_behind)
        assert mine.run("print(2)").stdout == "2\n"
        endless = mine.start(sleeps, 600.0)
        folder = endless.ask(b"", 20.0).decode()
        started = descendants() - others
        assert len(started) == 2
    assert have_exited(started) and (folder == "/tmp" or not os.path.exists(folder))
    endless.close()


AS_ANOTHER = """
import sys
from contextlib import closing
sys.path.insert(0, sys.argv[1])
from realhf.rewards.sandbox.sandbox import Sandbox
for namespaces in (True, False):
    with closing(Sandbox(namespaces=namespaces)) as sandbox:
        print(sandbox.run("print(input())", "hi\\n").stdout.strip(), end=" ")
        for source in ("os.fork()", "open('/tmp/x')", "os.chmod('/tmp', 0)", "os.listdir('/home')"):
            print(sandbox.run(source).reason.value, end=" ")
"""


def test_isolation_without_root() -> None:
    python = "/usr/bin/python3"
    modern = [python, "-c", "import sys\nsys.exit(sys.version_info < (3, 10))"]
    if os.getuid() != 0 or not Path(python).is_file() or subprocess.run(modern, timeout=TIMEOUT_S).returncode:
        pytest.skip("needs root, to become another user, and a system Python for it")
    if not all(folder.stat().st_mode & 0o005 == 0o005 for folder in (ROOT, *ROOT.parents)):
        pytest.skip("another user cannot read the project")
    done = subprocess.run(
        [python, "-B", "-c", AS_ANOTHER, str(ROOT)], user=12345, group=12345, extra_groups=[], cwd="/",
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    words = done.stdout.split()
    assert len(words) == 10 and {words[0], words[5]} == {"hi"}, done
    assert words[1] == words[3] == words[6] == words[8] == "forbidden"
    assert {words[2], words[4], words[7], words[9]} <= {"error", "forbidden"}


def test_server_that_fails_to_start_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="the sandbox cannot be used here: its server ended during startup"):
        Sandbox().run("print(1)")
    assert describe_sandbox().startswith("the sandbox cannot be used here")


def test_description_of_the_isolation() -> None:
    assert "system calls filtered" in describe_sandbox()
    assert IsolationInfo(True, 0, 7, 0).describe().endswith("limits, uid 7")
    assert IsolationInfo(False, 4, None, 0).describe().startswith("files by Landlock 4, no namespaces")
    assert IsolationInfo(False, 0, None, 0).describe().startswith("NO NAMESPACES")


@pytest.mark.parametrize(
    ("status", "errors", "expected"),
    [
        (0, "noise", (Reason.ok, "")),
        (1 << 8, "x\nMemoryError: ", (Reason.memory, "MemoryError:")),
        (1 << 8, "_ArrayMemoryError: Unable", (Reason.memory, "_ArrayMemoryError: Unable")),
        (1 << 8, "PermissionError: [Errno 1]", (Reason.forbidden, "PermissionError: [Errno 1]")),
        (1 << 8, "OSError: [Errno 30] R", (Reason.forbidden, "OSError: [Errno 30] R")),
        (1 << 8, "OSError: [Errno 28] N", (Reason.output, "OSError: [Errno 28] N")),
        (1 << 8, "ValueError: PermissionError: ", (Reason.error, "ValueError: PermissionError:")),
        (3 << 8, "", (Reason.error, "exit code 3")),
        (signal.SIGXCPU, "", (Reason.timeout, "CPU time limit exceeded")),
        (signal.SIGSEGV, "x", (Reason.killed, "Segmentation fault")),
        (signal.SIGRTMAX, "", (Reason.killed, f"Real-time signal {signal.SIGRTMAX - signal.SIGRTMIN}")),
    ],
)
def test_how_it_ended(status: int, errors: str, expected: tuple[Reason, str]) -> None:
    reason, detail = how_it_ended(status, errors)
    assert reason is expected[0]
    assert detail.startswith(expected[1]) or status == signal.SIGRTMAX


def test_no_torch_in_the_server() -> None:
    with closing(Sandbox()) as sandbox:
        assert sandbox.run("import sys\nprint({'torch', 'numpy'} & set(sys.modules))").stdout == "set()\n"

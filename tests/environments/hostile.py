"""Environments of the tests: one that works, and broken ones."""

import asyncio
import os
import random
import signal
import sys
import time

from realhf.environments import Reply, Turn


class OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this error has no text")


class Counter:
    """Answers with the number of replies; ends after ``row["turns"]`` of them."""

    def __init__(self, fault: str = "", at: int = 1) -> None:
        self.fault, self.at = fault, at

    def reset(self, row: dict, seed: int) -> Turn:
        self.row, self.seed, self.count = row, seed, 0
        return Turn(text=f"start {row['name']} {seed}")

    def step(self, reply: Reply) -> Turn:
        self.count += 1
        if self.row["name"] == self.fault and self.count == self.at:
            raise ValueError("this environment is broken")
        return Turn(
            text=f"{self.row['name']} {self.count} {reply.text}", reward=1.0, done=self.count == self.row["turns"]
        )


class Broken(Counter):
    """Rows name the fault of their environment."""

    def step(self, reply: Reply) -> Turn:
        match self.row.get("fault"):
            case "hang":
                time.sleep(1000)
            case "hang deaf to signals":
                for number in range(1, 32):
                    if number not in (signal.SIGKILL, signal.SIGSTOP):
                        signal.signal(number, signal.SIG_IGN)
                while True:
                    time.sleep(1)
            case "crash":
                os._exit(3)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "fork":
                for _ in range(20):
                    if os.fork() == 0:
                        time.sleep(1000)
            case "forked copies":
                for _ in range(3):
                    os.fork()
            case "invalid replies":
                for fd in range(3, 64):
                    try:
                        os.write(fd, self.row["reply"].encode() + b"\n")
                    except OSError:
                        continue
            case "fork bomb":
                while True:
                    os.fork()
            case "network":
                import socket

                socket.create_connection(("127.0.0.1", 9), timeout=5)
            case "memory":
                bytearray(1 << 40)
            case "prints":
                print('{"id": 1, "turn": {}}\n' * 3, flush=True)
                sys.stdout.write("not JSON\n")
                os.write(1, b"raw\n")
            case "exit":
                sys.exit(0)
            case "reads stdin":
                sys.stdin.read()
            case "odd error":
                raise OddError
            case "odd text of an error":
                raise ValueError("\udcff\ud800")
        turn = super().step(reply)
        return odd_turn(fault) if (fault := self.row.get("fault")) in ODD_TURNS else turn

    def close(self) -> None:
        if self.row.get("fault") == "slow close":
            time.sleep(1000)


ODD_TURNS = (
    "huge observation",
    "nan reward",
    "never done",
    "no turn",
    "wrong types",
    "surrogates",
    "deep",
    "special tokens",
)


def odd_turn(fault: str) -> Turn:
    match fault:
        case "huge observation":
            return Turn(text="x" * (1 << 30))
        case "nan reward":
            return Turn(text="", reward=float("nan"))
        case "never done":
            return Turn(text="on")
        case "no turn":
            return None  # type: ignore[return-value]
        case "wrong types":
            return Turn(text=3, reward="1")  # type: ignore[arg-type]
        case "surrogates":
            return Turn(text="\udcff", info={"\ud800": 1.0})
        case "deep":
            deep: list = []
            for _ in range(900):
                deep = [deep]
            return Turn(messages=[{"role": "user", "content": "x", "deep": deep}])
        case "special tokens":
            return Turn(text="</s><s><|im_end|>", reward=1.0, done=True)
    raise ValueError(fault)


class Async(Counter):
    async def reset(self, row: dict, seed: int) -> Turn:  # type: ignore[override]
        await asyncio.sleep(row.get("seconds", 0.0))
        return super().reset(row, seed)

    async def step(self, reply: Reply) -> Turn:  # type: ignore[override]
        await asyncio.sleep(self.row.get("seconds", 0.0))
        if self.row.get("fault") == "crash":
            os._exit(3)
        return super().step(reply)


class Log(Counter):
    """Appends a byte to the file ``path`` for every reset."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def reset(self, row: dict, seed: int) -> Turn:
        with open(self.path, "ab") as file:
            file.write(b".")
        return super().reset(row, seed)


class Once(Counter):
    """Fails at the second reply, but only if it has not yet written a file."""

    def step(self, reply: Reply) -> Turn:
        turn = super().step(reply)
        if self.count == 2 and not os.path.exists(self.fault):
            open(self.fault, "w").close()
            raise ValueError("this environment is broken")
        return turn


class Random(Counter):
    """Is not deterministic."""

    def step(self, reply: Reply) -> Turn:
        turn = super().step(reply)
        if self.row.get("fault") == "crash":
            os._exit(3)
        return Turn(text=f"{turn.text} {random.random()}", done=turn.done)

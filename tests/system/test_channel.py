"""Messages over real ipc sockets: they arrive in order, strangers are passed over, waits end."""

import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch import BatchMeta, ColumnMeta, RowId
from realhf.api.messages import Call, Done, Drop, Failed, Hello, Ready, Stop, ToMaster, ToWorker
from realhf.base.errors import RunFailed
from realhf.system.channel import InlineChannel, ZmqMaster, ZmqWorker, deadline, decode, encode

META = BatchMeta((RowId(3, -1), RowId(3, 0)), {"tokens": ColumnMeta("int64", (0, 7))})
CALL = Call(5, "actor_gen", 2, 1, META, {"tokens": ((0,), (1,))}, ("tokens",), ((0,), (1,)), (0, 0), {"kl_coef": 0.1})
DONE = Done(5, 1, META, {"loss": (1.5, 3.0)}, {"kl_coef": 0.2}, {"rows": [{"a": 1}]}, (("x/Compute", 10, 20),), (9, 8))
WAIT_S = 5.0


@pytest.fixture
def master() -> Iterator[ZmqMaster]:
    master = ZmqMaster()
    yield master
    master.close()


def hello(rank: int) -> Hello:
    return Hello(rank, pid=1, host="here", port=0)


def test_everything_that_is_said_arrives_in_order(master: ZmqMaster) -> None:
    workers = [ZmqWorker(master.address, rank) for rank in range(2)]
    for rank, worker in enumerate(workers):
        worker.send(hello(rank))
    assert sorted(master.receive(WAIT_S).rank for _ in workers) == [0, 1]
    big = Failed(1, "x", "y" * (1 << 22), "z")
    for message in (Ready(1, {"seconds": 0.5}), DONE, big):
        workers[1].send(message)
    assert [master.receive(WAIT_S) for _ in range(3)] == [Ready(1, {"seconds": 0.5}), DONE, big]
    for message in (CALL, Drop(0, 4), Stop()):
        master.send(0, message)
    master.send(1, Stop())
    assert [workers[0].receive() for _ in range(3)] == [CALL, Drop(0, 4), Stop()]
    assert workers[1].receive() == Stop()
    assert master.receive(0.0) is None and master.refused == 0
    for worker in workers:
        worker.close()


def test_only_the_owner_may_enter_and_nothing_is_left_behind() -> None:
    master = ZmqMaster()
    socket = Path(master.address.removeprefix("ipc://"))
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    master.close()
    assert not socket.parent.exists()


def stranger(address: str, name: bytes | None = None) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if name is not None:
        socket.setsockopt(zmq.IDENTITY, name)
    socket.connect(address)
    return socket


GARBAGE = (
    [b""],
    [b"\xff\xff\xff"],
    [b"a", b"b", b"c"],
    [pickle.dumps({"rank": 0})],
    [msgpack.packb({"type": "Shutdown", "rank": 0})],
    [msgpack.packb({"type": "Ready"})],
    [msgpack.packb([1, 2, 3])],
    [encode(Stop(), ToWorker)],
    [encode(hello(0), ToMaster)],  # well said, but by nobody who is called 0
)


def test_strangers_are_passed_over_and_counted(master: ZmqMaster) -> None:
    unnamed, named = stranger(master.address), stranger(master.address, b"7")
    for frames in GARBAGE:
        unnamed.send_multipart(frames)
        named.send_multipart(frames)
    assert master.receive(0.5) is None
    assert master.refused == 2 * len(GARBAGE)
    worker = ZmqWorker(master.address, 0)
    worker.send(hello(0))
    assert master.receive(WAIT_S) == hello(0)
    unnamed.send(b"more")
    worker.send(Ready(0))
    assert master.receive(WAIT_S) == Ready(0)
    for socket in (unnamed, named, worker):
        socket.close()


def test_a_worker_that_is_no_longer_understood_ends_the_run(master: ZmqMaster) -> None:
    socket = stranger(master.address, b"3")
    socket.send(encode(hello(3), ToMaster))
    assert master.receive(WAIT_S) == hello(3)
    socket.send(b"\xc1")
    with pytest.raises(RunFailed, match="worker 3 is not understood"):
        master.receive(WAIT_S)
    socket.close()


@given(data=st.binary(max_size=60))
@settings(max_examples=50, deadline=None)
def test_whatever_cannot_be_read_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"refused a message of {len(data)} bytes"):
        decode(data, ToMaster)


@pytest.mark.parametrize("change", [{"rank": "one"}, {"surprise": 1}, {"type": "Hello"}, {"spans": [["x", 1]]}])
def test_a_message_with_wrong_fields_is_refused(change: dict) -> None:
    plain = msgpack.unpackb(encode(DONE, ToMaster))
    assert decode(msgpack.packb(plain), ToMaster) == DONE
    with pytest.raises(ValueError, match="refused"):
        decode(msgpack.packb({**plain, **change}), ToMaster)


def test_inline_a_message_is_handled_before_send_returns() -> None:
    channel, heard = InlineChannel(), []

    def handler(message: ToWorker) -> None:
        heard.append(message)
        channel.reply(DONE)
        channel.reply(Ready(0))

    channel.handler = handler
    assert channel.receive(WAIT_S) is None
    channel.send(0, CALL)
    assert heard == [CALL]
    assert [channel.receive(0.0) for _ in range(3)] == [DONE, Ready(0), None]


def test_a_deadline_counts_down() -> None:
    assert 0 < deadline(100.0)() <= 100.0
    assert deadline(-1.0)() < 0

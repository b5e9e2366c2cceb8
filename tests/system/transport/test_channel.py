"""Messages over real sockets: ordered delivery, rejected messages, timeouts."""

import os
import pickle
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.api.batch_meta import BatchMeta, ColumnMeta, RowId
from realhf.api.messages import (
    TO_MASTER,
    Done,
    Failed,
    FreeRows,
    Heartbeat,
    Hello,
    Holders,
    PrepareCall,
    Ready,
    Shutdown,
    ToWorker,
)
from realhf.base.errors import RunFailed, UserError
from realhf.system.transport import channel as channel_module
from realhf.system.transport.auth import Direction, Signer
from realhf.system.transport.channel import InlineChannel, ZmqMaster, ZmqWorker, deadline, decode, encode
from realhf.system.transport.handshake import accept_password, require_password, send_password
from tests.conftest import TIMEOUT_S
from tests.scaling import examples
from tests.system.transport.hostile_peers import KEY, oversized

META = BatchMeta((RowId(3, -1), RowId(3, 0)), {"tokens": ColumnMeta("int64", (0, 7))})
CALL = PrepareCall(
    5,
    "actor_gen",
    2,
    1,
    META,
    Holders(((0,), (1,)), {"tokens": (0, 1)}),
    ("tokens",),
    ((0,), (1,)),
    (0, 0),
    {"kl_coef": 0.1},
)
DONE = Done(5, 1, META, {"loss": (1.5, 3.0)}, {"kl_coef": 0.2}, {"rows": [{"a": 1}]}, b"{},\n", (3, 0))
WAIT_S = 5.0


@pytest.fixture(params=["", "tcp://127.0.0.1:*"], ids=["ipc", "tcp"])
def master(request: pytest.FixtureRequest) -> Iterator[ZmqMaster]:
    master = ZmqMaster(KEY, 4, request.param)
    yield master
    master.close()


def hello(rank: int) -> Hello:
    return Hello(rank, pid=1, host="here", port=0)


def test_messages_arrive_in_order(master: ZmqMaster) -> None:
    workers = [ZmqWorker(master.address, rank, KEY) for rank in range(2)]
    for rank, worker in enumerate(workers):
        worker.send(hello(rank))
    assert sorted(master.receive(WAIT_S).rank for _ in workers) == [0, 1]
    big = Failed(1, "x", "y" * (1 << 22), "z")
    for message in (Ready(1, {"seconds": 0.5}), DONE, big):
        workers[1].send(message)
    assert [master.receive(WAIT_S) for _ in range(3)] == [Ready(1, {"seconds": 0.5}), DONE, big]
    for message in (CALL, FreeRows(0, 4), Shutdown()):
        master.send((0,), message)
    master.send((1,), Shutdown())
    assert [workers[0].receive() for _ in range(3)] == [CALL, FreeRows(0, 4), Shutdown()]
    assert workers[1].receive() == Shutdown()
    assert master.receive(0.0) is None and master.rejected_messages == 0
    for worker in workers:
        worker.close()


def test_the_socket_is_private_and_removed() -> None:
    master = ZmqMaster(KEY, 1)
    path = Path(master.address.removeprefix("ipc://"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    master.close()
    assert not path.parent.exists()


def test_an_invalid_address_is_a_user_error(master: ZmqMaster) -> None:
    taken = master.address if master.address.startswith("tcp") else "tcp://nowhere:x"
    with pytest.raises(UserError, match="channel_address='tcp://"):
        ZmqMaster(KEY, 1, taken)


def connect(address: str, name: bytes | None = None) -> zmq.Socket:
    connection = zmq.Context.instance().socket(zmq.DEALER)
    connection.setsockopt(zmq.LINGER, 0)
    if address.startswith("tcp:"):
        send_password(connection, KEY)
    if name is not None:
        connection.setsockopt(zmq.IDENTITY, name)
    connection.connect(address)
    return connection


def signed(signer: Signer, rank: int, payload: bytes) -> list[bytes]:
    return [signer.sign((rank,), payload), payload]


HELLO = encode(hello(0))
GARBAGE = (
    [b""],
    [b"\xff\xff\xff"],
    [b"a", b"b", b"c"],
    [pickle.dumps({"rank": 0})],
    [msgspec.msgpack.encode({"type": "Ready"})],
    [HELLO],  # valid, but not signed
    [b"", HELLO],
    signed(Signer(bytes(32), Direction.to_master), 0, HELLO),  # another key
    signed(Signer(KEY, Direction.to_master), 9, encode(hello(9))),  # an unknown rank
    signed(Signer(KEY, Direction.to_worker), 0, encode(Shutdown())),  # a message of the master
    [signed(Signer(KEY, Direction.to_master), 0, HELLO)[0], encode(hello(1))],  # the header of another message
)


def test_unauthenticated_messages_are_counted_and_change_no_route(master: ZmqMaster) -> None:
    peers = [connect(master.address), connect(master.address, b"0")]
    for connection in peers:
        for frames in GARBAGE:
            connection.send_multipart(frames)
    assert master.receive(0.5) is None
    assert master.rejected_messages == 2 * len(GARBAGE)
    worker = ZmqWorker(master.address, 0, KEY)
    worker.send(hello(0))
    assert master.receive(WAIT_S) == hello(0)
    peers[0].send(b"more")
    worker.send(Ready(0))
    assert master.receive(WAIT_S) == Ready(0)
    master.send((0,), Shutdown())
    assert worker.receive(WAIT_S) == Shutdown() and worker.verifier.rejected == 0
    for connection in (*peers, worker):
        connection.close()


def test_replayed_and_garbage_messages_are_rejected(master: ZmqMaster) -> None:
    """A worker's messages are replayed 400 times; the other messages are garbage or too large."""
    signer, connection = Signer(KEY, Direction.to_master), connect(master.address)
    recorded = [signed(signer, 2, encode(message)) for message in (hello(2), Ready(2))]
    for frames in recorded:
        connection.send_multipart(frames)
    assert [master.receive(WAIT_S) for _ in recorded] == [hello(2), Ready(2)]
    for number in range(400):
        connection.send_multipart(recorded[number % 2])
        connection.send_multipart(GARBAGE[number % len(GARBAGE)])
    large = 200 if master.address.startswith("tcp") else 0
    for _ in range(large):
        oversized(master.address, channel_module.MAX_MESSAGE + 1)
    assert master.receive(1.0) is None
    assert master.rejected_messages == 800
    connection.send_multipart(signed(signer, 2, encode(DONE).replace(b"rank\x01", b"rank\x02")))
    assert isinstance(master.receive(WAIT_S), Done)
    connection.close()


@pytest.mark.parametrize("address", ["ipc://*", "tcp://127.0.0.1:*"], ids=["ipc", "tcp"])
def test_a_worker_rejects_unauthenticated_messages(address: str) -> None:
    """A server without the key is rejected, also one that has the password, as are messages to another worker."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    if address.startswith("tcp:"):
        require_password(router)
    router.bind(address)
    accept_password(context, KEY)
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    worker = ZmqWorker(address, 0, KEY)
    worker.send(hello(0))
    route = router.recv_multipart()[0]
    stop = encode(Shutdown())
    for frames in (*GARBAGE, signed(Signer(KEY, Direction.to_worker), 1, stop), [HELLO, HELLO, HELLO]):
        if frames != GARBAGE[9]:
            router.send_multipart([route, *frames])
    with pytest.raises(RunFailed, match="no message from the master for 0 s while waiting for the end"):
        worker.receive(0.4, "the end")
    assert worker.verifier.rejected == len(GARBAGE) + 1
    router.send_multipart([route, *signed(Signer(KEY, Direction.to_worker), 0, stop)])
    assert worker.receive(WAIT_S) == Shutdown()
    worker.close()
    router.close()
    context.term()


def test_an_invalid_message_of_a_worker_ends_the_run(master: ZmqMaster) -> None:
    """It is authenticated; it may be of another version."""
    connection, signer = connect(master.address), Signer(KEY, Direction.to_master)
    for payload in (b"\xc1", HELLO, encode(Heartbeat(3, 1, "here", "this"))):
        connection.send_multipart(signed(signer, 3, payload))
        with pytest.raises(RunFailed, match="worker 3 sent an invalid message"):
            master.receive(WAIT_S)
    connection.close()


def test_heartbeats_arrive_between_messages_until_stopped(master: ZmqMaster) -> None:
    worker, stopped = ZmqWorker(master.address, 1, KEY), threading.Event()
    heartbeat = Heartbeat(1, 7, "here", "a long call")
    thread = threading.Thread(target=worker.send_heartbeats, args=(stopped, 0.01, lambda: heartbeat))
    thread.start()
    worker.send(hello(1))
    messages = [master.receive(WAIT_S) for _ in range(8)]
    assert messages.count(hello(1)) == 1 and messages.count(heartbeat) == 7
    stopped.set()
    thread.join()
    master.send((1,), Shutdown())
    assert worker.receive(WAIT_S) == Shutdown()
    worker.close()


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:*"], ids=["ipc", "tcp"])
def test_a_worker_detects_the_permanent_loss_of_its_master(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not its own close, or a master that restarts in time."""
    monkeypatch.setattr(channel_module, "MASTER_LOST_S", 1.0)
    lost: SimpleQueue[int] = SimpleQueue()
    master = ZmqMaster(KEY, 2, address)
    workers = [ZmqWorker(master.address, rank, KEY, partial(lost.put, rank)) for rank in range(2)]
    for rank, worker in enumerate(workers):
        worker.send(hello(rank))
    assert {master.receive(WAIT_S).rank for _ in workers} == {0, 1}
    if address:  # a private socket has a new name
        master.close()
        master = ZmqMaster(KEY, 2, master.address)
        workers[0].send(hello(0))
        assert master.receive(WAIT_S) == hello(0)
    workers[0].close()
    with pytest.raises(Empty):
        lost.get(timeout=1.5)
    master.close()
    assert lost.get(timeout=WAIT_S) == 1
    workers[1].close()
    assert lost.empty()


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_MESSAGE", 100)
    with pytest.raises(ValueError, match="a Failed of .* bytes exceeds the limit of 100"):
        encode(Failed(0, "", "x" * 200, ""))


@given(data=st.binary(max_size=60))
@settings(max_examples=examples(50))
def test_invalid_bytes_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"invalid message of {len(data)} bytes"):
        decode(data, TO_MASTER)


@pytest.mark.parametrize("change", [{"rank": "one"}, {"surprise": 1}, {"type": "Hello"}, {"spans": [["x", 1]]}])
def test_a_message_with_wrong_fields_is_rejected(change: dict) -> None:
    plain = msgspec.msgpack.decode(encode(DONE))
    assert decode(msgspec.msgpack.encode(plain), TO_MASTER) == DONE
    with pytest.raises(ValueError, match="invalid message"):
        decode(msgspec.msgpack.encode({**plain, **change}), TO_MASTER)


def test_inline_a_message_is_handled_before_send_returns() -> None:
    channel, received = InlineChannel(), []

    def handler(message: ToWorker) -> None:
        received.append(message)
        channel.reply(DONE)
        channel.reply(Ready(0))

    channel.handler = handler
    assert channel.receive(WAIT_S) is None
    channel.send((0,), CALL)
    assert received == [CALL]
    assert [channel.receive(0.0) for _ in range(3)] == [DONE, Ready(0), None]


def test_a_deadline_counts_down() -> None:
    assert 0 < deadline(100.0)() <= 100.0
    assert deadline(-1.0)() < 0


CYCLE = """
import gc
from realhf.system.transport.channel import ZmqMaster, ZmqWorker

def fail():
    master = ZmqMaster(bytes(32), 1)
    try:
        raise ValueError(master, ZmqWorker(master.address, 0, bytes(32), lambda: None))
    except ValueError as error:
        error.cycle = error

gc.disable()
fail()
gc.collect()
print("collected")
"""


def test_open_channels_in_a_reference_cycle_are_collected() -> None:
    """As after an exception whose traceback refers to them; pyzmq alone waits forever."""
    done = subprocess.run([sys.executable, "-c", CYCLE], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout == "collected\n", done.stderr


INTERRUPTED = """
import sys
from realhf.system.transport.channel import ZmqMaster

def interrupt(frame, event, arg, left=[int(sys.argv[1])]):
    if frame.f_code.co_name == "__init__" and frame.f_code.co_filename.endswith("channel.py"):
        left[0] -= event == "line"
        if left[0] < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
    return interrupt

sys.settrace(interrupt)
channel = ZmqMaster(b"k" * 32, 1)
sys.settrace(None)
print("made")
"""


def test_an_interrupted_constructor_leaves_no_folder(tmp_path: Path) -> None:
    """At any of its lines, or before the caller can close the channel."""
    for line in range(100):
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-W", "ignore", "-c", INTERRUPTED, str(line)]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert not list(tmp_path.iterdir()), f"at line {line}"
        if "made" in found.stdout:
            break
        assert "KeyboardInterrupt" in found.stderr
    assert 10 < line < 99

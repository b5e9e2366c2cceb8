"""Seals: what is changed anywhere, said twice or said by another does not pass."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.system.transport.auth import (
    FIELDS,
    RUN,
    TAG_BYTES,
    AuthError,
    Direction,
    SignatureVerifier,
    Signer,
    new_key,
)

KEY = bytes(range(32))
payloads = st.binary(max_size=40)


@given(st.lists(st.tuples(st.sampled_from(list(Direction)), st.integers(0, 3), payloads), min_size=1, max_size=8))
def test_what_is_sealed_passes_once(messages: list[tuple[Direction, int, bytes]]) -> None:
    seals = {(lane, rank): Signer(KEY, lane) for lane in Direction for rank in range(4)}
    gate = SignatureVerifier(KEY, tuple(Direction), range(4))
    for lane, rank, payload in messages:
        head = seals[lane, rank].head((rank,), payload)
        assert gate.check(head, payload) == (lane, rank)
        with pytest.raises(AuthError, match=f"of worker {rank} comes after"):
            gate.check(head, payload)


@given(payload=payloads, at=st.integers(0, TAG_BYTES + FIELDS.size + RUN.size - 1), flip=st.integers(1, 255))
def test_no_bit_of_a_head_may_change(payload: bytes, at: int, flip: int) -> None:
    head = Signer(KEY, Direction.to_master).head((1,), payload)
    changed = bytes(byte ^ flip if i == at else byte for i, byte in enumerate(head))
    gate = SignatureVerifier(KEY, tuple(Direction), range(4))
    with pytest.raises(AuthError):
        gate.check(changed, payload)
    with pytest.raises(AuthError, match="not sealed with our key"):
        gate.check(head, payload + b"x")
    assert gate.check(head, payload) == (Direction.to_master, 1)  # what was refused takes nobody's number


def test_no_byte_passes_from_payload_to_ranks() -> None:
    payload = RUN.pack(2, 4) + b"rest"
    head = Signer(KEY, Direction.to_master).head((1,), payload)
    gate = SignatureVerifier(KEY, (Direction.to_master,), range(4))
    longer = head + payload[: RUN.size]
    with pytest.raises(AuthError, match="bytes for 1 runs"):
        gate.check(longer, payload[RUN.size :])
    counted = longer[: TAG_BYTES + FIELDS.size - 4] + b"\2" + longer[TAG_BYTES + FIELDS.size - 3 :]
    with pytest.raises(AuthError, match="not sealed with our key"):
        gate.check(counted, payload[RUN.size :])
    assert gate.check(head, payload) == (Direction.to_master, 1)


def test_numbers_may_have_gaps_but_not_turn_back() -> None:
    seal, gate = Signer(KEY, Direction.to_master), SignatureVerifier(KEY, (Direction.to_master,), range(1))
    heads = [seal.head((0,), b"x") for _ in range(3)]
    gate.check(heads[0], b"x")
    gate.check(heads[2], b"x")
    with pytest.raises(AuthError, match="message 2 of worker 0 comes after 3"):
        gate.check(heads[1], b"x")


@given(st.sets(st.integers(0, 40), min_size=1), payloads)
def test_what_is_for_many_passes_at_each_of_them_alone(ranks: set[int], payload: bytes) -> None:
    seal = Signer(KEY, Direction.to_worker)
    for number in (1, 2):
        head = seal.head(ranks, payload)
        for rank in range(42):
            gate = SignatureVerifier(KEY, (Direction.to_worker,), range(rank, rank + 1))
            if rank in ranks:
                assert gate.check(head, payload) == (Direction.to_worker, rank)
                with pytest.raises(AuthError, match=f"message {number} of worker {rank} comes after"):
                    gate.check(head, payload)
            else:
                with pytest.raises(AuthError, match="nobody here is meant in lane 0"):
                    gate.check(head, payload)


@given(head=st.binary(max_size=80), payload=payloads)
def test_garbage_is_refused(head: bytes, payload: bytes) -> None:
    with pytest.raises(AuthError):
        SignatureVerifier(KEY, tuple(Direction), range(4)).check(head, payload)


def test_a_key_is_its_owners_and_new_each_time(tmp_path: Path) -> None:
    path = tmp_path / "key"
    keys = {new_key(path) for _ in range(3)}
    assert len(keys) == 3 and path.read_bytes() in keys and len(path.read_bytes()) == TAG_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

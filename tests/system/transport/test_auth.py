"""Modified, replayed and foreign messages are rejected."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.system.transport.auth import (
    HEADER,
    RANK_RANGE,
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
def test_a_signed_message_is_accepted_once(messages: list[tuple[Direction, int, bytes]]) -> None:
    signers = {(direction, rank): Signer(KEY, direction) for direction in Direction for rank in range(4)}
    verifier = SignatureVerifier(KEY, tuple(Direction), range(4))
    for direction, rank, payload in messages:
        header = signers[direction, rank].sign((rank,), payload)
        assert verifier.check(header, payload) == (direction, rank)
        with pytest.raises(AuthError, match=f"of worker {rank} comes after"):
            verifier.check(header, payload)


@given(payload=payloads, at=st.integers(0, TAG_BYTES + HEADER.size + RANK_RANGE.size - 1), flip=st.integers(1, 255))
def test_every_changed_header_byte_is_detected(payload: bytes, at: int, flip: int) -> None:
    header = Signer(KEY, Direction.to_master).sign((1,), payload)
    changed = bytes(byte ^ flip if i == at else byte for i, byte in enumerate(header))
    verifier = SignatureVerifier(KEY, tuple(Direction), range(4))
    with pytest.raises(AuthError):
        verifier.check(changed, payload)
    with pytest.raises(AuthError, match="invalid signature"):
        verifier.check(header, payload + b"x")
    assert verifier.check(header, payload) == (Direction.to_master, 1)  # a rejected message uses no number


def test_payload_bytes_cannot_become_ranks() -> None:
    payload = RANK_RANGE.pack(2, 4) + b"rest"
    header = Signer(KEY, Direction.to_master).sign((1,), payload)
    verifier = SignatureVerifier(KEY, (Direction.to_master,), range(4))
    longer = header + payload[: RANK_RANGE.size]
    with pytest.raises(AuthError, match="bytes for 1 ranges"):
        verifier.check(longer, payload[RANK_RANGE.size :])
    counted = longer[: TAG_BYTES + HEADER.size - 4] + b"\2" + longer[TAG_BYTES + HEADER.size - 3 :]
    with pytest.raises(AuthError, match="invalid signature"):
        verifier.check(counted, payload[RANK_RANGE.size :])
    assert verifier.check(header, payload) == (Direction.to_master, 1)


def test_numbers_may_have_gaps_but_must_increase() -> None:
    signer, verifier = Signer(KEY, Direction.to_master), SignatureVerifier(KEY, (Direction.to_master,), range(1))
    headers = [signer.sign((0,), b"x") for _ in range(3)]
    verifier.check(headers[0], b"x")
    verifier.check(headers[2], b"x")
    with pytest.raises(AuthError, match="message 2 of worker 0 comes after 3"):
        verifier.check(headers[1], b"x")


@given(st.sets(st.integers(0, 40), min_size=1), payloads)
def test_only_the_addressed_ranks_accept_a_message(ranks: set[int], payload: bytes) -> None:
    signer = Signer(KEY, Direction.to_worker)
    for number in (1, 2):
        header = signer.sign(ranks, payload)
        for rank in range(42):
            verifier = SignatureVerifier(KEY, (Direction.to_worker,), range(rank, rank + 1))
            if rank in ranks:
                assert verifier.check(header, payload) == (Direction.to_worker, rank)
                with pytest.raises(AuthError, match=f"message {number} of worker {rank} comes after"):
                    verifier.check(header, payload)
            else:
                with pytest.raises(AuthError, match="not for this receiver .direction 0."):
                    verifier.check(header, payload)


@given(header=st.binary(max_size=80), payload=payloads)
def test_garbage_is_rejected(header: bytes, payload: bytes) -> None:
    with pytest.raises(AuthError):
        SignatureVerifier(KEY, tuple(Direction), range(4)).check(header, payload)


def test_keys_are_private_and_new(tmp_path: Path) -> None:
    path = tmp_path / "key"
    keys = {new_key(path) for _ in range(3)}
    assert len(keys) == 3 and path.read_bytes() in keys and len(path.read_bytes()) == TAG_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

"""The passes of the peer in ``bench_peer.py`` compute the same loss."""

from pathlib import Path

import pytest
import torch

from benchmarks import bench_peer


@pytest.mark.slow
def test_packed_and_padded_rows_have_the_same_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peer, "N_PROMPTS", 4)
    pair = bench_peer.model_pair("tiny", tmp_path, bf16=False)
    optimizer = torch.optim.SGD(pair.theirs.parameters(), lr=0.0)
    padded = bench_peer.their_step(pair, optimizer)
    for size in (128, 300):
        assert bench_peer.their_packed_step(pair, optimizer, size) == pytest.approx(padded, rel=1e-5)

"""Forward outputs against transformers."""

from pathlib import Path

import pytest
import torch
from torch import nn

from realhf.models.engine.outputs import ForwardOutputs
from realhf.models.engine.packing import pack
from tests.models.engine.tiny_engine import FAMILIES, engine_on, rows_of

LENGTHS = (4, 1, 9, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs(family: str, hf_models: dict[str, tuple[Path, nn.Module]]) -> None:
    folder, theirs = hf_models[family]
    engine, batch = engine_on(folder, trained=False), rows_of(LENGTHS)
    with torch.no_grad():
        outputs = ForwardOutputs(engine.model, engine.model.hidden(batch["tokens"], LENGTHS), batch, pack(batch))
        for temperature in (1.0, 0.6):
            found = outputs.logprobs(temperature).split(LENGTHS)
            for row, logprobs in zip(batch.columns["tokens"].rows(), found, strict=True):
                table = (theirs(row[None]).logits[0] / temperature).log_softmax(-1)
                expected = table[:-1].gather(1, row[1:, None])[:, 0]
                torch.testing.assert_close(logprobs, torch.cat([torch.zeros(1), expected]), atol=1e-5, rtol=1e-5)


def test_values(llama: Path) -> None:
    engine, batch = engine_on(llama, trained=False, scalar=True), rows_of(LENGTHS)
    with torch.no_grad():
        outputs = ForwardOutputs(engine.model, engine.model.hidden(batch["tokens"], LENGTHS), batch, pack(batch))
        values, last = outputs.values(), outputs.last_values()
    assert values.shape == (18,) and last.shape == (4,) and values.dtype == last.dtype == torch.float32
    assert torch.equal(last, torch.stack([row[-1] for row in values.split(LENGTHS)]))
    torch.testing.assert_close(values, (outputs.hidden @ engine.params.view("head.weight").t())[:, 0])

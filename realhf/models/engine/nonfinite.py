"""Errors for logits and losses that are not finite: the row, and the layer, parameters or inputs with NaN or inf."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.data.batch import SequenceBatch
from realhf.models.engine.decode.scheduler import Request
from realhf.models.transformer import Transformer

MAX_NAMES = 3


def nonfinite_loss(loss: float, batch: SequenceBatch) -> ValueError:
    """Return the error for the loss of a micro-batch."""
    names = [f"prompt {row.prompt}, sample {row.sample}" for row in batch.ids]
    invalid = [
        f"'{key}' of {name}"
        for key, column in batch.columns.items()
        for name, values in zip(names, column.rows(), strict=True)
        if not values.isfinite().all()
    ]
    return ValueError(
        f"the loss of a micro-batch with {len(batch)} rows ({'; '.join(names[:MAX_NAMES])}) is {loss}"
        f"{_listed('; inputs that are not finite', invalid)}; lower the learning rate, or check the rewards and data"
    )


def nonfinite_logits(model: Transformer, request: Request, row: int, response: Sequence[int]) -> ValueError:
    """Return the error for a row without a distribution of its next token after the tokens ``response``.

    It computes the row again, without cache and fused kernel. Collective over the tensor-parallel group.
    """
    prompt, sample = divmod(row, request.n)
    tokens = torch.cat((request.prompt_tensors[prompt], request.stop_tokens.new_tensor(response)))
    with torch.no_grad():
        cause = _first_nonfinite(model, tokens) + _listed("; parameters that are not finite", _nonfinite_names(model))
    return ValueError(
        f"the logits of prompt {request.prompts.ids[prompt].prompt}, sample {sample} are not finite at response token "
        f"{len(response)} (position {len(tokens)}); {cause}; lower the learning rate, or check the model "
        "and the temperature"
    )


def nonfinite_turn(model: Transformer, key: tuple[int, int], position: int) -> ValueError:
    """Return the error for an episode without a distribution of the token at ``position``."""
    prompt, sample = key
    return ValueError(
        f"the logits of prompt {prompt}, sample {sample} are not finite at position {position}"
        f"{_listed('; parameters that are not finite', _nonfinite_names(model))}; lower the learning rate, or check "
        "the model and the temperature"
    )


def _first_nonfinite(model: Transformer, tokens: Tensor) -> str:
    """Return where the row's hidden states are first not finite. A pipeline stage cannot compute them alone."""
    if not (model.is_first and model.is_last):
        return f"this stage has layers {model.layers[0]} to {model.layers[-1]}"
    found: list[str] = []

    def observe(place: str, states: Tensor) -> None:
        if len(invalid := (~states.isfinite().all(-1)).nonzero()):
            found.append(f"the first values that are not finite are those of {place} at position {int(invalid[0])}")

    hidden = model.hidden(tokens, [len(tokens)], observe=observe)
    observe("the final norm", hidden)
    observe("the head", model.logits(hidden))
    return found[0] if found else "computed again, all values are finite"


def _nonfinite_names(model: Transformer) -> list[str]:
    """Return the parameters that are not finite on a tensor-parallel rank."""
    params = model.params
    invalid = torch.stack([~params.view(name).isfinite().all() for name in params.names]).long()
    return [name for name, count in zip(params.names, model.tp.all_reduce(invalid).tolist(), strict=True) if count]


def _listed(title: str, names: Sequence[str]) -> str:
    """Return a title and the first names; empty without names."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{title}: {', '.join(names[:MAX_NAMES])}{more}" if names else ""

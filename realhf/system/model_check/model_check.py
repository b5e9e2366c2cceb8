"""The checks of ``realhf model check``: what our model and that of transformers compute from the same weights."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from realhf.api.layout import ParallelStrategy
from realhf.api.param_box import whole
from realhf.arch.hf_config import read_hf_config
from realhf.arch.param_specs import param_specs
from realhf.base.errors import UserError
from realhf.models.flat_params import FlatParams
from realhf.models.hf_folder import INDEX, SINGLE, load_hf, save_hf
from realhf.models.transformer import Transformer
from realhf.system.model_check.layout_ranks import in_layout

LIMIT = 1e-4
"""Of differences between log-probabilities, relative to the largest logit if that exceeds 1."""
N_NEW = 12
LAYER_COUNTS = ("num_hidden_layers", "n_layer")


@dataclass(frozen=True)
class CheckResult:
    name: str
    passed: bool
    text: str


@dataclass(frozen=True)
class Reference:
    """What transformers computes: the log-probabilities of the tokens of rows, and greedy tokens after the last row."""

    logprobs: tuple[Tensor, ...]
    greedy: Tensor
    scale: float


class ModelCheck:
    """Checks the model of a folder on ``n_rows`` rows of up to ``longest`` tokens; files are written to ``work``.

    With ``n_layers`` it is a random model of the folder's configuration and this depth, 0: the folder's weights.
    """

    def __init__(self, folder: Path, work: Path, n_layers: int, n_rows: int, longest: int, seed: int) -> None:
        quiet_transformers()
        self.work, self.n_layers, self.n_rows, self.longest, self.seed = work, n_layers, n_rows, longest, seed
        has_weights = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
        self.folder = folder if has_weights and not n_layers else self._random_model(folder)
        self.config = read_hf_config(self.folder, scalar_head=False)

    def run(self, strategies: Sequence[ParallelStrategy]) -> Iterator[CheckResult]:
        """Yield the results of all checks; a model that cannot be read ends them."""
        rows = self._rows()
        reference, (ours, dtype) = self._reference(rows), self._load(torch.float32)
        yield self._compared("one rank", rows, reference, self._logprobs(ours, rows))
        yield self._greedy(ours, rows[-1], reference)
        del ours
        yield self._saved(dtype)
        for strategy in strategies:
            yield self._compared(str(strategy), rows, reference, in_layout(self.folder, self.work, strategy, rows))

    def _random_model(self, folder: Path) -> Path:
        """Write a random model of a configuration, with fewer layers if requested."""
        from transformers import AutoConfig, AutoModelForCausalLM

        file = folder / "config.json" if folder.is_dir() else folder
        fields = json.loads(file.read_text())
        target = self.work / "random"
        target.mkdir()
        (target / "config.json").write_text(json.dumps(with_layers(fields, self.n_layers)))
        torch.manual_seed(self.seed)
        try:
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(target, trust_remote_code=False),
                trust_remote_code=False,
                dtype=torch.float32,
            )
        except Exception as error:  # any class of its model
            raise UserError(f"transformers cannot create the model of '{file}': {error}") from error
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim == 1:  # norms and biases, which start at the identity
                    param.add_(0.1 * torch.randn_like(param))
        text = (target / "config.json").read_text()
        model.save_pretrained(target)
        (target / "config.json").write_text(text)
        return target

    def _rows(self) -> list[Tensor]:
        """Return random rows, the longest one last."""
        generator = torch.Generator().manual_seed(self.seed)
        longest = min(self.longest, self.config.max_row_len - N_NEW)
        lengths = [max(2, longest * (i + 1) // self.n_rows) for i in range(self.n_rows)]
        return [torch.randint(self.config.vocab, (n,), generator=generator) for n in lengths]

    @torch.no_grad()
    def _reference(self, rows: Sequence[Tensor]) -> Reference:
        from transformers import AutoModelForCausalLM, GenerationConfig

        model = AutoModelForCausalLM.from_pretrained(self.folder, trust_remote_code=False, dtype=torch.float32).eval()
        logits = [model(row[None]).logits[0].float() for row in rows]
        logprobs = tuple(
            x.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0] for x, row in zip(logits, rows, strict=True)
        )
        options = GenerationConfig(max_new_tokens=N_NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
                                   bos_token_id=1, use_cache=False)  # fmt: skip
        tokens = model.generate(rows[-1][None], generation_config=options)[0, len(rows[-1]) :]
        return Reference(logprobs, tokens, max(1.0, max(float(x.abs().max()) for x in logits)))

    def _load(self, dtype: torch.dtype | None) -> tuple[Transformer, torch.dtype]:
        """Return our model, in the stored type by default, and the stored type."""
        stored = stored_dtype(self.folder)
        specs = param_specs(self.config)
        params = FlatParams(specs, {spec.name: whole(spec.shape) for spec in specs}, dtype or stored, "cpu")
        load_hf(self.folder, self.config, params, 0)
        return Transformer(self.config, params), stored

    @torch.no_grad()
    def _logprobs(self, model: Transformer, rows: Sequence[Tensor]) -> list[Tensor]:
        lengths = [len(row) for row in rows]
        packed = torch.cat(list(rows))
        found = model.logprobs(model.hidden(packed, lengths), packed, lengths)
        return [row[1:] for row in found.split(lengths)]

    def _compared(
        self, name: str, rows: Sequence[Tensor], reference: Reference, found: Sequence[Tensor]
    ) -> CheckResult:
        differences = [float((a - b).abs().max()) for a, b in zip(found, reference.logprobs, strict=True)]
        limit, n = LIMIT * reference.scale, sum(map(len, rows))
        text = f"log-probabilities of {len(rows)} rows, {n} tokens: {max(differences):.1e} apart (limit {limit:.0e})"
        return CheckResult(name, max(differences) <= limit, text)

    @torch.no_grad()
    def _greedy(self, model: Transformer, prompt: Tensor, reference: Reference) -> CheckResult:
        """Decode with the KV cache after the tokens of transformers, so that one tie does not change the rest."""
        cache, at = model.new_cache(1, len(prompt) + N_NEW), len(prompt)
        logits = [model.logits(model.hidden(prompt, [at], cache, [0])[-1:])[0]]
        with model.decoding():
            for token in reference.greedy[:-1]:
                logits.append(model.logits(model.decode(token[None], torch.tensor([at]), cache))[0])
                at += 1
        behind = [float(x.max() - x[token]) for x, token in zip(logits, reference.greedy.tolist(), strict=True)]
        text = f"{N_NEW} tokens after a prompt of {len(prompt)}: the greedy ones are {max(behind):.1e} below ours"
        return CheckResult("greedy", max(behind) <= LIMIT * reference.scale, text)

    def _saved(self, dtype: torch.dtype) -> CheckResult:
        """Save the model in its stored type: the tensors are equal byte for byte, and transformers reads the folder."""
        from transformers import AutoConfig

        model, _ = self._load(None)
        save_hf(self.work / "saved", self.config, model.params.view, None)
        before, after = tensors_of(self.folder), tensors_of(self.work / "saved")
        changed = [name for name in after if name in before and not torch.equal(before[name].to(dtype), after[name])]
        missing = [name for name in after if name not in before]
        AutoConfig.from_pretrained(self.work / "saved", trust_remote_code=False)
        kept = read_hf_config(self.work / "saved", scalar_head=False) == self.config
        names = ", ".join((changed + missing)[:3])
        text = f"{len(after)} tensors: " + (f"{names} differ" if names else "equal byte for byte")
        return CheckResult("saved", kept and not names, text + ("" if kept else "; the configuration differs"))


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def with_layers(fields: dict[str, Any], n_layers: int) -> dict[str, Any]:
    """Return a configuration with the first ``n_layers`` layers, all for 0. Lists with one entry per layer are cut."""
    if not n_layers:
        return fields
    key = next((key for key in LAYER_COUNTS if key in fields), LAYER_COUNTS[0])
    before = fields.get(key)
    cut = {k: v[:n_layers] for k, v in fields.items() if isinstance(v, list) and len(v) == before}
    return {**fields, **cut, key: n_layers}


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the type of the first matrix of a folder."""
    return next(tensor for tensor in tensors_of(folder).values() if tensor.dim() > 1).dtype


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder by name, mapped from its files."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors

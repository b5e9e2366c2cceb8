"""The arguments that variable-length attention selects are valid for torch and FlashAttention of every release."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from packaging.version import Version

from realhf.ops.varlen import CACHED, SOURCES, VarlenKernel
from tests.signatures.matching import problem
from tests.signatures.parameters import parsed
from tests.signatures.record import read_records
from tests.signatures.targets import RELEASES, distribution
from tests.signatures.uses import Arguments

RECORDS = read_records()
ABSENT = {
    # torch before 2.10 and early sources of FlashAttention lack the module
    "torch.nn.attention.varlen": ("2.5.0",),
    "flash_attn_interface": ("2.6.0.post1",),
}
CASES = [
    (module, name, version)
    for module, name, *_ in SOURCES
    for version in RELEASES[distribution(module)]
    if version not in ABSENT.get(module, ())
]


class RecordedKernel:
    """A kernel with the signatures of a release; ``problems`` has the calls that do not match them."""

    def __init__(self, module: str, name: str, version: str) -> None:
        self.n_calls, self.problems = 0, list[str]()
        record = RECORDS[distribution(module)][version]
        (signature,) = record[f"{module}.{name}"] or []
        cached = record.get(f"{module}.{CACHED}")
        parameters = parsed(signature)
        names = frozenset(one.arg for one in (*parameters.args, *parameters.kwonlyargs))
        function = self.checked(signature)
        of_cache = parsed(cached[0]) if cached else None
        self.kernel = VarlenKernel(
            module,
            function,
            names,
            cached=self.checked(cached[0]) if cached else None,
            cached_parameters=frozenset(one.arg for one in of_cache.args) if of_cache else frozenset(),
        )

    def checked(self, signature: str) -> Callable[..., Any]:
        def call(q: torch.Tensor, *args: object, **options: object) -> Any:
            self.n_calls += 1
            reason = problem(parsed(signature), Arguments(1 + len(args), tuple(options)))
            self.problems += [reason] if reason else []
            with_sums = options.get("return_softmax_lse") or options.get("return_aux")
            return (q, q.new_empty(q[..., 0].numel())) if with_sums else q

        return call


@pytest.mark.parametrize("module, name, version", CASES)
def test_arguments_are_valid_in_every_release(module: str, name: str, version: str) -> None:
    recorded = RecordedKernel(module, name, version)
    kernel, offsets = recorded.kernel, torch.tensor([0, 6])
    for softcap, window, n_kv in product((0.0, 5.0), (0, 4), (2, 4)):
        q, k = torch.empty(6, 4, 64), torch.empty(6, n_kv, 64)
        if not kernel.accepts(64, softcap, window):
            continue
        kernel(q, k, k, (offsets, offsets, 6, 6), 0.5, (softcap, window))
        if kernel.cached is not None:
            kernel.attend_cached(q[:2], k[None].repeat(2, 1, 1, 1), k[None].repeat(2, 1, 1, 1), offsets, 0.5,
                                 (softcap, window))  # fmt: skip
        elif kernel.reads_used_lengths:
            kernel(q, k, k, (offsets, offsets, 1, 6), 0.5, (softcap, window), offsets)
        if kernel.reads_spans:
            cache = torch.empty(3, 8, n_kv, 64)
            for slots in (None, offsets):
                kernel.attend_spans(q.view(2, 3, 4, 64), cache, cache, slots, offsets, offsets, 8, 0.5, softcap)
    assert recorded.n_calls >= 2 and not recorded.problems


@pytest.mark.parametrize("module, name, version", CASES)
def test_the_documented_features_are_found(module: str, name: str, version: str) -> None:
    """docs/backends.md: soft caps are FlashAttention's, windows since torch 2.11, used lengths since torch 2.12."""
    kernel = RecordedKernel(module, name, version).kernel
    is_flash = module.startswith("flash_attn")
    assert kernel.is_flash == kernel.accepts(64, 5.0, 4) == is_flash
    assert kernel.accepts(64, 0.0, 4) == (is_flash or Version(version) >= Version("2.11"))
    assert kernel.reads_used_lengths == (is_flash or Version(version) >= Version("2.12"))
    assert kernel.reads_spans == (Version(version) >= Version("2.7" if is_flash else "2.12"))


@pytest.mark.parametrize("module, name", [source[:2] for source in SOURCES])
def test_older_releases_lack_the_function(module: str, name: str) -> None:
    for version in ABSENT.get(module, ()):
        assert RECORDS[distribution(module)][version][f"{module}.{name}"] is None

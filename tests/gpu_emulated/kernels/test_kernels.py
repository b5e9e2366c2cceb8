"""Every CUDA kernel of csrc on the CPU, by emulation, against its reference implementation."""

import re
import shutil

import pytest
import torch

from tests.gpu_emulated.kernels.build import build, kernel_names, sources
from tests.gpu_emulated.kernels.cases import CASES, QUICK, check_samples
from tests.gpu_emulated.kernels.library import EmulatedKernels

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
MAX_ATOMICS_PER_ADDRESS = 64
"""Of one block. Atomics to one address are serial: 150,000 of them take a millisecond."""


@pytest.fixture(scope="module")
def kernels() -> EmulatedKernels:
    return EmulatedKernels(build(sources()))


def test_every_cuda_kernel_has_a_case() -> None:
    assert sorted(CASES) == sorted(kernel_names(sources()))


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_equals_its_reference(kernels: EmulatedKernels, name: str) -> None:
    kernels.shuffle(1)
    kernels.take_counts()
    CASES[name](kernels, QUICK, torch.Generator().manual_seed(0))
    assert kernels.take_counts()["launches"] > 0


@pytest.mark.parametrize("options", [(1.0, 0, 1.0), (1.0, 40, 1.0), (1.0, 0, 0.9)])
def test_sampling_has_no_contended_atomics(kernels: EmulatedKernels, options: tuple[float, int, float]) -> None:
    kernels.take_counts()
    logits = torch.randn(1, 4097, generator=torch.Generator().manual_seed(0))
    check_samples(kernels, logits, torch.tensor([0.37], dtype=torch.float64), options, None)
    assert kernels.take_counts()["hottest"] <= MAX_ATOMICS_PER_ADDRESS


def test_kernels_run_on_the_device_and_the_stream_of_their_tensors(kernels: EmulatedKernels) -> None:
    values, counters, u = torch.randn(1, 4), torch.arange(4), torch.tensor([0.5], dtype=torch.float64)
    ends, bounds, per_row = torch.zeros(1, 5, dtype=torch.bool), torch.tensor([[1, 3]]), torch.zeros(1)
    arguments = {
        "packed_gae": (values[0], values[0], torch.tensor([0, 4]), torch.tensor([True]), 0.9, 0.9),
        "gae_2d": (values, torch.randn(1, 5), ends, ends, 0.9, 0.9, True),
        "slice_intervals": (values[0], bounds),
        "set_intervals": (torch.ones(2), values[0], bounds),
        "logit_stats": (values, torch.tensor([1]), 1.0),
        "logit_slopes_": (values, torch.tensor([1]), per_row, per_row, per_row, 1.0),
        "sample_tokens": (values, u, None, None, 1.0, 0, 1.0),
        "counter_uniform": (7, counters, counters, counters),
        "activate": (values, 0, True),
        "activate_backward": (values, values, 0, False),
        "rotate": (values.view(1, 1, 4), torch.zeros(2, 3, 4), torch.tensor([1]), False),
    }
    assert arguments.keys() == CASES.keys()
    with kernels.tensors_on(1):
        for name, given in arguments.items():
            kernels[name](*given)
            assert kernels.take_counts()["launches"] == 1


RULES = (
    (0, ""),
    (1, r"lane 0 waits at __shfl_sync in rules.cu:\d+, but lane 16 of its mask has returned"),
    (2, r"lane 0 waits at __shfl_sync in rules.cu:\d+, but lane 16 of its mask waits at __shfl_sync in rules.cu:\d+"),
    (3, "of its mask has another mask"),
    (4, r"__shfl_sync: lane \d+ is not in its own mask"),
    (5, "__shfl_sync reads lane 16, which is not in the mask"),
    (6, r"waits at __syncthreads in rules.cu:\d+, but thread \(32, 0, 0\) waits at __syncthreads in rules.cu:\d+"),
    (7, r"thread \(0, 0, 0\) waits at __syncthreads .* but thread \(3, 0, 0\) has returned"),
    (8, r"thread \(63, 0, 0\): index 64 of a shared array of 64"),
    (9, r"index \d+ of a shared array of 4"),
    (10, r"bytes of shared memory, more than 49152"),
    (11, r"no end after 1000 barriers"),
    (12, r"a device refuses a grid of \(0, 1, 1\) blocks"),
    (13, r"a device refuses a grid of \(1, 65536, 1\) blocks"),
    (14, r"a device refuses a block of \(1025, 1, 1\) threads"),
    (15, "a device refuses 49153 bytes of shared memory"),
    (16, "break_rule uses the default stream, not the caller's"),
)


@pytest.mark.parametrize(("rule", "error"), RULES)
def test_kernels_that_break_a_rule_of_cuda_are_refused(kernels: EmulatedKernels, rule: int, error: str) -> None:
    message = kernels.break_rule(rule)
    assert (message == "") == (error == "") and re.search(error, message), message
    assert kernels.break_rule(0) == ""  # the emulation still works

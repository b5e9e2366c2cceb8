"""What a user can choose from: the options that are one of several words."""

from enum import Enum


class OptimizerType(Enum):
    adam = "adam"
    none = "none"


class LRSchedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Mode(Enum):
    local = "local"
    inline = "inline"
    ray = "ray"
    slurm = "slurm"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Backend(Enum):
    native = "native"
    vllm = "vllm"
    megatron = "megatron"


class RecoverMode(Enum):
    """What a launch does with checkpoints: nothing, go on from the last (resume), restart after a failure, or both."""

    disabled = "disabled"
    resume = "resume"
    fault = "fault"
    auto = "auto"


class OnBadRow(Enum):
    error = "error"
    skip = "skip"


class ValueNormType(Enum):
    exp = "exp"
    ma = "ma"


class Advantage(Enum):
    """Where they come from: GAE, other answers (group, rloo), a greedy one (baseline), the graph, steps (process)."""

    gae = "gae"
    group = "group"
    rloo = "rloo"
    greedy_baseline = "greedy_baseline"
    precomputed = "precomputed"
    process = "process"


class GroupStd(Enum):
    population = "population"
    sample = "sample"
    none = "none"


class PolicyLoss(Enum):
    clip = "clip"
    sequence_clip = "sequence_clip"
    cispo = "cispo"
    reinforce = "reinforce"


class LossAggregation(Enum):
    token_mean = "token_mean"
    seq_mean = "seq_mean"
    seq_sum = "seq_sum"
    constant = "constant"


class KLPlace(Enum):
    reward = "reward"
    loss = "loss"
    none = "none"


class StepSplitter(Enum):
    """What a step of an answer is: a line (GSM8K), or a sentence of LaTeX (MATH)."""

    line = "line"
    latex = "latex"


class Delta(Enum):
    """Which differences of adjacent step rewards are taken.

    paper: r_k = q_k - q_{k+1}, the last step but one keeps its own, the last gets none; what is to come is q_k.
    potential: r_k = q_{k+1} - q_k, the last gets none; what is to come is q_K - q_k (AReaL's ``reward_delta``).
    """

    none = "none"
    paper = "paper"
    potential = "potential"


class KLEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k4 = "k4"

"""Values of enumerated options."""

from enum import Enum


class OptimizerType(Enum):
    adam = "adam"
    none = "none"


class LRSchedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Recompute(Enum):
    full = "full"
    selective = "selective"


class WeightType(Enum):
    """The type of matrices in decoding."""

    auto = "auto"
    bfloat16 = "bfloat16"
    int8 = "int8"


class CacheType(Enum):
    """The type of cached keys and values."""

    auto = "auto"
    bfloat16 = "bfloat16"


class Quantization(Enum):
    """The type of a frozen base's matrices."""

    none = "none"
    int8 = "int8"
    int4 = "int4"

    @property
    def bits(self) -> int:
        """Bits per weight, 0 without quantization."""
        return 0 if self is Quantization.none else int(self.value.removeprefix("int"))


class Mode(Enum):
    local = "local"
    inline = "inline"
    ray = "ray"
    slurm = "slurm"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class CpuAffinity(Enum):
    none = "none"
    numa = "numa"


class Backend(Enum):
    native = "native"
    vllm = "vllm"
    megatron = "megatron"


class RecoverMode(Enum):
    """resume: start from the last checkpoint; fault: restart from it after a failure; auto: both."""

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


class ValueLossType(Enum):
    mse = "mse"
    huber = "huber"


class LossAggregation(Enum):
    token_mean = "token_mean"
    seq_mean = "seq_mean"
    seq_sum = "seq_sum"
    constant = "constant"


class KLPlace(Enum):
    reward = "reward"
    loss = "loss"
    none = "none"


class WandbMode(Enum):
    disabled = "disabled"
    online = "online"
    offline = "offline"


class StepSplitter(Enum):
    """Steps are lines (GSM8K) or LaTeX sentences (MATH)."""

    line = "line"
    latex = "latex"


class Delta(Enum):
    """Differences of adjacent step rewards q_1 ... q_K.

    paper: r_k = q_k - q_{k+1} for k < K-1, r_{K-1} = q_{K-1}, r_K = 0; the return is q_k.
    potential: r_k = q_{k+1} - q_k, r_K = 0; the return is q_K - q_k (AReaL's ``reward_delta``).
    """

    none = "none"
    paper = "paper"
    potential = "potential"


class KLEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    k4 = "k4"

"""megatron-core's gradient buffer and distributed optimizer for our model, layouts and checkpoints. GPUs only.

A shard's flat tensors are megatron-core's own buffers, so nothing is copied: the model computes with views of its
parameters, and gradients accumulate in the buffer that it reduces. Its gradient reduction, its AdamW (from Transformer
Engine or Apex, if installed) and its parameter all-gather make a step.

``get_megatron_optimizer`` is not used: it exchanges pickles with all workers of the run, also those of other roles.
"""

import math
from typing import Any

import torch
from torch import nn

from realhf.api.config import OptimizerConfig
from realhf.comm.process_groups import Group, ParallelContext, PendingCollective, ProcessGroup
from realhf.models.engine.optimizer import ShardedAdamW
from realhf.models.flat_params import FlatParams
from realhf.ops.adamw import AdamWStep

PARAM_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
"""megatron-core aligns the start of a parameter and the end of a bucket to multiples of these element counts."""


def padding(dp: int) -> int:
    """Return the number that must divide the length of a megatron-core buffer with ``dp`` replicas."""
    return math.lcm(dp, BUCKET_ALIGNMENT)


class MegatronAdamW(ShardedAdamW):
    """``ShardedAdamW`` by megatron-core, with the same ranges, state and steps.

    Raises ValueError if the end of a shard's matrices is not aligned.
    """

    can_overlap = False

    def __init__(
        self, params: FlatParams, config: OptimizerConfig, context: ParallelContext, sequence: bool,
        overlap: bool = False, zero_stage: int = 1,
    ) -> None:  # fmt: skip
        if params.n_matrix % PARAM_ALIGNMENT:
            raise ValueError(f"megatron-core aligns parameters to multiples of {PARAM_ALIGNMENT} elements, and the "
                             f"matrices of this shard end at {params.n_matrix}; use backend=native")  # fmt: skip
        replicas, single = context.group("dp"), Group((context.rank,), context.rank)
        handle = replicas.torch_group()
        module = _Flat(params)
        self._ddp = _wrapped(module, handle, handle if replicas.size == 1 else single.torch_group())
        buffer = self._ddp.buffers[0]
        params.use_buffers(buffer.param_data, buffer.grad_data)
        super().__init__(params, config, context, sequence)
        self._inner = _adam(module, config)
        self._outer = _distributed(self._inner, self._ddp, handle, params.data.dtype)
        self._share_state()

    def _share_state(self) -> None:
        """Make moments and master copy of the inner optimizer views of ours, which checkpoints save."""
        shards = [shard for group in self._inner.param_groups for shard in group["params"]]
        sizes = [shard.numel() for shard in shards]
        rest = len(self.master) - sum(sizes)  # the padding after the last replica's range
        parts = [flat.split([*sizes, rest]) for flat in (self.master, self.first, self.second)]
        for shard, master, first, second in zip(shards, *parts, strict=False):
            if shard.data_ptr() != master.data_ptr():
                shard.data = master
            self._inner.state[shard] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}

    def _reduce(self) -> None:
        with self.group.activity.enter(PendingCollective("reduce_scatter", self.whole_grad.nbytes, self.group.ranks)):
            self._ddp.finish_grad_sync()

    def _update(self, step: AdamWStep) -> None:
        if step.scale != 1.0:
            self.grad.mul_(step.scale)
        for group in self._inner.param_groups:
            group["lr"], group["step"] = step.lr, step.steps - 1
            for shard in group["params"]:
                self._inner.state[shard]["step"].fill_(step.steps - 1)
        with self.group.activity.enter(PendingCollective("all_gather", self.params.data.nbytes, self.group.ranks)):
            self._outer.prepare_grads()
            self._outer.step_with_ready_grads()


class _Flat(nn.Module):
    """A shard as two parameters, one of which decays. megatron-core's buffer has them in reverse order."""

    def __init__(self, params: FlatParams) -> None:
        super().__init__()
        data, end = params.data.detach(), params.end
        self.vectors = nn.Parameter(data[params.n_matrix : end].clone())
        self.matrices = nn.Parameter(data[: params.n_matrix].clone())


def _wrapped(module: nn.Module, replicas: ProcessGroup, single: ProcessGroup) -> Any:
    """Return the module in megatron-core's data parallelism: gradients are summed in float32, in one bucket."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    groups = ProcessGroupCollection()
    for name in ("dp", "dp_cp", "expt_dp"):
        setattr(groups, name, replicas)
    for name in ("tp", "pp", "ep"):  # SharedGradients has reduced over these axes
        setattr(groups, name, single)
    # our losses are already normalised over all replicas
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=True)
    rules = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(config, rules, module, disable_bucketing=True, pg_collection=groups)


def _adam(module: _Flat, config: OptimizerConfig) -> Any:
    from megatron.core.optimizer import Adam

    decays = ((module.matrices, config.weight_decay), (module.vectors, 0.0))
    groups = [{"params": [param], "weight_decay": decay} for param, decay in decays]
    return Adam(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


def _distributed(inner: Any, ddp: Any, handle: ProcessGroup, dtype: torch.dtype) -> Any:
    from megatron.core.optimizer import OptimizerConfig as Rules
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    rules = Rules(optimizer="adam", bf16=dtype == torch.bfloat16, use_distributed_optimizer=True, clip_grad=0.0)
    return DistributedOptimizer(
        inner, rules, None, lambda *_: None, model_chunks=[ddp], per_model_buffers={0: ddp.buffers},
        data_parallel_group=handle, data_parallel_group_gloo=None, data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )  # fmt: skip

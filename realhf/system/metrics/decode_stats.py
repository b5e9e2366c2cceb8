"""What a generating call did, told from the lengths of what it drew."""

from collections.abc import Sequence
from typing import cast

from realhf.api.batch_meta import BatchMeta
from realhf.api.config.choices import Backend
from realhf.api.experiment import Experiment
from realhf.api.graph import MFC
from realhf.api.messages import Done, PrepareCall
from realhf.api.model_config import ModelConfig
from realhf.arch.flops import forward_flops, generate_bytes, generate_flops
from realhf.plan.run_spec import RunSpec


def generated(mfc: MFC, config: ModelConfig, call: PrepareCall, replies: Sequence[Done]) -> tuple[int, int]:
    """Return how many tokens a generating call drew, and its operations."""
    columns = [reply.outputs.columns for reply in replies if reply.outputs]
    if (key := mfc.graph_key("rollouts")) in mfc.outputs:  # continuations of rows, drawn from several places in each
        read = call.inputs.columns[mfc.graph_key("tokens")].lengths
        drawn = [n for some in columns for n in some[key].lengths]
        return sum(drawn), forward_flops(config, read, head_tokens=0) + forward_flops(config, drawn)
    prompts = call.inputs.columns[mfc.graph_key("prompts")].lengths
    rows = [n for some in columns for n in some[mfc.graph_key("tokens")].lengths]
    n_drawn = sum(rows) - len(rows) // max(1, len(prompts)) * sum(prompts)
    return n_drawn, generate_flops(config, prompts, rows)


def decode_bytes_read(run: RunSpec, mfc: MFC, config: ModelConfig, call: PrepareCall, outputs: BatchMeta) -> int:
    """Return the bytes that a replica read at the least to draw ``outputs``; 0 for continuations, which are many."""
    sampling = cast(Experiment, run.config).sampling_options()
    if mfc.graph_key("rollouts") in mfc.outputs or sampling is None or mfc.role is None:
        return 0
    length_of = {row.prompt: n for row, n in zip(
        call.inputs.ids, call.inputs.columns[mfc.graph_key("prompts")].lengths, strict=True)}  # fmt: skip
    placement = run.plan[mfc.name]
    is_served = placement.backend is Backend.vllm
    slots = (
        run.config.vllm.max_num_seqs if is_served else placement.micro_batching.limit_num_seqs(sampling.max_num_seqs)
    )
    lengths = outputs.columns[mfc.graph_key("tokens")].lengths
    prompts = [length_of[row.prompt] for row in outputs.ids]
    itemsize = 2 if run.roles[mfc.role].spec.bf16 else 4
    return generate_bytes(config, prompts, lengths, slots, itemsize)

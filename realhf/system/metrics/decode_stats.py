"""Tokens, operations and bytes of a generation call, from the lengths of its responses."""

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


def generated_tokens(mfc: MFC, config: ModelConfig, call: PrepareCall, replies: Sequence[Done]) -> tuple[int, int]:
    """Return the number of generated tokens of a call, and its floating-point operations."""

    def output_lengths(key: str) -> list[int]:
        return [n for reply in replies if reply.outputs for n in reply.outputs.columns[key].lengths]

    if (key := mfc.graph_key("rollouts")) in mfc.outputs:  # continuations from several positions of each row
        inputs, continuations = call.inputs.columns[mfc.graph_key("tokens")].lengths, output_lengths(key)
        flops = forward_flops(config, inputs, head_tokens=0) + forward_flops(config, continuations)
        return sum(continuations), flops
    prompts = call.inputs.columns[mfc.graph_key("prompts")].lengths
    rows = output_lengths(mfc.graph_key("tokens"))
    n_tokens = sum(rows) - len(rows) // max(1, len(prompts)) * sum(prompts)
    return n_tokens, generate_flops(config, prompts, rows)


def decode_bytes_read(run: RunSpec, mfc: MFC, config: ModelConfig, call: PrepareCall, outputs: BatchMeta) -> int:
    """Return the minimum of bytes that a replica reads to generate ``outputs``; 0 for continuations."""
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

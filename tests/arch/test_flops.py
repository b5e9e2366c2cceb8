"""FLOP counts against counts by hand."""

from dataclasses import replace

from realhf.api.model_config import GatedDelta, ModelConfig
from realhf.arch.flops import forward_flops, generate_bytes, generate_flops, matrix_params, train_flops
from realhf.arch.param_specs import param_specs

TINY = ModelConfig(
    "llama", n_layers=2, hidden=4, n_heads=2, n_kv_heads=1, head_dim=2, intermediate=6, vocab=10, max_positions=16
)
UNGATED = replace(
    TINY, family="gpt2", n_kv_heads=2, mlp="ungated", norm="layer", qkv_bias=True, proj_bias=True, mlp_bias=True
)


def test_matrix_params_by_hand_and_from_param_specs() -> None:
    # wq 16, wk 8, wv 8, wo 16; gate, up, down 24 each
    assert matrix_params(TINY) == 2 * (48 + 72)
    for config in (TINY, UNGATED):
        blocks = [s for s in param_specs(config) if 1 <= s.layer <= config.n_layers and len(s.shape) == 2]
        assert matrix_params(config) == sum(spec.numel for spec in blocks)


def test_forward_flops_by_hand() -> None:
    matrices = 2 * 240 * 4  # four tokens
    attention = 4 * 2 * 2 * 2 * (1 + 2 + 3 + 1)  # layers, heads, head size, pairs of tokens
    head = 2 * 4 * 10
    assert forward_flops(TINY, [3, 1]) == matrices + attention + 4 * head == 2464
    assert forward_flops(TINY, iter([3, 1]), head_tokens=1) == matrices + attention + head
    assert forward_flops(replace(TINY, head="scalar"), [3, 1]) == matrices + attention + 4 * 2 * 4
    assert forward_flops(TINY, []) == 0


HYBRID = replace(
    TINY, n_layers=3, attention_gate=True, delta=GatedDelta(1, 2, 3, 5, 4), delta_layers=(0, 2), qk_norm="head"
)


def test_the_gated_delta_rule_by_hand() -> None:
    blocks = [spec for spec in param_specs(HYBRID) if 1 <= spec.layer <= 3 and len(spec.shape) == 2]
    assert matrix_params(HYBRID) == sum(spec.numel for spec in blocks)
    # of a token in one block: 3 products with 2 states of 3 x 5, and 4 taps of 3 + 3 + 10 channels
    rule = 2 * 3 * 2 * 15 + 2 * 4 * 16
    attention = 4 * 2 * 2 * (1 + 2 + 3 + 1)  # of one block
    head = 2 * 4 * 10
    assert forward_flops(HYBRID, [3, 1]) == 4 * (2 * matrix_params(HYBRID) + 2 * rule + head) + attention
    # two rows of three tokens after a prompt of one: two decoding steps each, which read states and 1 + 2 + 3 tokens
    weights, slot = matrix_params(HYBRID) + 4 * 10, 4 * 30 + 2 * 3 * 16
    expected = 2 * 2 * weights + 2 * 2 * (2 + 3) * 4 + 4 * 2 * slot
    assert generate_bytes(HYBRID, [1, 1], [4, 4], slots=2, itemsize=2) == expected


def test_training_is_three_forward_passes_and_recomputation_a_fourth() -> None:
    assert train_flops(TINY, [3, 1]) == 3 * 2464
    assert train_flops(TINY, [3, 1], recompute=True) == 4 * 2464


def test_generate_flops_by_hand() -> None:
    # a prompt of three tokens with responses of two and one; the last token of each is not computed
    matrices, pairs, head_tokens = 2 * 240 * (3 + 1), (1 + 2 + 3) + 4, 2 + 1
    assert generate_flops(TINY, [3], [5, 4]) == matrices + 4 * 2 * 2 * 2 * pairs + 2 * 4 * 10 * head_tokens == 2480
    assert generate_flops(TINY, iter([3, 1]), iter([4, 2])) == forward_flops(TINY, [3, 1], head_tokens=2)
    assert generate_flops(TINY, [], []) == 0

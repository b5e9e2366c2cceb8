"""FLOP counts against counts by hand."""

from dataclasses import replace

from realhf.api.model_config import ModelConfig
from realhf.arch.flops import forward_flops, generate_flops, matrix_params, train_flops
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


def test_training_is_three_forward_passes_and_recomputation_a_fourth() -> None:
    assert train_flops(TINY, [3, 1]) == 3 * 2464
    assert train_flops(TINY, [3, 1], recompute=True) == 4 * 2464


def test_generate_flops_by_hand() -> None:
    # a prompt of three tokens with responses of two and one; the last token of each is not computed
    matrices, pairs, head_tokens = 2 * 240 * (3 + 1), (1 + 2 + 3) + 4, 2 + 1
    assert generate_flops(TINY, [3], [5, 4]) == matrices + 4 * 2 * 2 * 2 * pairs + 2 * 4 * 10 * head_tokens == 2480
    assert generate_flops(TINY, iter([3, 1]), iter([4, 2])) == forward_flops(TINY, [3, 1], head_tokens=2)
    assert generate_flops(TINY, [], []) == 0

#!/bin/sh
# PPO on word problems in GSM8K's format from random weights: an end-to-end smoke test.
#   GSM8K=path/to/train.jsonl sh examples/gsm8k.sh [key=value ...]      (default: 40 problems in word_problems.jsonl)
set -eu
cd "$(dirname "$0")/.."
data=${GSM8K:-examples/word_problems.jsonl}
out=${OUT:-runs/gsm8k-start}
[ -f "$data" ] || { echo "no file $data: set GSM8K to GSM8K's train.jsonl (question, answer)" >&2; exit 1; }

${PYTHON:-python} examples/make_tokenizer.py "$data" "$out" --vocab 512
exec ${PYTHON:-python} -m realhf quickstart ppo-math \
    experiment_name=gsm8k \
    actor.init_from_scratch=True actor.config="$out" actor.tokenizer="$out" \
    critic.init_from_scratch=True critic.config="$out" \
    dataset.path="$data" dataset.max_prompt_len=512 dataset.train_bs_n_seqs=8 \
    dataset.prompt_template="'{prompt} Answer: '" \
    ppo.gen.max_new_tokens=64 ppo.gen.max_num_seqs=16 \
    exp_ctrl.total_train_steps=3 "$@"

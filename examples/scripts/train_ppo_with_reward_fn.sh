#!/usr/bin/env bash
# RL with a Python function as reward and without a critic; half of the GPUs train, the others generate.
#
#   train_ppo_with_reward_fn.sh [FLAGS]       on 8 GPUs, or on the GPUS that are given (an even number)
#   train_ppo_with_reward_fn.sh cpu [FLAGS]   a tiny model, made on the spot, in a minute or two
#
# FLAGS go to the command and win over those in here: --dry_run checks everything, prints the plan and leaves.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=${OUTPUT:-outputs/ppo_reward_fn}

if [[ ${1:-} == cpu ]]; then
   shift
   tiny=${TINY:-outputs/tiny}
   python3 "$here/make_tiny.py" "$tiny"
   workers=1
   size=(
      --device cpu
      --actor.model_name_or_path "$tiny/policy"
      --data.prompt_dataset "$tiny/prompts.jsonl"
      --eval.dataset "$tiny/held_out.jsonl"
      --eval.steps 2
      --data.max_samples 16
      --data.max_len 32
      --rollout.max_new_tokens 12
      --rollout.batch_size 8
      --rollout.n_samples_per_prompt 4
      --rollout.micro_batch_size 16
      --train.batch_size 16
      --train.micro_batch_size 8
      --ds.param_dtype fp32
      --actor.adam.lr 3e-4
   )
else
   workers=$((${GPUS:-8} / 2))
   size=(
      --device cuda
      --actor.model_name_or_path "${POLICY:-Qwen/Qwen2.5-1.5B-Instruct}"
      --data.prompt_dataset "${PROMPTS:-openai/gsm8k@main}"
      --eval.dataset "${PROMPTS:-openai/gsm8k@main}"
      --eval.split test
      --eval.steps 20
      --data.max_len 1024
      --rollout.max_new_tokens 768
      --rollout.batch_size 128
      --rollout.n_samples_per_prompt 8
      --train.batch_size 256
      --train.dynamic_batch_enable
      # Questions that all samples answer right, or none, teach nothing.
      --algo.dynamic_filtering_enable
      --ds.param_dtype bf16
      --actor.gradient_checkpointing_enable
      --actor.adam.lr 1e-6
      --ckpt.save_steps 20
      --ckpt.load_enable
   )
fi

exec python3 -m openrlhf.cli.train_ppo_ray "${size[@]}" \
   --reward.remote_url "$here/reward_func.py" \
   --data.input_key question \
   --data.label_key answer \
   --data.apply_chat_template \
   --train.colocate_actor_ref \
   --actor.num_gpus_per_node "$workers" \
   --ref.num_gpus_per_node "$workers" \
   --vllm.num_engines "$workers" \
   --algo.advantage.estimator reinforce_baseline \
   --algo.kl.init_coef 1e-3 \
   --algo.kl.use_loss \
   --algo.kl.estimator k2 \
   --ckpt.output_dir "$output" \
   --ckpt.path "${output}_states" \
   "$@"

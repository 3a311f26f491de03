#!/usr/bin/env bash
# PPO with critic, reference and reward model; all of them and the engines share the GPUs of one node.
#
#   train_ppo_ray_hybrid_engine.sh [FLAGS]       on 8 GPUs of 80 GB; the variables below change what is trained on what
#   train_ppo_ray_hybrid_engine.sh cpu [FLAGS]   tiny models, made on the spot, in a minute or two
#
# FLAGS go to the command and win over those in here: --dry_run checks everything, prints the plan and leaves.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=${OUTPUT:-outputs/ppo_hybrid}

if [[ ${1:-} == cpu ]]; then
   shift
   tiny=${TINY:-outputs/tiny}
   python3 "$here/make_tiny.py" "$tiny"
   workers=1
   size=(
      --device cpu
      --actor.model_name_or_path "$tiny/policy"
      --reward.model_name_or_path "$tiny/reward_model"
      --data.prompt_dataset "$tiny/prompts.jsonl"
      --data.input_key question
      --data.max_samples 32
      --data.max_len 32
      --rollout.max_new_tokens 12
      --rollout.batch_size 16
      --rollout.micro_batch_size 16
      --train.batch_size 8
      --train.micro_batch_size 8
      --ds.param_dtype fp32
      --actor.adam.lr 3e-4
      --critic.adam.lr 1e-3
   )
else
   workers=${GPUS:-8}
   size=(
      --device cuda
      --actor.model_name_or_path "${POLICY:-OpenRLHF/Llama-3-8b-sft-mixture}"
      --reward.model_name_or_path "${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}"
      --data.prompt_dataset "${PROMPTS:-OpenRLHF/prompt-collection-v0.1}"
      --data.input_key "${INPUT_KEY:-context_messages}"
      --data.max_samples 100000
      --data.max_len 2048
      --rollout.max_new_tokens 1024
      --rollout.batch_size 1024
      --train.batch_size 128
      --train.dynamic_batch_enable
      --ds.zero_stage 3
      --ds.param_dtype bf16
      --actor.gradient_checkpointing_enable
      --actor.adam.lr 5e-7
      --critic.adam.lr 9e-6
      # What engines leave of a GPU is what the four models have.
      --vllm.gpu_memory_utilization 0.3
      --ckpt.save_steps 20
      --ckpt.load_enable
   )
fi

exec python3 -m openrlhf.cli.train_ppo_ray "${size[@]}" \
   --train.colocate_all \
   --actor.num_gpus_per_node "$workers" \
   --ref.num_gpus_per_node "$workers" \
   --critic.num_gpus_per_node "$workers" \
   --reward.num_gpus_per_node "$workers" \
   --vllm.num_engines "$workers" \
   --algo.advantage.estimator gae \
   --algo.advantage.lambd 0.95 \
   --algo.kl.init_coef 0.01 \
   --reward.normalize_enable \
   --data.apply_chat_template \
   --critic.save_value_network \
   --ckpt.output_dir "$output" \
   --ckpt.path "${output}_states" \
   "$@"

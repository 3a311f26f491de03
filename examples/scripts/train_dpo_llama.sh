#!/usr/bin/env bash
# DPO on pairs of conversations, of which the first is the better one; the reference is the model that training starts
# from.
#
#   train_dpo_llama.sh [FLAGS]       on 8 GPUs, or on the GPUS that are given
#   train_dpo_llama.sh cpu [FLAGS]   a tiny model, made on the spot, in half a minute
#
# FLAGS go to the command and win over those in here: --dry_run checks everything, prints the plan and leaves.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=${OUTPUT:-outputs/dpo}

if [[ ${1:-} == cpu ]]; then
   shift
   tiny=${TINY:-outputs/tiny}
   python3 "$here/make_tiny.py" "$tiny"
   launch=(python3 -m openrlhf.cli.train_dpo)
   size=(
      --device cpu
      --model.model_name_or_path "$tiny/policy"
      --data.dataset "$tiny/pairs.jsonl"
      --data.prompt_key question
      --data.max_samples 480
      --data.max_len 32
      --eval.dataset "$tiny/held_out_pairs.jsonl"
      --eval.split train
      --eval.steps 10
      --train.batch_size 48
      --train.micro_batch_size 48
      --train.max_epochs 2
      --ds.param_dtype fp32
      --adam.lr 3e-4
   )
else
   launch=(python3 -m torch.distributed.run --nproc_per_node "${GPUS:-8}" -m openrlhf.cli.train_dpo)
   size=(
      --device cuda
      --model.model_name_or_path "${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}"
      --data.dataset "${PAIRS:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}"
      --data.max_len 8192
      --train.batch_size 256
      --train.micro_batch_size 1
      --ds.zero_stage 3
      --ds.param_dtype bf16
      --model.gradient_checkpointing_enable
      --model.beta 0.1
      # What it says is computed once, so that it takes no memory during training.
      --ref.precompute
      --adam.lr 5e-7
      --ckpt.save_steps 50
      --ckpt.load_enable
   )
fi

exec "${launch[@]}" "${size[@]}" \
   --data.chosen_key chosen \
   --data.rejected_key rejected \
   --data.apply_chat_template \
   --ckpt.output_dir "$output" \
   --ckpt.path "${output}_states" \
   "$@"

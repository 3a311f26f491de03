#!/usr/bin/env bash
# The whole way on a laptop, with public commands and tiny models, in some minutes: supervised fine-tuning, a reward
# model, its server, PPO of adapters with a critic against that server, the merged model, and a question to it.
#
#   pipeline_cpu.sh
#
# OUTPUT names the folder for everything that is made, PORT the server's port.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=${OUTPUT:-outputs/pipeline}
port=${PORT:-5000}
url=http://127.0.0.1:$port
tiny=$output/tiny
# What the reward model and PPO start from.
policy=$output/sft

common=(--device cpu --ds.param_dtype fp32 --data.apply_chat_template --data.max_len 32)

# At the start, so that nobody trains for it; and another server there would answer in place of the one below.
if ! python3 -c 'import socket, sys; socket.create_server(("127.0.0.1", int(sys.argv[1])))' "$port" 2> /dev/null; then
   echo "Port $port cannot be listened on, which another server may do; give a free one as PORT." >&2
   exit 1
fi

python3 "$here/scripts/make_tiny.py" "$tiny"

echo "== 1. supervised fine-tuning"
python3 -m openrlhf.cli.train_sft "${common[@]}" \
   --model.model_name_or_path "$tiny/policy" \
   --data.dataset "$tiny/prompts.jsonl" \
   --data.input_key question \
   --data.output_key answer \
   --data.max_samples 960 \
   --train.batch_size 48 \
   --train.micro_batch_size 48 \
   --train.max_epochs 1 \
   --adam.lr 2e-3 \
   --ckpt.output_dir "$policy" \
   --ckpt.path "$output/sft_states"

echo "== 2. a reward model, from the fine-tuned one"
python3 -m openrlhf.cli.train_rm "${common[@]}" \
   --model.model_name_or_path "$policy" \
   --data.dataset "$tiny/pairs.jsonl" \
   --data.prompt_key question \
   --data.chosen_key chosen \
   --data.rejected_key rejected \
   --data.max_samples 480 \
   --train.batch_size 48 \
   --train.micro_batch_size 48 \
   --train.max_epochs 1 \
   --adam.lr 1e-3 \
   --ckpt.output_dir "$output/rm" \
   --ckpt.path "$output/rm_states"

echo "== 3. its server"
python3 -m openrlhf.cli.serve_rm \
   --device cpu \
   --ds.param_dtype fp32 \
   --data.max_len 32 \
   --reward.model_name_or_path "$output/rm" \
   --reward.normalize_enable \
   --port "$port" &
server=$!
trap 'kill "$server" 2> /dev/null || true; wait "$server" || true' EXIT

healthy() {
   python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$url/health" 2> /dev/null
}
until healthy; do
   sleep 1
   if ! kill -0 "$server" 2> /dev/null; then
      echo "The server of the reward model ended before it was ready; what it printed above says why." >&2
      exit 1
   fi
done

echo "== 4. PPO with a critic, both with LoRA; rewards come from the server"
python3 -m openrlhf.cli.train_ppo_ray "${common[@]}" \
   --actor.model_name_or_path "$policy" \
   --critic.model_name_or_path "$output/rm" \
   --reward.remote_url "$url/get_reward" \
   --data.prompt_dataset "$tiny/prompts.jsonl" \
   --data.input_key question \
   --data.max_samples 32 \
   --rollout.max_new_tokens 8 \
   --rollout.batch_size 16 \
   --rollout.micro_batch_size 16 \
   --train.batch_size 16 \
   --train.micro_batch_size 16 \
   --train.colocate_all \
   --actor.num_gpus_per_node 1 \
   --critic.num_gpus_per_node 1 \
   --vllm.num_engines 1 \
   --algo.advantage.estimator gae \
   --algo.kl.init_coef 0.01 \
   --ds.lora.rank 8 \
   --actor.adam.lr 1e-3 \
   --critic.adam.lr 1e-3 \
   --ckpt.output_dir "$output/ppo" \
   --ckpt.path "$output/ppo_states"

echo "== 5. the adapters and the model below them become one"
python3 -m openrlhf.cli.lora_combiner \
   --model_path "$policy" \
   --lora_path "$output/ppo" \
   --output_path "$output/merged" \
   --ds.param_dtype fp32

echo "== 6. what the trained policy answers, and what the server says of it"
python3 - "$output/merged" "$url" <<'EOF'
import json
import sys
import urllib.request

from transformers import AutoModelForCausalLM, AutoTokenizer

folder, url = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
question = [{"role": "user", "content": "07+35="}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
answer = tokenizer.decode(model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :])
answers = [answer, "42<|end|>", "ab<|end|>"]
body = {"query": [prompt + text for text in answers], "prompts": [prompt] * 3, "labels": ["42"] * 3}
request = urllib.request.Request(f"{url}/get_reward", json.dumps(body).encode(), {"Content-Type": "application/json"})
with urllib.request.urlopen(request, timeout=60) as response:
    rewards = json.load(response)["rewards"]
for text, reward in zip(answers, rewards):
    print(f"07+35= {text:<12} reward {reward:.3f}")
EOF

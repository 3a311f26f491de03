#!/usr/bin/env bash
# A reward model behind HTTP, for --reward.remote_url http://HOST:PORT/get_reward of RL.
#
#   serve_remote_rm.sh [FLAGS]       on one GPU; the variables below change what is served, and where
#   serve_remote_rm.sh cpu [FLAGS]   a tiny model, made on the spot
#
# It serves until Ctrl-C or SIGTERM. FLAGS go to the command and win over those in here.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [[ ${1:-} == cpu ]]; then
   shift
   tiny=${TINY:-outputs/tiny}
   python3 "$here/make_tiny.py" "$tiny"
   size=(
      --device cpu
      --reward.model_name_or_path "$tiny/reward_model"
      --data.max_len 128
      --ds.param_dtype fp32
   )
else
   size=(
      --device cuda
      --reward.model_name_or_path "${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}"
      --reward.normalize_enable
      --data.max_len 8192
      --ds.param_dtype bf16
      --max_batch_tokens 65536
   )
fi

# HOST=0.0.0.0 opens the server to the network: then ask for a key as well, with --api_key_file.
exec python3 -m openrlhf.cli.serve_rm "${size[@]}" \
   --host "${HOST:-127.0.0.1}" \
   --port "${PORT:-5000}" \
   "$@"

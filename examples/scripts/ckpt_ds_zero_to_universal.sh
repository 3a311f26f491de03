#!/usr/bin/env bash
# Converts the newest states of a run for another number of ranks, before it is started there.
#
#   ckpt_ds_zero_to_universal.sh FOLDER    of --ckpt.path, or one global_step folder
#
# A run with --ckpt.load_enable --ds.use_universal_ckpt goes on from what is converted, and converts what is not.
set -euo pipefail

exec python3 -m openrlhf.cli.zero_to_universal "$@"

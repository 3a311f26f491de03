"""What an engine is started with."""

from __future__ import annotations

from typing import Any

import pytest

from openrlhf.rollout.engine_spec import EngineSpec, batched_tokens


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"max_model_len": 1024}, 8192),
        ({"max_model_len": 32_768}, 8192),
        # A context of 64 has places for 64 tokens of each sequence.
        ({"max_model_len": 64, "max_num_seqs": 4}, 256),
        ({"max_model_len": 96, "max_num_seqs": 8, "extra": {"max_num_seqs": 1024}}, 8192),
        ({"max_model_len": 64, "extra": {"max_num_seqs": 1}}, 64),
        ({"max_model_len": 32_768, "extra": {"enable_chunked_prefill": False}}, 32_768),
        ({"max_model_len": 1024, "kv_cache_bytes": 1}, 8192),
        ({"max_model_len": 32_768, "kv_cache_bytes": 1}, 32_768),
    ],
)
def test_a_forward_takes_many_prompts_and_a_whole_one_where_it_cannot_be_cut(
    more: dict[str, Any], expected: int
) -> None:
    spec = EngineSpec(**({"model": "m", "dtype": "bfloat16", "seed": 0, "max_num_seqs": 512} | more))
    assert batched_tokens(spec) == expected

"""--vllm.extra against the engine that is installed: names and values are refused before anything starts."""

from __future__ import annotations

import pytest

from openrlhf.config import ConfigError
from openrlhf.config.checks_system import check_system
from openrlhf.config.engine_arguments import check_engine_arguments, engine_arguments
from tests.unit.config_args import built


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 1},
        {"max_num_batched_tokens": 64, "enable_chunked_prefill": None, "disable_log_stats": True},
        # Types that are no plain ones are left to vLLM.
        {"compilation_config": {"level": 0}, "quantization": None},
    ],
)
def test_arguments_of_the_right_types_are_let_through(extra):
    check_engine_arguments(extra)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"kv_cache_memory_bytes": None}, "'kv_cache_memory_bytes' is None; give a whole number above 0"),
        ({"kv_cache_memory_bytes": "4GB"}, "'kv_cache_memory_bytes' is '4GB'; it takes a whole number or null"),
        ({"kv_cache_memory_bytes": 0}, "'kv_cache_memory_bytes' is 0; give a whole number above 0"),
        ({"max_num_seqs": "8"}, "'max_num_seqs' is '8'; it takes a whole number or null"),
        ({"max_num_seqs": True}, "'max_num_seqs' is True; it takes a whole number or null"),
        ({"max_num_seqs": 2.5}, "'max_num_seqs' is 2.5; it takes a whole number or null"),
        ({"max_num_seqs": [8]}, r"'max_num_seqs' is \[8\]; it takes a whole number or null"),
        ({"max_num_seqs": -1}, "'max_num_seqs' is -1; give a whole number above 0"),
        ({"disable_log_stats": "yes"}, "'disable_log_stats' is 'yes'; it takes true or false"),
        ({"max_seqs_num": 8}, "vLLM has no engine argument 'max_seqs_num'; did you mean 'max_num_seqs'"),
        ({"max-num-seqs": 8}, "no engine argument 'max-num-seqs'; did you mean 'max_num_seqs'"),
        ({"wobble": 8}, r"vLLM has no engine argument 'wobble'\.$"),
    ],
)
def test_what_vllm_would_not_take_is_named_in_one_sentence(extra, said):
    with pytest.raises(ConfigError, match=f"^--vllm.extra: .*{said}"):
        check_engine_arguments(extra)


def test_the_checks_of_a_run_look_at_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {"--actor.model_name_or_path": "a/b", "--data.prompt_dataset": "rows.jsonl", "--device": "cpu"}
    with pytest.raises(ConfigError, match="no engine argument 'wobble'"):
        check_system(built("train_ppo_ray", flags, "--vllm.extra", '{"wobble": 1}'))


def test_the_names_are_those_of_the_engine_itself():
    arguments = engine_arguments()
    # Those that the product gives it.
    assert {"model", "max_num_seqs", "kv_cache_memory_bytes", "weight_transfer_config"} <= arguments.keys()
    assert arguments["max_num_seqs"] == "int | None"

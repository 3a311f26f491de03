"""Plans of RL runs with critic, reward models, agents, evaluation and filtering, from real small models and data."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from openrlhf.config import ConfigError, PPOConfig, resolve
from openrlhf.config.plan import ModelFacts, Plan
from openrlhf.data.errors import DataError
from openrlhf.rollout.engine_spec import cpu_cache_bytes
from openrlhf.trainer.dry_run_parts import model_facts
from openrlhf.trainer.dry_run_rl import batch_cells, rl_memory, rl_plan
from openrlhf.trainer.schedule import step_prompts, step_updates
from tests.tiny_models import make_tiny_model, make_tokenizer
from tests.unit.config_args import built
from tests.unit.test_models_value_head import with_head

ROWS = 22
SMALL = ModelFacts(parameters=1000, hidden=10, layers=4, vocab=100, context=2048)
HEADED = ModelFacts(parameters=600, hidden=10, layers=4, vocab=1, context=2048)
BASE = {
    "--actor.model_name_or_path": "actor",
    "--data.prompt_dataset": "rows.jsonl",
    "--data.label_key": "output",
    "--data.max_len": "96",
    "--rollout.batch_size": "8",
    "--rollout.n_samples_per_prompt": "3",
    "--train.batch_size": "10",
    "--train.num_episodes": "2",
    "--actor.num_gpus_per_node": "2",
    "--ref.num_gpus_per_node": "1",
    "--critic.num_gpus_per_node": "1",
    "--reward.num_gpus_per_node": "1",
    "--device": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plans")
    make_tiny_model(root / "actor")
    with_head(root / "judge", mean=0.25, std=0.5)
    with_head(root / "other")
    make_tokenizer(chat_template=None).save_pretrained(root / "other")
    rows = [{"input": f"what is {n} + 1 ?", "output": str(n + 1)} for n in range(ROWS)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    return root


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return folder


def config_of(*flags: str) -> PPOConfig:
    config = resolve(built("train_ppo_ray", BASE, *flags))
    assert isinstance(config, PPOConfig)
    return config


def lines_of(*flags: str) -> list[str]:
    return [" ".join(line.split()) for line in rl_plan(config_of(*flags)).text().splitlines()]


def test_critic_and_reward_models_have_their_lines_their_places_and_their_memory(here: Path) -> None:
    lines = lines_of("--reward.model_name_or_path", "judge,other", "--reward.normalize_enable")
    assert any(re.match(r"critic \S+/judge: qwen2, .* parameters, its own scalar head", line) for line in lines)
    assert any(re.match(r"reward 0 \S+/judge: .* normalised by mean 0.25 and deviation 0.5", line) for line in lines)
    assert any(re.match(r"reward 1 \S+/other: ", line) for line in lines)
    assert "reward sum of 2 reward models" in lines and "episodes one response to each prompt" in lines
    assert "actor ref critic reward 0 reward 1 engine" in lines
    assert "critic 1 CPU places" in lines and "together 7 CPU places, of any number on this machine" in lines
    assert any(re.match(r"note: config.json of \S+/other stores no mean and std", line) for line in lines)


def test_a_critic_that_is_the_policy_gets_a_new_head_and_an_agent_rewards_for_itself(here: Path) -> None:
    lines = lines_of("--train.agent_func_path", "agent.py")
    assert any(re.match(r"critic \S+/actor: .* a new scalar head", line) for line in lines)
    assert "episodes the agent of agent.py" in lines and "reward the agent's own" in lines
    alone = lines_of("--algo.advantage.estimator", "rloo", "--reward.remote_url", "reward.py")
    assert "reward reward.py" in alone and not any(line.startswith(("critic", "models with")) for line in alone)


def test_a_plan_says_where_the_run_would_write_and_refuses_what_the_run_would(here: Path, tmp_path: Path) -> None:
    flags = ["--ckpt.path", str(tmp_path / "states"), "--ckpt.output_dir", str(tmp_path / "out")]
    saves = [*flags, "--ckpt.save_steps", "5"]
    assert f"model, metrics {tmp_path}/out" in lines_of(*flags)
    assert not any(line.startswith(("states ", "goes on")) for line in lines_of(*flags))
    assert f"states {tmp_path}/states, every 5 steps" in lines_of(*saves)
    assert "goes on from nothing: there is no state yet" in lines_of(*saves, "--ckpt.load_enable")
    for role in ("_actor", "_critic"):
        state = tmp_path / "states" / role / "global_step3"
        state.mkdir(parents=True)
        (state / "complete").touch()
    with pytest.raises(ConfigError, match=r"--ckpt.path \S+/states"):
        lines_of(*saves)


def test_evaluation_prompts_are_looked_at_and_counted(here: Path) -> None:
    flags = ["--eval.dataset", "held_out.jsonl", "--eval.steps", "3", "--eval.n_samples_per_prompt", "2"]
    lines = lines_of(*flags)
    assert "eval.dataset held_out.jsonl: 5 rows" in lines
    assert sum(line.startswith("first 5 prompts 8 tokens") for line in lines) == 1
    assert "evaluation 5 prompts x 2 samples; at the start, every 3 steps and at the end" in lines
    assert not any("held_out" in line for line in lines_of(*flags, "--eval.steps", "-1"))
    (here / "bad.jsonl").write_text('{"input": "1 + 1 ?", "output": "2"}\n{"input": "", "output": "2"}\n')
    with pytest.raises(DataError, match="bad.jsonl, row 2"):
        rl_plan(config_of(*flags, "--eval.dataset", "bad.jsonl"))


def cells_of(*flags: str) -> tuple[dict[str, str], list[str]]:
    plan = Plan("")
    return dict(batch_cells(plan, config_of(*flags), ROWS)), plan.warnings


@pytest.mark.parametrize(
    ("frozen", "policy"),
    # Steps of 8, 8 and 6 prompts, twice: 3, 3 and 2 updates of 24, 24 and 18 samples in batches of 10.
    [("-1", "16"), ("0", "16"), ("1", "13"), ("3", "8"), ("4", "5")],
)
def test_updates_leave_out_those_steps_in_which_the_critic_is_trained_alone(frozen: str, policy: str) -> None:
    cells, warnings = cells_of("--critic.freezing_steps", frozen)
    assert (cells["steps"], cells["updates in all"], cells["critic's updates"]) == ("6", policy, "16")
    assert warnings == []


def test_a_policy_that_would_be_frozen_to_the_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="--critic.freezing_steps 6 covers all 6 steps"):
        cells_of("--critic.freezing_steps", "6")


def test_without_a_critic_nothing_is_frozen() -> None:
    cells, _ = cells_of("--algo.advantage.estimator", "rloo", "--critic.freezing_steps", "3")
    assert cells["updates in all"] == "16" and "critic's updates" not in cells


def test_under_a_filter_steps_run_on_into_the_next_episode_and_are_at_most_so_many() -> None:
    cells, _ = cells_of("--algo.dynamic_filtering_enable", "--train.enable_ema")
    # 44 prompts in steps of 8: five of 24 samples, one of 12.
    assert (cells["steps"], cells["updates in all"]) == ("at most 6", "at most 17")
    assert "between 0 and 1" in cells["filter"] and "decay 0.992" in cells["moving average"]


@pytest.mark.parametrize("prompts", [1, 7, 8, 9, 22, 1000])
def test_updates_of_a_plan_are_those_of_the_schedule(prompts: int) -> None:
    config = config_of("--train.max_epochs", "2")
    cells = dict(batch_cells(Plan(""), config, prompts))
    assert sum(step_prompts(config, prompts)) == 2 * prompts
    assert int(cells["updates in all"]) == sum(step_updates(config, prompts))


@pytest.mark.parametrize(("prompts", "rollout", "updates"), [(1000, 1000, 378), (1000, 128, 378), (992, 992, 372)])
def test_the_schedule_counts_episodes_inner_epochs_and_partial_batches(
    prompts: int, rollout: int, updates: int
) -> None:
    """The rate must reach its end at the last update, so the total has to be the number of real updates.

    1000 prompts x 8 samples, 128 a batch, 3 episodes, 2 epochs: a plan that drops partial batches has 62 updates an
    episode, 372 in all. Here partial batches are trained: 63 an episode.
    """
    config = config_of(
        *("--rollout.batch_size", str(rollout), "--rollout.n_samples_per_prompt", "8", "--train.batch_size", "128"),
        *("--train.num_episodes", "3", "--train.max_epochs", "2"),
    )
    assert sum(step_updates(config, prompts)) == updates


def memory_of(*flags: str, device: str = "cpu", prompts: int = ROWS) -> dict[str, dict[str, float]]:
    facts = {"actor": SMALL, "critic": HEADED, "reward": HEADED}
    return rl_memory(config_of(*flags), facts, device, prompts)


def test_memory_counts_what_stands_on_the_worker(here: Path) -> None:
    usual = memory_of("--ds.zero_stage", "2")
    assert usual["critic"]["optimizer"] == 600 * 12 and usual["critic"]["logits"] < usual["actor"]["logits"]
    assert usual["reward"]["weights"] == 600 * 2 and "optimizer" not in usual["reward"]
    average = memory_of("--ds.zero_stage", "2", "--train.enable_ema")["actor"]["average"]
    assert average == 4 * 1000 / 2
    assert (
        memory_of("--ds.zero_stage", "0", "--ds.param_dtype", "fp32", "--train.enable_ema")["actor"]["average"] == 4000
    )
    # Both stand in host memory, which is the worker's on a CPU and not the card's.
    offloaded = memory_of("--ds.adam_offload", "--train.enable_ema", device="cuda")
    assert "optimizer" not in offloaded["actor"] | offloaded["critic"] and "average" not in offloaded["actor"]
    assert "optimizer" in memory_of("--ds.adam_offload")["actor"]


@pytest.mark.parametrize(
    ("flags", "prompts", "sequences"),
    [
        ([], ROWS, 24),
        (["--vllm.num_engines", "2"], ROWS, 12),
        ([], 3, 9),
        # An engine on a CPU works on 128 sequences at most.
        (["--rollout.batch_size", "100"], 200, 128),
    ],
)
def test_the_cache_of_an_engine_is_the_one_that_it_is_started_with(
    here: Path, flags: list[str], prompts: int, sequences: int
) -> None:
    # Long rows, so that the cache is above its smallest size.
    flags = [*flags, "--data.max_len", "8192", "--ds.param_dtype", "fp32"]
    expected = cpu_cache_bytes("actor", sequences * 8192, "fp32", False)
    assert expected > 64 * 2**20
    assert memory_of(*flags, prompts=prompts)["engine"]["KV cache"] == expected
    fixed = memory_of(*flags, "--vllm.extra", '{"kv_cache_memory_bytes": 12345678}', prompts=prompts)
    assert fixed["engine"]["KV cache"] == 12345678


def test_a_scalar_head_takes_the_place_of_the_one_that_gives_logits(here: Path) -> None:
    plain, _ = model_facts("actor", False)
    headed, kind = model_facts("judge", False, scalar=True)
    assert kind == "qwen2" and (plain.vocab, headed.vocab) == (512, 1)
    # The tiny model's embeddings are tied.
    assert headed.parameters == plain.parameters + 64


def test_a_plan_with_adapters_has_no_reference_model_and_says_what_is_trained_and_written(here: Path) -> None:
    lines = lines_of("--reward.remote_url", "reward.py", "--ds.lora.rank", "4", "--ckpt.output_dir", "out")
    trained = 2 * 4 * (64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 128))
    assert f"trained {trained / 1e3:.2f}k parameters of adapters of rank 4, over frozen weights" in lines
    assert any(re.match(r"critic .* a new scalar head, .* adapters of rank 4, over frozen weights", x) for x in lines)
    assert "reference the actor with its adapters off" in lines and "actor critic engine" in lines
    assert any(re.match(r"adapter \(merge it with openrlhf lora_combiner\), metrics \S+/out", line) for line in lines)
    plain = memory_of("--reward.model_name_or_path", "judge")
    assert plain.keys() - memory_of("--reward.model_name_or_path", "judge", "--ds.lora.rank", "4").keys() == {"ref"}


def test_groups_that_share_places_are_counted_once(here: Path) -> None:
    def placed(*flags: str) -> dict[str, str]:
        section: Any = next(rows for name, rows in rl_plan(config_of(*flags)).sections if name == "placement")
        return dict(section)

    shared = placed("--reward.model_name_or_path", "judge", "--train.colocate_critic_reward")
    assert shared["critic + reward"] == "1 CPU places" and shared["together"].startswith("5 CPU places")
    apart = placed("--reward.model_name_or_path", "judge")
    assert Counter(apart)["critic"] and apart["together"].startswith("6 CPU places")

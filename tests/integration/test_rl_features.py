"""Whole RL runs with a critic, reward models, evaluation and agents, on the real Ray, vLLM and DeepSpeed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.tracking.jsonl import read_jsonl
from tests.integration import rl_runs as runs
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Game(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turn = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        text = states["action_text"]
        share = sum(c.isalpha() for c in text) / max(1, len(text))
        # The same for all samples of every third prompt, which teaches nothing.
        reward = 0.5 if int(states["label"]) % 3 == 0 else share
        return {
            "rewards": reward, "scores": reward, "environment_feedback": "\\nagain: ", "done": self.turn == 2,
            "extra_logs": {"turn": float(self.turn)},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Game)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    actor = make_tiny_model(root / "actor", "qwen2", hidden=128)
    for name, seed in (("judge", 3), ("other", 4)):
        torch.manual_seed(seed)
        judge = AutoModelForSequenceClassification.from_pretrained(actor, num_labels=1)
        judge.config.mean, judge.config.std = 0.25, 0.5
        judge.save_pretrained(root / name)
        for file in actor.glob("*token*"):
            shutil.copy(file, root / name)
        shutil.copy(actor / "chat_template.jinja", root / name)
    return {"actor": actor, "judge": root / "judge", "other": root / "other"}


def _command(folder: Path, models: dict[str, Path], *flags: str) -> list[str]:
    arguments = runs.command(folder, models["actor"], runs.write_prompts(folder / "prompts.jsonl"), Path("-"), *flags)
    place = arguments.index("--reward.remote_url")
    return arguments[:place] + arguments[place + 2 :]


def test_ppo_with_critic_and_reward_models_evaluates_averages_and_resumes_bit_for_bit(
    models: dict[str, Path], tmp_path: Path
) -> None:
    flags = [
        *("--reward.model_name_or_path", f"{models['judge']},{models['other']}", "--reward.combine", "mean"),
        *("--reward.normalize_enable", "--reward.num_gpus_per_node", "1", "--critic.num_gpus_per_node", "2"),
        *("--actor.num_gpus_per_node", "2", "--train.colocate_critic_reward", "--reward.num_gpus_per_node", "2"),
        *("--algo.advantage.estimator", "gae", "--algo.advantage.lambd", "0.95", "--critic.adam.lr", "1e-3"),
        *("--critic.freezing_steps", "1", "--critic.save_value_network", "--train.enable_ema"),
        *("--algo.kl.target", "0.05", "--algo.kl.horizon", "100", "--actor.entropy_coef", "0.01"),
        *("--reward.stop_properly_penalty_coef", "0.5"),
        *("--reward.overlong_buffer_len", "8", "--eval.dataset", str(tmp_path / "prompts.jsonl")),
        *("--eval.steps", "2", "--eval.n_samples_per_prompt", "2", "--ckpt.best_metric_key", "eval_default_reward"),
        *("--ckpt.save_steps", "1", "--ckpt.max_num", "9", "--ckpt.load_enable"),
    ]
    arguments = _command(tmp_path, models, *flags)
    whole = runs.finish(tmp_path, arguments)
    assert whole.process.returncode == 0, whole.text()[-4000:]
    lines = runs.metrics(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3]
    before, first, second, third, last = lines
    assert "actor/lr" not in first and first["critic/updates"] == 2 and second["actor/updates"] == 2
    assert second["kl/reference"] == pytest.approx(0, abs=1e-6) and third["kl/reference"] > 0
    # The KL of the first steps is 0, far below its target, so the coefficient falls by a fifth of 16 in 100.
    assert second["kl/coef"] == pytest.approx(0.01 * (1 - 0.2 * 16 / 100))
    assert {"eval/default_reward", "eval/default_length"} <= before.keys() & second.keys() & last.keys()
    assert "eval/default_pass1" not in before and second["policy/entropy"] > 1 and "reward/shaped_mean" in first

    out = tmp_path / "out"
    actor, average = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (out, f"{out}_ema"))
    start = AutoModelForCausalLM.from_pretrained(models["actor"]).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert 0 < (average[name] - start[name]).norm() < 0.2 * (actor[name] - start[name]).norm()
    critic = AutoModelForSequenceClassification.from_pretrained(f"{out}_critic")
    assert critic.config.num_labels == 1 and (tmp_path / "states" / "best_hf" / "best.json").is_file()

    for role in ("_actor", "_critic"):
        shutil.rmtree(tmp_path / "states" / role / "global_step3")
    # A crash between the two saves: the actor must not go on with a critic of another step.
    shutil.rmtree(tmp_path / "states" / "_critic" / "global_step2")
    resumed = runs.finish(tmp_path, arguments)
    assert resumed.process.returncode == 0, resumed.text()[-4000:]
    assert "resuming after step 1" in resumed.text()
    assert runs.repeated(runs.metrics(tmp_path)) == runs.repeated(lines)
    again = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(again[name], actor[name]) for name in actor)
    value = AutoModelForSequenceClassification.from_pretrained(f"{out}_critic").state_dict()
    assert all(torch.equal(weight, value[name]) for name, weight in critic.state_dict().items())


def test_a_multi_turn_agent_is_filtered_group_by_group_and_trained_turn_by_turn(
    models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    flags = [
        *("--train.agent_func_path", str(tmp_path / "agent.py"), "--algo.dynamic_filtering_enable"),
        *("--algo.dynamic_filtering_range", "-0.5", "1.5", "--algo.kl.init_coef", "0", "--vllm.num_engines", "2"),
        "--train.colocate_all",
        *("--rollout.save_samples", "99", "--actor.policy_loss_type", "gspo", "--eval.steps", "1"),
        *("--eval.dataset", str(tmp_path / "prompts.jsonl"), "--eval.n_samples_per_prompt", "3"),
        *("--rollout.max_new_tokens", "8", "--algo.advantage.is_correction_enable"),
    ]
    run = runs.finish(tmp_path, _command(tmp_path, models, *flags))
    assert run.process.returncode == 0, run.text()[-4000:]
    before, *steps = runs.metrics(tmp_path)
    # Of twelve prompts four teach nothing; the eight others make two full batches of four.
    assert [line["rollout/samples"] - 4 * line["filter/dropped_groups"] for line in steps] == [16, 16]
    assert sum(line["filter/dropped_groups"] for line in steps) <= 4
    assert 0 <= before["eval/default_pass1"] <= before["eval/default_pass3"] <= 1
    assert all(line["extra/turn"] == 2 and line["actor/updates"] == 2 for line in steps)
    assert all(line["correction/ratio_max"] == pytest.approx(1, abs=1e-4) for line in steps)
    assert all(line["correction/touched"] == 0 for line in steps)
    samples = read_jsonl(tmp_path / "out" / "rollouts.jsonl")
    assert all(json.dumps(sample).count("again: ") >= 1 for sample in samples)
    kept = json.loads((tmp_path / "states" / "best_hf" / "best.json").read_text())
    assert kept["metric"] == "eval/default_pass1"


def test_a_run_resumes_on_another_number_of_ranks_ends_with_the_same_weights_and_is_alone_in_its_folder(
    models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(runs.REWARD)
    flags = ["--ckpt.save_steps", "1", "--ckpt.max_num", "9", "--algo.kl.init_coef", "0", "--ds.zero_stage", "2"]
    flags += ["--reward.remote_url", str(tmp_path / "reward.py")]
    whole = runs.finish(tmp_path, _command(tmp_path, models, *flags))
    assert whole.process.returncode == 0, whole.text()[-4000:]
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for more, said in (
        ([], "add --ckpt.load_enable to go on from them, or name another folder"),
        (["--ckpt.load_enable", "--actor.adam.eps", "1e-3"], "written with --actor.adam.eps 1e-08, and this run has"),
    ):
        refused = runs.finish(tmp_path, _command(tmp_path, models, *flags, *more), seconds=120)
        assert refused.process.returncode == 2 and said in refused.text().splitlines()[-1]
        # Nothing heavy had been started.
        assert "on Ray" in whole.text() and "on Ray" not in refused.text()
    shutil.rmtree(tmp_path / "states" / "_actor" / "global_step3")
    flags += ["--actor.num_gpus_per_node", "2", "--ckpt.load_enable"]
    refused = runs.finish(tmp_path, _command(tmp_path, models, *flags))
    assert refused.process.returncode == 2 and "use_universal_ckpt" in refused.text().splitlines()[-1]
    resumed = runs.finish(tmp_path, _command(tmp_path, models, *flags, "--ds.use_universal_ckpt"))
    assert resumed.process.returncode == 0, resumed.text()[-4000:]
    assert "resuming after step 2" in resumed.text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert max(float((again[name] - weights[name]).abs().max()) for name in weights) < 1e-5

"""Reinforcement learning on Ray, vLLM and DeepSpeed: what `train_ppo_ray` runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray

from openrlhf.config import PPOConfig
from openrlhf.data.prompts import PromptDataset
from openrlhf.data.sources import load_dataset_mix
from openrlhf.models.loading import DTYPES, load_tokenizer
from openrlhf.rollout.pool import RolloutPool
from openrlhf.tracking.progress import Console
from openrlhf.trainer import rl_specs
from openrlhf.trainer.cluster import ray_session
from openrlhf.trainer.controller import Models, RLController
from openrlhf.trainer.evaluation import Evaluator
from openrlhf.trainer.launch import ModelLauncher, engine_share, engines_sleep, make_engines, start_engines
from openrlhf.trainer.placement import place_roles, role_sizes
from openrlhf.trainer.process import few_threads
from openrlhf.trainer.rl_outputs import RLOutputs
from openrlhf.trainer.rl_states import sole_run
from openrlhf.trainer.sampling import RolloutCollector
from openrlhf.trainer.schedule import check_frozen, filter_note, step_prompts
from openrlhf.trainer.scoring import RewardModel, RewardScorer
from openrlhf.trainer.turns import DeviceTurns
from openrlhf.trainer.updates import Updater
from openrlhf.trainer.weight_sync import WeightSync, connect_engines
from openrlhf.trainer.workers import WorkerGroup
from openrlhf.utils.errors import RunError
from openrlhf.utils.supervise import Supervisor

_CLOSE_TIMEOUT_S = 60.0
# What a run that has failed still waits for its engines: less than the driver lives where Ray's head is gone.
_GIVE_UP_S = 8.0


def run(config: PPOConfig) -> None:
    """Trains a policy.

    Raises:
        ConfigError, DataError: the input cannot be used.
        RunError: a worker died, failed or did not answer; the last checkpoint is whole.
    """
    few_threads()
    tokenizer = load_tokenizer(
        config.actor.model_name_or_path,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.trust_remote_code,
    )
    prompts = load_prompts(config, tokenizer)
    held_out = load_eval_prompts(config, tokenizer)
    check_frozen(config, len(prompts))
    console = Console(len(step_prompts(config, len(prompts))))
    filtering = filter_note(config, len(prompts))
    if filtering is not None:
        console.note(filtering)
    settings = rl_specs.output_settings(config, len(prompts))
    folders = sole_run(
        settings.ckpt,
        settings.fixed,
        console.warn,
        has_critic=config.has_critic,
        evaluates=held_out is not None,
    )
    with folders, ray_session(config) as device:
        on_gpu = device == "cuda"
        supervisor = Supervisor()
        roles = ", ".join(f"{n} {role}" for role, n in role_sizes(config).items())
        console.note(f"starting {roles} on Ray; engines take the longest, half a minute or more")
        places = place_roles(config, on_gpu=on_gpu)
        # The engines take the longest to start, so they start first and the models load beside them.
        pool = make_engines(config, places["engine"], supervisor, on_gpu, len(prompts))
        with _engines_end(pool):
            engines_ready = start_engines(config, pool, supervisor, on_gpu)
            if on_gpu and config.train.colocate_all:
                _start_alone(config, pool, engines_ready, supervisor)
            launcher = ModelLauncher(config, places, supervisor, on_gpu=on_gpu)
            models, ranks = launcher.start_models(len(prompts), tokenizer.pad_token_id)
            rewards = launcher.start_reward_models(tokenizer)
            engines = supervisor.get_all(engines_ready, what="its start", timeout=config.vllm.start_timeout)
            sync = _connected(config, models, ranks, pool, engines, console)
            turns = _turns(config, pool, sync, models, rewards, on_gpu)
            seeded = not on_gpu or config.train.full_determinism_enable
            controller = _controller(
                config, prompts, held_out, tokenizer, pool, turns, models, rewards, console, seeded
            )
            outputs = RLOutputs(settings, controller, models, tokenizer, console)
            _train(controller, outputs)
            try:
                _close(pool, _groups(models, rewards), supervisor)
            except RunError as error:
                # All results are written; how the workers go is no reason to call the run a failure.
                console.warn(str(error))


def _start_alone(config: PPOConfig, pool: RolloutPool, engines_ready: dict[str, Any], supervisor: Supervisor) -> None:
    """Waits for engines that share cards: each takes what is left of its share, and what loads meanwhile counts."""
    supervisor.get_all(engines_ready, what="its start", timeout=config.vllm.start_timeout)
    if engines_sleep(config, on_gpu=True):
        pool.call("sleep", timeout=config.train.step_timeout)


def _connected(
    config: PPOConfig,
    models: Models,
    ranks: list[dict[str, Any]],
    pool: RolloutPool,
    engines: dict[str, dict[str, Any]],
    console: Console,
) -> WeightSync:
    wanted = config.vllm.sync_backend
    dtype = DTYPES[config.ds.param_dtype]
    sync = connect_engines(wanted, models.actor, ranks, pool, engines, dtype=dtype, timeout=config.train.step_timeout)
    note = sync.note(wanted)
    if note is not None:
        console.note(note)
    return sync


@contextmanager
def _engines_end(pool: RolloutPool) -> Iterator[None]:
    """Where the body fails, those engines that still can end by themselves, so that their shared memory goes too."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            stops = [engine.stop.remote() for engine in pool.engines]
            ray.wait(stops, num_returns=len(stops), timeout=_GIVE_UP_S)
        raise


def _turns(
    config: PPOConfig, pool: RolloutPool, sync: WeightSync, models: Models, rewards: list[RewardModel], on_gpu: bool
) -> DeviceTurns:
    trained = [group for group in (models.actor, models.critic) if group is not None]
    return DeviceTurns(
        pool,
        sync.send,
        trained=trained,
        others=[group for group in _groups(models, rewards) if group not in trained],
        engines_sleep=engines_sleep(config, on_gpu=on_gpu),
        training_sleeps=on_gpu and config.ds.enable_sleep,
        engine_share=engine_share(config),
        timeout=config.train.step_timeout,
    )


def _controller(
    config: PPOConfig,
    prompts: PromptDataset,
    held_out: PromptDataset | None,
    tokenizer: Any,
    pool: RolloutPool,
    turns: DeviceTurns,
    models: Models,
    rewards: list[RewardModel],
    console: Console,
    seeded: bool,
) -> RLController:
    pad_token_id = tokenizer.pad_token_id
    scorer = RewardScorer(
        rewards,
        tokenizer,
        combine=config.reward.combine,
        budget=rl_specs.rollout_budget(config),
        max_len=config.data.max_len,
        timeout=config.train.step_timeout,
    )
    evaluator = None
    if held_out is not None:
        settings = rl_specs.eval_settings(config, seeded=seeded)
        evaluator = Evaluator(settings, held_out, pool, console, scorer.add_rewards)
    return RLController(
        rl_specs.loop_settings(config, pad_token_id),
        collector=RolloutCollector(rl_specs.sampling_settings(config, seeded=seeded), prompts, pool, console),
        turns=turns,
        models=models,
        scorer=scorer,
        updater=Updater(rl_specs.update_settings(config, pad_token_id), models.actor, models.critic, console),
        evaluator=evaluator,
        console=console,
    )


def _train(controller: RLController, outputs: RLOutputs) -> None:
    try:
        outputs.resume()
        controller.send_weights()
        outputs.before_training()
        while (metrics := controller.run_step()) is not None:
            outputs.after_step(metrics)
        outputs.finish()
    finally:
        outputs.close()


def load_prompts(config: PPOConfig, tokenizer: Any) -> PromptDataset:
    """Returns: the prompts that are trained on. Raises: ConfigError, DataError."""
    data = config.data
    rows = load_dataset_mix(
        data.prompt_dataset,
        data.prompt_probs,
        split=data.prompt_split,
        max_samples=data.max_samples,
        seed=config.train.seed,
        use_ms=config.use_ms,
    )
    return _prompts(config, rows, tokenizer)


def load_eval_prompts(config: PPOConfig, tokenizer: Any) -> PromptDataset | None:
    """Returns: the prompts of evaluation; None where there is none. Raises: ConfigError, DataError."""
    if config.eval.dataset is None or config.eval.steps <= 0:
        return None
    rows = load_dataset_mix(
        config.eval.dataset,
        None,
        split=config.eval.split,
        max_samples=config.data.max_samples,
        seed=config.train.seed,
        use_ms=config.use_ms,
    )
    return _prompts(config, rows, tokenizer)


def _prompts(config: PPOConfig, rows: Any, tokenizer: Any) -> PromptDataset:
    return PromptDataset(
        rows,
        tokenizer,
        input_key=config.data.input_key,
        label_key=config.data.label_key,
        input_template=config.data.input_template,
        apply_chat_template=config.data.apply_chat_template,
        workers=config.data.dataloader_num_workers,
    )


def _groups(models: Models, rewards: list[RewardModel]) -> list[WorkerGroup]:
    groups = [models.actor, models.ref, models.critic, *(model.group for model in rewards)]
    return [group for group in groups if group is not None]


def _close(pool: RolloutPool, groups: list[WorkerGroup], supervisor: Supervisor) -> None:
    for group in groups:
        group.call("close", timeout=_CLOSE_TIMEOUT_S)
    stops = {name: engine.stop.remote() for name, engine in zip(pool.names, pool.engines, strict=True)}
    supervisor.get_all(stops, what="its end", timeout=_CLOSE_TIMEOUT_S)

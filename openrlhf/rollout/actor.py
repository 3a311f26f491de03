"""One rollout engine as a Ray actor: the agent runs beside the engine, so that only finished samples travel."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.base import AgentError, AgentExecutorBase
from openrlhf.agents.loading import load_executor
from openrlhf.agents.reward import RewardSource
from openrlhf.agents.reward_http import make_reward_source
from openrlhf.agents.runner import run_sample
from openrlhf.agents.single_turn import SingleTurnAgentExecutor, fit_prompt
from openrlhf.data.prompts import PromptRecord
from openrlhf.data.templates import encode
from openrlhf.data.trajectory import Segment, Trajectory
from openrlhf.models.loading import load_tokenizer
from openrlhf.rollout.engine_files import EngineFiles
from openrlhf.rollout.engine_spec import EngineSpec
from openrlhf.rollout.transports import Rendezvous
from openrlhf.utils.own_gpus import keep_own_gpus
from openrlhf.utils.seeds import derive_seed

_WATCH_S = 1.0

BLOCK_SHARE = 0.5
"""Of a sample's time, what its code may keep the event loop of all without awaiting."""


@dataclass(frozen=True)
class Sampling:
    """How the samples of a rollout are drawn.

    Attributes:
        max_new_tokens: of one sample; None means all that the context leaves.
        seed: of the run, from which each sample's own follows; None lets the engine draw.
        logprobs: asks for the engine's log-prob of each sampled token.
    """

    temperature: float
    top_p: float
    max_new_tokens: int | None
    seed: int | None
    logprobs: bool


@dataclass(frozen=True)
class GroupRequest:
    """One prompt and how it is sampled.

    Attributes:
        group_id: of all its samples.
        num_samples: drawn from the prompt.
        probe: sampled from the engine alone, without agent and reward, to compare log-probs with the trainer's.
    """

    group_id: int
    prompt: PromptRecord
    num_samples: int
    sampling: Sampling
    probe: bool = False


@dataclass(frozen=True)
class AgentSpec:
    """What an engine's agent is made of.

    Attributes:
        tokenizer: folder or hub name.
        agent_file: Python file with a class ``AgentExecutor``; None samples one response to each prompt.
        reward_source: Python file with ``reward_func``, or URLs of reward servers; None where the agent or a reward
            model gives the rewards.
        rewarded_by_model: a reward model scores afterwards what has no reward yet.
        reward_timeout: seconds of one call of the source.
        reward_retries: further tries after a failed call.
        reward_workers: processes that run a reward function.
        reward_key: what reward servers ask for; None where they ask for none.
        sample_timeout: seconds that one sample may take from prompt to reward.
    """

    tokenizer: str
    use_fast_tokenizer: bool
    trust_remote_code: bool
    agent_file: str | None
    reward_source: str | None
    rewarded_by_model: bool
    reward_timeout: float
    reward_retries: int
    reward_workers: int
    sample_timeout: float
    # Not in what may be logged.
    reward_key: str | None = field(default=None, repr=False)


class RolloutActor:
    """Samples groups of trajectories, and takes new weights in between."""

    def __init__(self, engine: EngineSpec, agent: AgentSpec) -> None:
        self._engine_spec = engine
        self._agent_spec = agent
        # The engine's processes are all to be there.
        self._started = False

    async def start(self) -> dict[str, Any]:
        """Starts engine and agent. Returns: process id, node and, by worker of the engine, the GPU (None on a CPU)."""
        import ray

        keep_own_gpus()
        spec = self._agent_spec
        self._tokenizer = load_tokenizer(
            spec.tokenizer, use_fast=spec.use_fast_tokenizer, trust_remote_code=spec.trust_remote_code
        )
        self._reward = _reward_source(spec)
        if self._reward is not None:
            await self._reward.start()
        if spec.agent_file is not None:
            self._executor: AgentExecutorBase = load_executor(spec.agent_file)
            # The samples that one holds up need time for another try.
            self._executor.longest_block = min(self._executor.longest_block, BLOCK_SHARE * spec.sample_timeout)
        else:
            self._executor = SingleTurnAgentExecutor(self._reward)
        self._files = EngineFiles()
        try:
            with self._files.starting():
                from openrlhf.rollout.vllm_engine import VllmEngine

                self._engine = VllmEngine(self._engine_spec, self._files)
        except BaseException:
            self._files.close()
            raise
        gpus = await self._engine.start()
        self._started = True
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id(), "gpus": gpus}

    async def watch(self) -> None:
        """Never returns: the call fails when this worker dies, or one of its engine's processes.

        vLLM itself may wait for a killed process for ever, where it was killed in the middle of an answer.
        """
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._started:
                self._engine.check_processes()

    async def rollout(self, request: GroupRequest) -> list[Trajectory]:
        """Samples one group. Returns: its trajectories in order; failures of an agent or a reward are states of them.

        Raises:
            Whatever the engine raises: a broken engine ends the run, it is no bad sample.
        """
        sample = self._probe if request.probe else self._sample
        samples = [sample(request, sample_id) for sample_id in range(request.num_samples)]
        try:
            trajectories = await asyncio.gather(*samples)
        except AgentError:
            # Only a probe raises it, where its prompt does not fit; there is nothing to compare then.
            trajectories = []
        await self._engine.check_health()
        return list(trajectories)

    def _sampling_params(self, request: GroupRequest, sample_id: int) -> Any:
        from openrlhf.rollout.vllm_engine import make_sampling_params

        sampling = request.sampling
        seed = None
        if sampling.seed is not None:
            seed = derive_seed(sampling.seed, abs(request.group_id), sample_id, request.probe)
        return make_sampling_params(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            logprobs=sampling.logprobs,
        )

    async def _probe(self, request: GroupRequest, sample_id: int) -> Trajectory:
        prompt = encode(self._tokenizer, request.prompt.prompt, templated=request.prompt.templated)
        fit = fit_prompt(len(prompt), self._engine_spec.max_model_len, request.sampling.max_new_tokens)
        prompt = prompt[-fit.kept :]
        output = await self._engine.generate(prompt, self._sampling_params(request, sample_id))
        sampled = output.outputs[0]
        ids = list(sampled.token_ids)
        segment = Segment(
            tokens=prompt + ids,
            action_ranges=[(len(prompt), len(prompt) + len(ids))],
            logprobs=[0.0] * len(prompt)
            + [entry[token].logprob for entry, token in zip(sampled.logprobs, ids, strict=True)],
            weight_versions=[self._engine.weight_version],
            stop_reason=sampled.finish_reason,
        )
        return Trajectory(request.group_id, sample_id, request.prompt.prompt, request.prompt.label, [segment])

    async def _sample(self, request: GroupRequest, sample_id: int) -> Trajectory:
        return await run_sample(
            self._executor,
            request.prompt,
            group_id=request.group_id,
            sample_id=sample_id,
            sampling_params=self._sampling_params(request, sample_id),
            max_length=self._engine_spec.max_model_len,
            tokenizer=self._tokenizer,
            engine=self._engine,
            timeout=self._agent_spec.sample_timeout,
            rewarded_by_model=self._agent_spec.rewarded_by_model,
            vocab_size=self._engine.vocab_size,
        )

    async def join(self, place: Rendezvous, first_rank: int) -> None:
        """Has the engine's workers meet a sender that broadcasts."""
        await self._engine.join(place, first_rank)

    async def sleep(self) -> None:
        """Frees the engine's GPU memory."""
        await self._engine.sleep()

    async def wake(self, part: str) -> None:
        """Takes a part of it back: "weights" or "kv_cache"."""
        await self._engine.wake(part)

    async def begin_update(self) -> None:
        """Opens a weight update."""
        await self._engine.begin_update()

    async def load_bucket(self, payload: dict[str, Any], checksums: dict[str, int]) -> None:
        """Loads one bucket of it."""
        await self._engine.load_bucket(payload, checksums)

    async def end_update(self, manifest: dict[str, int], version: int) -> None:
        """Closes it, once it is proven whole."""
        await self._engine.end_update(manifest, version)

    async def stop(self) -> None:
        """Ends engine and reward processes."""
        self._started = False
        if self._reward is not None:
            await self._reward.close()
        self._engine.shutdown()
        self._files.close()


def _reward_source(spec: AgentSpec) -> RewardSource | None:
    if spec.reward_source is None:
        return None
    return make_reward_source(
        spec.reward_source,
        workers=spec.reward_workers,
        timeout=spec.reward_timeout,
        max_retries=spec.reward_retries,
        key=spec.reward_key,
    )

"""Runs one sample of an agent, and turns what it returns into a trajectory: a failed sample is data, not a crash."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import operator
import re
import traceback
from typing import TYPE_CHECKING, Any

from openrlhf.agents.base import AgentError, AgentExecutorBase, Engine, HeldUpError, TemplatedText
from openrlhf.agents.values import number, number_logs, optional_number, truth
from openrlhf.data.trajectory import Segment, Trajectory

if TYPE_CHECKING:
    from openrlhf.data.prompts import PromptRecord

logger = logging.getLogger(__name__)

# A cancelled sample gets this long to end by itself; after that it is left behind.
CANCEL_GRACE_S = 5.0
# Distinct failures that are logged in full by this process; all are counted in the metrics.
MAX_REPORTS = 50
_reported: set[str] = set()
# What rounding may lift the log-prob of a certain token above 0, in half precision.
_LOGPROB_NOISE = 1e-2
STOP_REASONS = ("stop", "length", "environment", "error")


def _execution(
    executor: AgentExecutorBase,
    prompt: PromptRecord,
    sampling_params: Any,
    max_length: int,
    tokenizer: Any,
    engine: Engine,
) -> Any:
    return executor.execute(
        prompt=TemplatedText(prompt.prompt) if prompt.templated else prompt.prompt,
        # Copied: samples of one prompt share the row's object.
        label=copy.deepcopy(prompt.label),
        sampling_params=copy.deepcopy(sampling_params),
        max_length=max_length,
        hf_tokenizer=tokenizer,
        llm_engine=engine,
        images=prompt.images,
    )


async def run_sample(
    executor: AgentExecutorBase,
    prompt: PromptRecord,
    *,
    group_id: int,
    sample_id: int,
    sampling_params: Any,
    max_length: int,
    tokenizer: Any,
    engine: Engine,
    timeout: float,
    rewarded_by_model: bool = False,
    vocab_size: int | None = None,
) -> Trajectory:
    """Executes one sample.

    Args:
        sampling_params: vLLM's; the executor gets a copy.
        max_length: tokens of prompt and response together.
        timeout: seconds that the whole sample may take.
        rewarded_by_model: a reward model scores later what comes back without a reward, which is no failure then.
        vocab_size: ids that the model has; None leaves them unchecked.

    Returns: a trajectory; where anything went wrong, in every try that ``executor.retries`` grants, its ``reward`` is
        None and ``failure`` says why.

    Raises: what ``engine.check_health`` raises, where a sample failed because the engine can serve no more.
    """
    trajectory = _unplayed(prompt, group_id, sample_id)
    deadline = asyncio.get_running_loop().time() + timeout
    tried, allowed = 0, executor.retries + 1
    while tried < allowed:
        left = deadline - asyncio.get_running_loop().time()
        if tried and left <= 0:
            break
        tried += 1
        version = engine.weight_version
        trajectory.failure = None
        try:
            call = _execution(executor, prompt, sampling_params, max_length, tokenizer, engine)
            returned = await _within(call, left, timeout)
            fill_trajectory(trajectory, returned, version, rewarded_by_model=rewarded_by_model, max_length=max_length)
            _check_ids(trajectory, vocab_size)
        except Exception as error:
            await engine.check_health()
            _clear(trajectory)
            if isinstance(error, HeldUpError):
                # No fault of this sample, so it costs none of its tries. The loops that may be lost are bounded.
                allowed += 1
            trajectory.failure = _describe(error) + (f" (in {tried} tries)" if tried > 1 else "")
            _report(trajectory.failure, error)
        else:
            if trajectory.failure is None:
                break
            _report(trajectory.failure)
    return trajectory


def _unplayed(prompt: PromptRecord, group_id: int, sample_id: int) -> Trajectory:
    return Trajectory(
        group_id=group_id,
        sample_id=sample_id,
        prompt=prompt.prompt,
        label=prompt.label,
        segments=[],
        images=prompt.images,
        datasource=prompt.datasource,
    )


def _clear(trajectory: Trajectory) -> None:
    trajectory.segments = []
    trajectory.reward, trajectory.score, trajectory.step_rewards = None, None, None


def fill_trajectory(
    trajectory: Trajectory,
    returned: Any,
    weight_version: int,
    *,
    rewarded_by_model: bool = False,
    max_length: int | None = None,
) -> None:
    """Checks the dict of ``AgentExecutorBase.execute`` and writes it into ``trajectory``.

    Args:
        weight_version: version of the weights when the sample began.
        rewarded_by_model: no reward and no ``failure`` leave both to a reward model.
        max_length: tokens that a record may have; None for no bound.

    Raises: AgentError, naming the key, what was found and what is expected.
    """
    if not isinstance(returned, dict):
        raise AgentError(f"execute() returned {type(returned).__name__}, not a dict")
    if returned.get("mm_train_inputs") is not None:
        raise AgentError("'mm_train_inputs' are given, and models that take images cannot be trained yet")
    cut = returned.get("truncated")
    truncated = False if cut is None else truth("truncated", cut)
    records = returned.get("segments")
    if records is None:
        records = [returned]
    if not isinstance(records, list | tuple) or not records:
        raise AgentError(f"'segments' is {records!r:.60}, not a list of token records")
    segments = [_segment(record, truncated, weight_version) for record in records]
    longest = max(len(segment.tokens) for segment in segments)
    if max_length is not None and longest > max_length:
        raise AgentError(f"'observation_tokens' has {longest} tokens; --data.max_len allows {max_length}")
    if not any(segment.num_actions for segment in segments):
        raise AgentError("'action_ranges' holds no token that the policy sampled")
    reward, score = (optional_number(key, returned.get(key)) for key in ("reward", "scores"))
    trajectory.step_rewards = _step_rewards(returned.get("step_rewards"), segments, reward)
    trajectory.extra_logs = number_logs(returned.get("extra_logs"))
    trajectory.prompt_tokens_cut = _integer("prompt_tokens_cut", returned.get("prompt_tokens_cut", 0))
    trajectory.segments = segments
    trajectory.truncated = truncated
    trajectory.reward = reward
    if reward is None:
        unrewarded = None if rewarded_by_model else "the agent returned no reward"
        failure = returned.get("failure") or unrewarded
        trajectory.failure = None if failure is None else str(failure)
    else:
        # Only a missing score falls back to the reward: 0.0 is a score.
        trajectory.score = reward if score is None else score


def _check_ids(trajectory: Trajectory, vocab_size: int | None) -> None:
    largest = max(max(segment.tokens) for segment in trajectory.segments)
    if vocab_size is not None and largest >= vocab_size:
        raise AgentError(f"'observation_tokens' holds {largest}; the model has {vocab_size} token ids")


def _segment(record: Any, truncated: bool, weight_version: int) -> Segment:
    if not isinstance(record, dict) or "observation_tokens" not in record or "action_ranges" not in record:
        raise AgentError("a token record needs 'observation_tokens' and 'action_ranges'")
    tokens = _integers("observation_tokens", _listed(record, "observation_tokens"))
    if not tokens:
        raise AgentError("'observation_tokens' is empty")
    if min(tokens) < 0:
        raise AgentError(f"'observation_tokens' holds {min(tokens)}, which is no token id")
    ranges = []
    for pair in _listed(record, "action_ranges"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise AgentError(f"'action_ranges' holds {pair!r:.60}, not (start, end)")
        ranges.append((_integer("action_ranges", pair[0]), _integer("action_ranges", pair[1])))
    versions = [weight_version] * len(ranges)
    if record.get("weight_versions") is not None:
        versions = _integers("weight_versions", _listed(record, "weight_versions"))
        if len(versions) != len(ranges):
            raise AgentError(f"'weight_versions' has {len(versions)} entries for {len(ranges)} action ranges")
    stop_reason = record.get("stop_reason") or ("length" if truncated else "stop")
    if stop_reason not in STOP_REASONS:
        raise AgentError(f"'stop_reason' is {stop_reason!r:.60}, not one of {', '.join(STOP_REASONS)}")
    try:
        segment = Segment(tokens=tokens, action_ranges=ranges, weight_versions=versions, stop_reason=stop_reason)
    except ValueError as error:
        raise AgentError(f"'action_ranges': {error}") from error
    if record.get("rollout_log_probs") is not None:
        segment.logprobs = _logprobs(_listed(record, "rollout_log_probs"), segment)
    return segment


def _step_rewards(values: Any, segments: list[Segment], reward: float | None) -> list[float] | None:
    """What each action range earned, in the order of the segments."""
    if values is None:
        return None
    numbers = [number("step_rewards", value) for value in _listed({"step_rewards": values}, "step_rewards")]
    ranges = sum(len(segment.action_ranges) for segment in segments)
    if len(numbers) != ranges:
        raise AgentError(f"'step_rewards' has {len(numbers)} entries for {ranges} action ranges")
    if reward is not None and not math.isclose(sum(numbers), reward, rel_tol=1e-4, abs_tol=1e-4):
        raise AgentError(f"'step_rewards' sum to {sum(numbers):g}, but 'reward' is {reward:g}")
    return numbers


def _logprobs(values: list[Any], segment: Segment) -> list[float]:
    """Log-probs at the sampled tokens, 0.0 elsewhere."""
    if len(values) != len(segment.tokens):
        raise AgentError(
            f"'rollout_log_probs' has {len(values)} entries, 'observation_tokens' {len(segment.tokens)}: "
            "one for each token, 0.0 outside the action ranges"
        )
    result = [0.0] * len(values)
    for start, end in segment.action_ranges:
        result[start:end] = [number("rollout_log_probs", value) for value in values[start:end]]
    largest = max(result, default=0.0)
    if largest > _LOGPROB_NOISE:
        raise AgentError(
            f"'rollout_log_probs' holds {largest:g}, and the logarithm of a probability is at most 0: give what the "
            "engine's output says of the sampled tokens"
        )
    return result


def _listed(record: dict[str, Any], key: str) -> list[Any]:
    value = record[key]
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        raise AgentError(f"'{key}' is {type(value).__name__}, not a list")
    return list(value)


def _integers(key: str, values: list[Any]) -> list[int]:
    try:
        # All samples of a rollout may end together, and then every microsecond a token is half a second.
        return list(map(operator.index, values))
    except TypeError:
        return [_integer(key, value) for value in values]


def _integer(key: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise AgentError(f"'{key}' holds {value!r:.60}, not an integer") from error


async def _within(call: Any, left: float, timeout: float) -> Any:
    """Awaits ``call``, which is cancelled after ``left`` seconds, and left behind if it does not end then."""
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=left)
        if done and task.cancelled():
            raise AgentError("execute() cancelled itself: it raised CancelledError")
        if done:
            return task.result()
    except asyncio.CancelledError:
        task.cancel()
        raise
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    # Read, so that nothing complains of an error that nobody looked at.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    raise AgentError(f"the sample took longer than {timeout:g} s")


def _describe(error: Exception) -> str:
    """One line; for errors of the executor's own code with the place they came from."""
    if isinstance(error, AgentError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    try:
        said = str(error)
    except Exception:  # whatever the message of a user's exception class does
        said = "its message cannot be read"
    return f"{type(error).__name__}: {said} (at {frame.filename}:{frame.lineno} in {frame.name})"


def _report(failure: str, error: Exception | None = None) -> None:
    """Logs a failure once: a fault in an agent meets every sample."""
    key = re.sub(r"\d+", "#", failure)
    if key in _reported or len(_reported) >= MAX_REPORTS:
        return
    _reported.add(key)
    unexpected = error is not None and not isinstance(error, AgentError)
    logger.warning("A sample has no reward: %s", failure, exc_info=error if unexpected else None)

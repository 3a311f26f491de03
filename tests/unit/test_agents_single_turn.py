"""The single-turn agent: what is sent to the engine, what is kept of its answer, and what the reward is asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from openrlhf.agents.base import AgentError, TemplatedText
from openrlhf.agents.reward import RewardFailure, RewardResult
from openrlhf.agents.single_turn import SingleTurnAgentExecutor, fit_prompt
from tests.scripted_engine import FixedReward, Params, ScriptedEngine, completion
from tests.tiny_models import END_ID, START, START_ID, make_tokenizer

ONE = RewardResult(reward=1.0, score=0.0, extra_logs={"right": 1.0})


def execute(engine: ScriptedEngine, reward: Any = None, **changes: Any) -> dict[str, Any]:
    arguments = {
        "prompt": "1 + 2 =",
        "label": {"answer": 3},
        "sampling_params": Params(max_tokens=8),
        "max_length": 64,
        "hf_tokenizer": make_tokenizer(),
        "llm_engine": engine,
        **changes,
    }
    executor = SingleTurnAgentExecutor(reward or FixedReward(ONE))
    return asyncio.run(executor.execute(**arguments))


def tokenizer_with_bos() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.bos_token = START
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, START_ID)]
    )
    return tokenizer


def test_ids_stay_as_sampled_even_where_encoding_their_text_gives_other_ids() -> None:
    tokenizer = make_tokenizer()
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "answer"]
    assert tokenizer("answer")["input_ids"] != spelled
    result = execute(ScriptedEngine(completion([*spelled, END_ID], [-0.1] * 6 + [-0.7])))
    prompt = tokenizer("1 + 2 =")["input_ids"]
    assert result["observation_tokens"] == [*prompt, *spelled, END_ID]
    assert result["action_ranges"] == [(len(prompt), len(prompt) + 7)]
    assert result["rollout_log_probs"] == [0.0] * len(prompt) + [-0.1] * 6 + [-0.7]


def test_text_that_ends_the_prompt_is_never_counted_as_action() -> None:
    tokenizer = make_tokenizer()
    prompt = "1 + 2 = the answer is"
    result = execute(ScriptedEngine(completion([5, 6, END_ID], [-1.0, -2.0, -3.0])), prompt=prompt)
    (start, end) = result["action_ranges"][0]
    assert start == len(tokenizer(prompt)["input_ids"])
    assert end - start == 3
    assert result["rollout_log_probs"][start:] == [-1.0, -2.0, -3.0]


def test_log_probs_are_none_where_the_engine_gave_none() -> None:
    assert execute(ScriptedEngine(completion([5, END_ID])))["rollout_log_probs"] is None


def test_a_templated_prompt_gets_no_second_bos_and_a_plain_one_gets_one() -> None:
    tokenizer = tokenizer_with_bos()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith(START)
    plain = ScriptedEngine(completion([5, END_ID]))
    execute(plain, prompt="hello", hf_tokenizer=tokenizer)
    templated = ScriptedEngine(completion([5, END_ID]))
    execute(templated, prompt=TemplatedText(text), hf_tokenizer=tokenizer)
    assert plain.requests[0][0].count(START_ID) == 1
    assert templated.requests[0][0] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert templated.requests[0][0][:2].count(START_ID) == 1


def test_the_reward_is_asked_with_the_decoded_tokens_special_ones_kept_and_the_prompts_own_text() -> None:
    tokenizer = make_tokenizer()
    reward = FixedReward(ONE)
    answer = tokenizer(" 3")["input_ids"]
    result = execute(ScriptedEngine(completion([*answer, END_ID])), reward)
    assert reward.asked == [("1 + 2 = 3<|im_end|>", "1 + 2 =", {"answer": 3})]
    assert result["reward"] == 1.0
    assert result["scores"] == 0.0
    assert result["extra_logs"] == {"right": 1.0}
    assert result["failure"] is None


def test_a_reward_that_could_not_be_computed_is_none_with_its_reason() -> None:
    result = execute(ScriptedEngine(completion([5, END_ID])), FixedReward(RewardFailure("the judge is away")))
    assert result["reward"] is None
    assert result["scores"] is None
    assert result["failure"] == "the judge is away"


@pytest.mark.parametrize(("finish_reason", "truncated"), [("stop", False), ("length", True)])
def test_a_response_is_truncated_only_where_the_engine_ran_out_of_tokens(finish_reason: str, truncated: bool) -> None:
    result = execute(ScriptedEngine(completion([5, 6], finish_reason=finish_reason)))
    assert result["truncated"] is truncated


@pytest.mark.parametrize("finish_reason", ["abort", "error", None])
def test_a_response_that_was_not_finished_is_refused(finish_reason: str | None) -> None:
    with pytest.raises(AgentError, match="ended the response"):
        execute(ScriptedEngine(completion([5, 6], finish_reason=finish_reason)))


def test_fewer_log_probs_than_tokens_are_refused() -> None:
    with pytest.raises(AgentError, match="1 log-probs for 2 tokens"):
        execute(ScriptedEngine(completion([5, 6], [-1.0])))


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "kept", "budget"),
    [(14, None, 9, 1), (14, 4, 6, 4), (8, 4, 6, 4), (6, 4, 6, 4), (3, 4, 3, 4), (3, None, 3, 7), (14, 9, 1, 9)],
)
def test_the_last_part_of_the_prompt_is_kept_so_that_the_asked_tokens_fit(
    prompt_tokens: int, max_tokens: int | None, kept: int, budget: int
) -> None:
    fit = fit_prompt(prompt_tokens, 10, max_tokens)
    assert (fit.kept, fit.budget) == (kept, budget)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "message"),
    [(14, 10, "no room for a prompt"), (1, 11, "no room"), (0, 4, "no tokens"), (3, 0, "at least 1")],
)
def test_no_room_is_an_error(prompt_tokens: int, max_tokens: int, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        fit_prompt(prompt_tokens, 10, max_tokens)


def test_a_prompt_longer_than_the_context_is_cut_from_the_left_and_counted() -> None:
    tokenizer = make_tokenizer()
    prompt = "red green blue " * 10 + "1 + 2 ="
    tokens = tokenizer(prompt)["input_ids"]
    engine, reward = ScriptedEngine(completion([5, END_ID])), FixedReward(ONE)
    result = execute(engine, reward, prompt=prompt, max_length=12, sampling_params=Params(max_tokens=4))
    assert engine.requests[0][0] == tokens[-8:]
    assert engine.requests[0][1].max_tokens == 4
    assert result["prompt_tokens_cut"] == len(tokens) - 8
    assert result["action_ranges"] == [(8, 10)]
    query, asked_prompt, _ = reward.asked[0]
    assert query == tokenizer.decode([*tokens[-8:], 5, END_ID])
    assert asked_prompt == prompt


def test_without_a_limit_the_budget_is_what_the_prompt_leaves() -> None:
    engine = ScriptedEngine(completion([5, END_ID]))
    params = Params(max_tokens=None)
    execute(engine, max_length=20, sampling_params=params)
    prompt, used = engine.requests[0]
    assert used.max_tokens == 20 - len(prompt)
    assert params.max_tokens is None, "the caller's parameters serve other samples as well"
    assert used.stop is not params.stop


def test_a_prompt_is_encoded_once_for_the_samples_of_its_group_and_anew_where_it_holds_its_special_tokens() -> None:
    tokenizer, asked = tokenizer_with_bos(), []

    class Counted:
        bos_token_id, eos_token_id, eos_token = tokenizer.bos_token_id, None, None
        decode = staticmethod(tokenizer.decode)

        def __call__(self, text: str, **options: Any) -> Any:
            asked.append(text)
            return tokenizer(text, **options)

    engine, executor, counted = ScriptedEngine(*[completion([5, END_ID])] * 4), SingleTurnAgentExecutor(None), Counted()
    for prompt in ("1 + 2 =", "1 + 2 =", TemplatedText("1 + 2 ="), "2 + 2 ="):
        params = Params(max_tokens=8)
        asyncio.run(executor.execute(prompt, None, params, 64, counted, engine))
    assert asked == ["1 + 2 =", "1 + 2 =", "2 + 2 ="]
    bare = tokenizer("1 + 2 =", add_special_tokens=False)["input_ids"]
    assert [request[0] for request in engine.requests[:3]] == [[START_ID, *bare], [START_ID, *bare], bare]


def test_images_are_refused() -> None:
    with pytest.raises(AgentError, match="images"):
        execute(ScriptedEngine(completion([5, END_ID])), images=["a.png"])

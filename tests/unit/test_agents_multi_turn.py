"""Multi-turn samples: what becomes action and what context, whose object serves whom, and how a sample ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from tests.agent_room import TalkingEngine, TurnParams, play, play_file, say, text_of
from tests.scripted_engine import completion
from tests.tiny_models import END_ID, make_tokenizer


class Environment(AgentInstanceBase):
    """Ends after as many turns as the label says; each class of it keeps what it saw."""

    seen: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": states["observation"]}

    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.seen.append(states)
        self.turns += 1
        done = self.turns >= states["label"]
        return {"rewards": 0.5, "environment_feedback": " go on", "done": done, **self.answer}


def environment(**answer: Any) -> type[Environment]:
    return type("Fixed", (Environment,), {"seen": [], "answer": answer})


def run(cls: type[AgentInstanceBase], *turns: Any, **options: Any) -> Any:
    return asyncio.run(play(MultiTurnAgentExecutor(cls), TalkingEngine(*turns), **options))


def test_the_agent_file_of_the_documentation_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    trajectory, _ = play_file("tests/data/spec_agent_func.py", *["hello"] * 4)
    text, actions = text_of(trajectory)
    assert trajectory.failure is None
    assert trajectory.reward in (0.0, 1.0)
    assert trajectory.extra_logs == {"dummy_scores": trajectory.reward}
    assert 2 <= len(actions) <= 4
    assert set(actions) == {"hello<|im_end|>"}
    assert text.count("[INCORRECT]") == len(actions) - 1
    assert text.endswith("\n\nHuman: [CORRECT]\n</s>")
    assert trajectory.step_rewards == [0.0] * (len(actions) - 1) + [trajectory.reward]
    assert "step_idx: 0" in capsys.readouterr().out


def test_sampled_ids_are_kept_and_only_feedback_is_tokenised() -> None:
    tokenizer = make_tokenizer()
    spelled = [tokenizer.convert_tokens_to_ids(letter) for letter in "answer"]
    assert tokenizer("answer")["input_ids"] != spelled
    turn = completion([*spelled, END_ID], [-0.25] * 7)
    engine = TalkingEngine(turn, turn)
    trajectory = asyncio.run(play(MultiTurnAgentExecutor(environment()), engine, label=2))
    prompt, feedback = tokenizer("1 + 2 =")["input_ids"], tokenizer(" go on", add_special_tokens=False)["input_ids"]
    (segment,) = trajectory.segments
    assert segment.tokens == [*prompt, *spelled, END_ID, *feedback, *spelled, END_ID, *feedback]
    first = len(prompt)
    second = first + 7 + len(feedback)
    assert segment.action_ranges == [(first, first + 7), (second, second + 7)]
    assert engine.requests[1][0] == segment.tokens[:second]
    expected = [-0.25 if mask else 0.0 for mask in segment.action_mask().tolist()]
    assert segment.logprobs == expected
    assert trajectory.response_length == 14


def test_the_first_observation_is_prompt_even_where_the_environment_added_to_it() -> None:
    class Prefixed(environment()):
        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"observation": states["observation"] + " the answer is"}

    text, actions = text_of(run(Prefixed, "3", label=1))
    assert text == "1 + 2 = the answer is3<|im_end|> go on"
    assert actions == ["3<|im_end|>"]


def test_the_environment_sees_the_text_so_far_and_the_action_with_special_tokens() -> None:
    cls = environment()
    run(cls, "one", "two", label=2)
    first, second = cls.seen
    assert (first["observation_text"], first["action_text"]) == ("1 + 2 =", "one<|im_end|>")
    assert second["observation_text"] == "1 + 2 =one<|im_end|> go on"
    assert second["action_text"] == "two<|im_end|>"
    assert first["label"] == 2


def test_every_sample_has_an_object_of_its_own() -> None:
    made: list[Any] = []

    class Counting(environment()):
        def __init__(self) -> None:
            super().__init__()
            self.counts: list[int] = []
            made.append(self)

        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            returned = await super().step(states)
            await asyncio.sleep(0.001)
            self.counts.append(self.turns)
            return returned

    async def eight() -> None:
        executor = MultiTurnAgentExecutor(Counting)
        await asyncio.gather(*[play(executor, TalkingEngine("a", "b", "c")) for _ in range(8)])

    asyncio.run(eight())
    assert [instance.counts for instance in made] == [[1, 2, 3]] * 8


def test_rewards_stay_with_the_turn_that_earned_them_and_the_last_score_counts() -> None:
    class Paying(environment()):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            returned = await super().step(states)
            scores = {1: 1.0, 2: 0.0}.get(self.turns)
            reward = [torch.tensor([0.25]), 1, torch.tensor(-0.5)][self.turns - 1]
            logs = {f"turn{self.turns}": 1, "last": torch.tensor([float(self.turns)])}
            return {**returned, "rewards": reward, "scores": scores, "extra_logs": logs}

    trajectory = run(Paying, "a", "b", "c")
    assert trajectory.step_rewards == [0.25, 1.0, -0.5]
    assert trajectory.reward == 0.75
    assert trajectory.score == 0.0, "0.0 is a score, and the turn after it gave none"
    assert trajectory.extra_logs == {"turn1": 1.0, "turn2": 1.0, "turn3": 1.0, "last": 3.0}
    assert run(environment(), "a", "b", label=2).score == 1.0, "without any score the reward counts"


def test_sampling_parameters_of_a_turn_reach_the_next_turns_and_no_other_sample() -> None:
    class Cooling(environment()):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            returned = await super().step(states)
            params = states["sampling_params"]
            params.temperature /= 2
            params.stop.append("x")
            return {**returned, "sampling_params": params if self.turns == 1 else None}

    async def two() -> list[TalkingEngine]:
        executor, params = MultiTurnAgentExecutor(Cooling), TurnParams(max_tokens=9, logprobs=None)
        engines = [TalkingEngine("a", "b", "c") for _ in range(2)]
        for engine in engines:
            await play(executor, engine, params=params)
        assert params == TurnParams(max_tokens=9, logprobs=None)
        return engines

    for engine in asyncio.run(two()):
        used = [params for _, params in engine.requests]
        assert [params.temperature for params in used] == [1.0, 0.5, 0.5]
        assert [params.max_tokens for params in used] == [9, 9, 9]
        assert [params.stop for params in used] == [[], ["x"], ["x"]]
        assert [params.detokenize for params in used] == [False, True, True], "stop strings are looked for in text"


def test_another_temperature_is_refused_where_the_engines_log_probs_are_compared_with_the_trainers() -> None:
    cls = environment(sampling_params=TurnParams(max_tokens=4, temperature=0.5))
    engine = TalkingEngine("a", "b")
    trajectory = asyncio.run(play(MultiTurnAgentExecutor(cls), engine, label=2, params=TurnParams(max_tokens=9)))
    assert trajectory.reward is None and "sampling_params.temperature" in trajectory.failure


def test_what_training_needs_is_asked_for_even_with_parameters_that_the_environment_made() -> None:
    cls = environment(sampling_params=TurnParams(max_tokens=4, logprobs=None, output_kind="delta"))
    engine = TalkingEngine("a", "b")
    asyncio.run(play(MultiTurnAgentExecutor(cls), engine, label=2, params=TurnParams(max_tokens=9, logprobs=0)))
    used = engine.requests[1][1]
    assert (used.max_tokens, used.logprobs, used.output_kind) == (4, 0, "final")


def test_turns_do_not_draw_the_same_numbers_and_a_seed_repeats_them() -> None:
    def seeds() -> list[int]:
        engine = TalkingEngine("a", "b", "c")
        asyncio.run(play(MultiTurnAgentExecutor(environment()), engine, params=TurnParams(max_tokens=9, seed=5)))
        return [params.seed for _, params in engine.requests]

    assert seeds()[0] == 5
    assert len(set(seeds())) == 3
    assert seeds() == seeds()


def test_each_action_keeps_the_version_of_the_weights_that_sampled_it() -> None:
    engine = TalkingEngine("a", "b", weight_version=4)

    class Updating(environment()):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            engine.weight_version += 1
            return await super().step(states)

    trajectory = asyncio.run(play(MultiTurnAgentExecutor(Updating), engine, label=2))
    assert trajectory.segments[0].weight_versions == [4, 5]


def test_the_budget_of_each_turn_is_the_asked_one_or_what_the_context_has_left() -> None:
    prompt, feedback = (len(make_tokenizer()(text)["input_ids"]) for text in ("1 + 2 =", " go on"))
    action = len(say("one two three").outputs[0].token_ids)
    length = prompt + 2 * (action + feedback) + 2
    engine = TalkingEngine("one two three", "one two three", say("one", "length"))
    executor = MultiTurnAgentExecutor(environment())
    trajectory = asyncio.run(play(executor, engine, max_length=length, params=TurnParams(max_tokens=action)))
    assert [params.max_tokens for _, params in engine.requests] == [action, action, 2]
    assert trajectory.truncated
    assert trajectory.segments[0].stop_reason == "environment"
    assert trajectory.total_length <= length


def test_a_sample_without_room_for_another_turn_is_cut_off_by_length_and_keeps_its_reward() -> None:
    engine = TalkingEngine("one")
    length = len(make_tokenizer()("1 + 2 =")["input_ids"]) + len(say("one").outputs[0].token_ids) + 1
    trajectory = asyncio.run(
        play(MultiTurnAgentExecutor(environment()), engine, max_length=length, params=TurnParams())
    )
    assert trajectory.truncated
    assert trajectory.segments[0].stop_reason == "length"
    assert trajectory.reward == 0.5
    assert trajectory.total_length == length, "feedback is kept as far as there is room"


def test_an_environment_that_is_done_ends_the_sample_by_itself() -> None:
    trajectory = run(environment(environment_feedback=None), "one", label=1)
    assert not trajectory.truncated
    assert trajectory.segments[0].stop_reason == "environment"
    assert text_of(trajectory)[0] == "1 + 2 =one<|im_end|>"


@pytest.mark.parametrize(("max_tokens", "kept", "budget"), [(None, 9, 1), (4, 6, 4)])
def test_a_first_observation_longer_than_the_context_is_cut_from_the_left_and_counted(
    max_tokens: int | None, kept: int, budget: int
) -> None:
    tokenizer = make_tokenizer()
    prompt = "red green blue " * 5
    ids = tokenizer(prompt)["input_ids"]
    engine = TalkingEngine(completion([5], [-0.5], "length"))
    options = {"prompt": prompt, "max_length": 10, "params": TurnParams(max_tokens=max_tokens), "label": 1}
    trajectory = asyncio.run(play(MultiTurnAgentExecutor(environment()), engine, **options))
    assert engine.requests[0][0] == ids[-kept:]
    assert engine.requests[0][1].max_tokens == budget
    assert trajectory.prompt_tokens_cut == len(ids) - kept


def test_no_room_for_any_prompt_is_one_sentence() -> None:
    trajectory = run(environment(), max_length=10, params=TurnParams(max_tokens=10))
    assert "no room for a prompt" in trajectory.failure


def test_log_probs_are_none_where_a_turn_has_none() -> None:
    trajectory = run(environment(), "a", completion([5, END_ID]), label=2)
    assert trajectory.segments[0].logprobs is None
    assert trajectory.failure is None


def test_a_templated_prompt_gets_no_second_bos() -> None:
    tokenizer = make_tokenizer()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    engine = TalkingEngine("a")
    asyncio.run(play(MultiTurnAgentExecutor(environment()), engine, prompt=text, templated=True, label=1))
    assert engine.requests[0][0] == tokenizer(text, add_special_tokens=False)["input_ids"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"environment_feedback": "a\ud800"}, "step(): 'environment_feedback' holds '\\ud800', half of a character"),
    ({"done": "False"}, "'done' is 'False', neither True nor False"),
    ({"rewards": None}, "Fixed.step(): 'rewards' is None"),
    ({"rewards": float("nan")}, "Fixed.step(): 'rewards' holds nan"),
    ({"rewards": torch.tensor([1.0, 2.0])}, "Fixed.step(): 'rewards' holds tensor([1., 2.]), not a number"),
    ({"scores": "good"}, "Fixed.step(): 'scores' holds 'good', not a number"),
    ({"environment_feedback": None}, "'environment_feedback' is missing and 'done' is false"),
    ({"environment_feedback": 3}, "'environment_feedback' is int, not text"),
    ({"extra_logs": [1]}, "'extra_logs' is list"),
    ({"environment_images": ["a.png"]}, "'environment_images' holds images, and vision models are not supported"),
    ({"sampling_params": TurnParams(max_tokens=0)}, "sampling_params.max_tokens is 0"),
]


@pytest.mark.parametrize(("answer", "message"), WRONG)
def test_a_step_that_returns_something_unusable_fails_its_sample_and_says_what(
    answer: dict[str, Any], message: str
) -> None:
    trajectory = run(environment(**answer), "a", "b", label=2)
    assert trajectory.reward is None
    assert trajectory.step_rewards is None
    assert trajectory.segments == []
    assert message in trajectory.failure


@pytest.mark.parametrize("key", ["rewards", "done"])
def test_a_missing_key_is_named(key: str) -> None:
    class Forgetful(environment()):
        async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            returned = await super().step(states)
            del returned[key]
            return returned

    assert f"Forgetful.step(): no '{key}'" in run(Forgetful, "a").failure


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "reset() returned NoneType, not a dict"),
        ({}, "reset(): no 'observation'"),
        ({"observation": ["a"]}, "'observation' is list, not text"),
        ({"observation": ""}, "'observation' is empty"),
        ({"observation": "a\udc00"}, "reset(): 'observation' holds '\\udc00', half of a character"),
    ],
)
def test_a_reset_that_gives_no_text_is_named(returned: Any, message: str) -> None:
    class Silent(environment()):
        async def reset(self, states: dict[str, Any], **kwargs: Any) -> Any:
            return returned

    assert message in run(Silent, "a").failure


def test_plain_methods_serve_as_well_as_async_ones() -> None:
    class Plain(environment()):
        def reset(self, states: dict[str, Any]) -> dict[str, Any]:
            return {"observation": states["observation"]}

        def step(self, states: dict[str, Any]) -> dict[str, Any]:
            return {"rewards": 1.0, "done": True}

    assert run(Plain, "a").reward == 1.0

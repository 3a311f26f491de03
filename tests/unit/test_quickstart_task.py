"""The parts of the quickstart that need no training: data, tokenizer, model, reward, test."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.config import check, parse
from openrlhf.config.errors import ConfigError
from openrlhf.config.quickstart import PROBLEMS, QuickstartConfig
from openrlhf.trainer import quickstart
from openrlhf.trainer.quickstart import Folders, choose_start, rl_flags, sft_flags
from openrlhf.trainer.quickstart_reward import reward_func
from openrlhf.trainer.quickstart_task import (
    ASSISTANT,
    END,
    UNKNOWN,
    USER,
    Problem,
    accuracy,
    make_model,
    make_problems,
    make_tokenizer,
    write_problems,
)


def test_held_out_problems_are_not_trained_on_and_every_sum_is_right():
    splits = make_problems(train=PROBLEMS, seed=0)
    assert (len(splits.train), len(splits.held_out)) == (2048, 452)
    assert len({p.question for p in splits.train + splits.held_out}) == 2500
    for problem in splits.train + splits.held_out:
        a, b = problem.question.removesuffix("=").split("+")
        assert 0 <= int(a) < 50 and 0 <= int(b) < 50 and int(a) + int(b) == int(problem.answer)
        assert len(problem.question) == 6 and len(problem.answer) == 2
    assert make_problems(train=PROBLEMS, seed=0) == splits
    assert make_problems(train=PROBLEMS, seed=1) != splits


@pytest.mark.parametrize("train", [0, 2500])
def test_splits_that_leave_one_side_empty_are_refused(train):
    with pytest.raises(ValueError, match=f"cannot train on {train} of 2500 problems"):
        make_problems(train=train, seed=0)


def test_problems_are_written_one_a_line(tmp_path):
    path = write_problems(tmp_path / "p.jsonl", [Problem("7+35=", "42"), Problem("0+0=", "0")])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"question": "7+35=", "answer": "42"},
        {"question": "0+0=", "answer": "0"},
    ]


def test_the_tokenizer_has_one_token_a_character_and_gives_any_text_back(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "7+35= The quick\n  (brown) fox, it's 'ok' ."
    ids = tokenizer(text, add_special_tokens=True)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer("é")["input_ids"] == [tokenizer.convert_tokens_to_ids(UNKNOWN)]


def test_the_chat_template_renders_what_is_trained_and_what_is_asked():
    tokenizer = make_tokenizer()
    chat = [{"role": "user", "content": "7+35="}, {"role": "assistant", "content": "42"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == f"{USER}7+35={END}{ASSISTANT}42{END}"
    asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(asked)["input_ids"]
    assert asked == f"{USER}7+35={END}{ASSISTANT}" and len(ids) == 8 and tokenizer.decode(ids) == asked


def test_the_model_is_a_plain_folder_of_about_a_million_parameters_that_a_seed_fixes(tmp_path):
    sizes = [make_model(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    assert len(set(sizes)) == 1 and 500_000 < sizes[0] < 1_500_000
    a, b, c = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


def test_accuracy_counts_answers_that_are_right_and_end(tmp_path):
    """A model whose head always says one thing: first "4", then the end, whatever it is asked."""
    make_model(tmp_path, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    four, end, assistant = (tokenizer.convert_tokens_to_ids(token) for token in ("4", END, ASSISTANT))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # Each token's state is its own embedding, in a place of its own; the head reads what follows it.
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.model.embed_tokens.weight))
        model.model.norm.weight.fill_(1.0)
        for place, (token, follows) in enumerate([(assistant, four), (four, end)]):
            model.model.embed_tokens.weight[token, place] = 1.0
            model.lm_head.weight[follows, place] = 1.0
    model.save_pretrained(tmp_path)
    problems = [Problem("1+3=", "4"), Problem("13+29=", "42"), Problem("0+4=", "4"), Problem("2+3=", "5")]
    assert accuracy(tmp_path, problems, batch_size=3) == 0.5


def test_the_reward_is_one_for_the_whole_right_answer_only():
    prompt = f"{USER}7+35={END}{ASSISTANT}"
    answers = [f"42{END}", "42", f"4{END}", f"042{END}", f"42{END}{END}", END, ""]
    result = reward_func([prompt + answer for answer in answers], [prompt] * 7, ["42"] * 7)
    assert result["rewards"] == result["scores"] == [1, 0, 0, 0, 0, 0, 0]
    assert result["extra_logs"] == {"ended": [1, 0, 1, 1, 1, 1, 0]}


@pytest.mark.parametrize(("steps", "prompts", "episodes"), [(1, 64, 1), (32, 2048, 1), (33, 2048, 2), (96, 2048, 3)])
def test_steps_of_rl_are_made_of_prompts_and_passes(steps, prompts, episodes):
    config = QuickstartConfig(rl_steps=steps)
    assert (config.rl_prompts, config.rl_episodes) == (prompts, episodes)


@pytest.mark.parametrize(("steps", "rows", "epochs"), [(1, 128, 1), (16, 2048, 1), (17, 2048, 2), (240, 2048, 15)])
def test_steps_of_sft_are_made_of_rows_and_passes(steps, rows, epochs):
    config = QuickstartConfig(sft_steps=steps)
    assert (config.sft_rows, config.sft_epochs) == (rows, epochs)


def test_rl_starts_from_the_earliest_checkpoint_that_is_good_enough_or_from_the_last(tmp_path, monkeypatch):
    accuracies = {20: 0.1, 90: 0.4, 100: 0.51, 110: 0.6}
    for step in accuracies:
        (tmp_path / f"global_step{step}_hf").mkdir()
    monkeypatch.setattr(quickstart, "accuracy", lambda folder, _: accuracies[int(folder.name[11:-3])])
    assert choose_start(tmp_path, []).name == "global_step100_hf"
    accuracies.update({100: 0.31, 110: 0.32})
    assert choose_start(tmp_path, []).name == "global_step110_hf"


def test_a_number_of_steps_below_one_is_refused():
    with pytest.raises(ConfigError, match="--rl_steps 0: give 1 or more"):
        QuickstartConfig(rl_steps=0)


def test_both_commands_take_the_flags_of_the_quickstart(tmp_path):
    config, at = QuickstartConfig(output_dir=str(tmp_path)), Folders(str(tmp_path))
    make_model(at.start, seed=0)
    make_model(at.sft, seed=0)
    at.data.mkdir()
    write_problems(at.data / "train.jsonl", make_problems(train=PROBLEMS, seed=0).train)
    at.reward.write_text("def reward_func(queries, prompts, labels): ...\n")
    sft = parse("train_sft", sft_flags(config, at))
    check(sft)
    assert sft.train.max_epochs == config.sft_epochs and sft.ds.param_dtype == "fp32"
    rl = parse("train_ppo_ray", rl_flags(config, at, at.sft))
    check(rl)
    assert rl.algo.advantage.estimator == "reinforce_baseline" and rl.train.num_episodes == config.rl_episodes


def test_help_and_mistakes_are_answered_without_torch():
    script = (
        "import sys; from openrlhf.cli.quickstart import main\n"
        "try: main([{!r}, {!r}])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    for words, code in ((("--help", "--help"), 0), (("--rl_steps", "0"), 2)):
        command = [sys.executable, "-c", script.format(*words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == f"{code} False", done.stderr

"""Commands answer at once, complain in one sentence, and call one function."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf.cli import common, main
from openrlhf.cli.common import prepare, run_command
from openrlhf.config import COMMANDS as TREES
from openrlhf.config import ConfigError, parse, unbuilt
from openrlhf.config.flags import flags_of
from tests.unit.config_args import RL, SFT, make_files, words

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "ray", "vllm", "deepspeed", "datasets", "numpy")
COMMANDS = ("train_sft", "train_rm", "train_dpo", "train_ppo_ray", "lora_combiner", "serve_rm")

REPORT = (
    "import sys\n"
    "from openrlhf.cli.main import main\n"
    "try:\n"
    "    main(sys.argv[1:])\n"
    "finally:\n"
    f"    print('LOADED', *[name for name in {HEAVY} if name in sys.modules])\n"
)


def run_python(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def files(tmp_path, monkeypatch):
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_shown_without_loading_anything_heavy(command):
    result = run_python("-c", REPORT, command, "--help")

    assert result.returncode == 0
    assert result.stdout.strip().splitlines()[-1] == "LOADED"
    assert "--trust_remote_code" in result.stdout


def test_refusal_comes_without_loading_anything_heavy(files):
    result = run_python("-c", REPORT, "train_ppo_ray", *words(RL, "--rollout.top_p", "2"))

    assert result.returncode == 2
    assert result.stdout.strip() == "LOADED"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_which_flags_it_lists_that_a_run_would_refuse(command, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(command, ["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    _, found, names = out.rpartition("\nNot built yet, and refused but for their defaults: ")
    names = names if found else ""
    assert sorted(names.split()) == sorted(f"--{name}" for name in unbuilt.FLAGS if name in flags_of(TREES[command]))


def test_a_flag_that_is_like_no_other_is_told_how_all_are_listed(capsys):
    with pytest.raises(SystemExit):
        run_command("train_sft", None, ["--qqqq", "1"])
    said = "openrlhf train_sft: Unknown flag --qqqq; no flag has a name like it, and --help lists them all.\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("command", "line", "said"),
    [
        ("train_ppo_ray", "rollout.top_p: true", "rollout.top_p takes a number, found 'True'."),
        ("train_ppo_ray", "train.seed: off", "train.seed takes a whole number, found 'False'."),
        ("train_ppo_ray", "device: no", "device must be one of auto, cuda, cpu, found "),
        ("train_ppo_ray", "vllm.extra: yes", "vllm.extra takes a JSON object, found 'True'."),
        ("train_sft", "data.output_key: yes", "data.output_key takes text, found True, as YAML reads"),
    ],
)
def test_a_switch_in_yaml_where_something_else_belongs_says_what_belongs_there(command, line, said, files):
    (files / "run.yaml").write_text(line + "\n")
    with pytest.raises(ConfigError) as caught:
        parse(command, ["--config", "run.yaml"])
    assert f"run.yaml: {said}" in str(caught.value)


def test_help_is_grouped_as_the_flags_are():
    out = run_python("-m", "openrlhf.cli.train_ppo_ray", "--help").stdout

    groups = ["actor", "actor.adam", "ref", "critic", "reward", "data", "rollout", "vllm", "algo", "algo.advantage",
              "algo.kl", "train", "ds", "ds.lora", "eval", "ckpt", "logger", "logger.wandb"]  # fmt: skip
    places = [out.index(f" {group} options ") for group in groups]
    assert places == sorted(places)


def test_mistake_ends_in_one_sentence_and_status_2(files):
    result = run_python("-m", "openrlhf.cli.train_sft", "--train.batchsize", "3")

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("openrlhf train_sft: Unknown flag --train.batchsize; nearest: --train.batch_size")


def test_rank_of_a_launcher_is_accepted_and_only_one_rank_complains(files, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as caught:
        run_command("train_sft", None, ["--local_rank=1", "--nonsense", "1"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == ""

    assert prepare("train_sft", ["--local_rank=1", *words(SFT)]).local_rank == 1


@pytest.mark.parametrize(
    "raised", ["ConfigError('a flag is wrong')", "DataError('a row is wrong', source='rows.jsonl', row=3)"]
)
def test_mistake_found_while_running_is_said_without_a_traceback(files, monkeypatch, capsys, raised):
    (files / "room.py").write_text(
        "from openrlhf.config import ConfigError\nfrom openrlhf.data.errors import DataError\n"
        f"def run(config):\n    raise {raised}\n"
    )
    monkeypatch.syspath_prepend(str(files))
    monkeypatch.delitem(sys.modules, "room", raising=False)
    with pytest.raises(SystemExit) as caught:
        run_command("train_sft", "room:run", words(SFT))

    assert caught.value.code == 2
    assert " is wrong" in capsys.readouterr().err


RUN_FAULTS = {
    "openrlhf.utils.errors": "RunError",
    "openrlhf.backends.distributed": "RankError",
    "openrlhf.backends.deepspeed_backend": "GradientError",
    "openrlhf.rollout.transfer": "TransferError",
}


def raising_room(folder, monkeypatch, module: str, name: str) -> str:
    """Writes a module whose run() raises; returns its target."""
    (folder / "fault_room.py").write_text(
        f"from {module} import {name}\ndef run(config):\n    raise {name}('the disk is full')\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "fault_room", raising=False)
    return "fault_room:run"


@pytest.mark.parametrize("module", RUN_FAULTS)
def test_a_run_that_cannot_go_on_ends_in_one_sentence_and_status_1(module, files, monkeypatch, capsys):
    target = raising_room(files, monkeypatch, module, RUN_FAULTS[module])
    with pytest.raises(SystemExit) as caught:
        run_command("train_sft", target, words(SFT))

    assert caught.value.code == 1
    assert capsys.readouterr().err == "openrlhf train_sft: the disk is full\n"


@pytest.mark.parametrize(
    ("module", "name", "status"),
    [("openrlhf.config", "ConfigError", 2), ("openrlhf.backends.distributed", "RankError", 1)],
)
def test_the_first_rank_of_a_node_speaks_and_another_only_where_it_was_not_ended(
    module, name, status, files, monkeypatch, capsys
):
    """A launcher ends all ranks once one is gone; a rank that it did not end may have failed alone."""
    target = raising_room(files, monkeypatch, module, name)
    said = []

    monkeypatch.setattr(common.time, "sleep", lambda seconds: said.append(capsys.readouterr().err))
    for rank, sentence in (("0", "openrlhf train_sft: "), ("3", "openrlhf train_sft (local rank 3): ")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as caught:
            run_command("train_sft", target, words(SFT))
        assert caught.value.code == status
        assert capsys.readouterr().err == f"{sentence}the disk is full\n"
    assert said == [""]


def test_an_error_that_ray_brings_from_a_worker_is_said_without_its_traceback(files, monkeypatch, capsys):
    (files / "ray_room.py").write_text(
        "from ray.exceptions import RayTaskError\nfrom openrlhf.backends.distributed import RankError\n"
        "def run(config):\n"
        "    raise RayTaskError('save', 'Traceback ...', RankError('the disk is full')).as_instanceof_cause()\n"
    )
    monkeypatch.syspath_prepend(str(files))
    with pytest.raises(SystemExit) as caught:
        run_command("train_sft", "ray_room:run", words(SFT))
    assert caught.value.code == 1
    assert capsys.readouterr().err == "openrlhf train_sft: the disk is full\n"


@pytest.mark.parametrize("written", [["--logger.wandb.key", "k123"], ["--logger.wandb.key=k123"]])
def test_a_secret_does_not_stay_on_the_command_line_that_trackers_show(written, files, monkeypatch, capsys):
    (files / "key_room.py").write_text(
        "import sys\ndef run(config):\n    print(config.logger.wandb.key, 'k123' in ' '.join(sys.argv))\n"
    )
    monkeypatch.syspath_prepend(str(files))
    monkeypatch.setattr(sys, "argv", ["train_sft", *words(SFT, *written)])
    run_command("train_sft", "key_room:run")
    assert capsys.readouterr().out == "k123 False\n"


@pytest.mark.parametrize(("command", "base"), [("train_sft", SFT), ("train_ppo_ray", RL)])
def test_rows_longer_than_the_model_can_place_are_refused_before_anything_starts(command, base, files, capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(command, "no_such_room:run", words(base, "--data.max_len", "2049", "--device", "cpu"))
    assert caught.value.code == 2
    assert re.search("--data.max_len 2049 is longer than the 2048 tokens that .*model was", capsys.readouterr().err)
    # What comes next: RL looks into the tokenizer, which this folder lacks; SFT starts.
    expected = SystemExit if command == "train_ppo_ray" else ModuleNotFoundError
    with pytest.raises(expected):
        run_command(command, "no_such_room:run", words(base, "--data.max_len", "2048", "--device", "cpu"))
    assert (command == "train_ppo_ray") == ("no tokenizer can be loaded" in capsys.readouterr().err)


STOPPED_ROOM = """
import time
def run(config):
    try:
        print("running", flush=True)
        time.sleep(30)
    finally:
        print("cleaning", flush=True)
        time.sleep(1)
        print("cleaned", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_sigterm_unwinds_the_run_once_and_is_said_in_one_line_for_all_ranks(rank, files):
    (files / "stopped_room.py").write_text(STOPPED_ROOM)
    code = "import sys; from openrlhf.cli.common import run_command; run_command('train_sft', 'stopped_room:run')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words(SFT, "--device", "cpu")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LOCAL_RANK": rank, "RANK": rank, "PYTHONPATH": f"{files}:{ROOT}"},
    )
    try:
        assert process.stdout.readline() == "running\n"
        process.terminate()
        assert process.stdout.readline() == "cleaning\n"
        process.terminate()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (143, "cleaned\n")
    assert err == ("openrlhf train_sft: terminated\n" if rank == "0" else "")


def test_fault_of_ours_keeps_its_traceback(files, monkeypatch):
    (files / "broken_room.py").write_text("def run(config):\n    raise ZeroDivisionError\n")
    monkeypatch.syspath_prepend(str(files))
    with pytest.raises(ZeroDivisionError):
        run_command("train_sft", "broken_room:run", words(SFT))


def test_the_function_gets_the_resolved_config(files, monkeypatch, capsys):
    (files / "quiet_room.py").write_text("def run(config):\n    print(config.logger.wandb.run_name, config.dry_run)\n")
    monkeypatch.syspath_prepend(str(files))
    run_command("train_sft", "quiet_room:run", words(SFT))

    assert capsys.readouterr().out.startswith("train_sft_")


def test_what_deserves_a_look_is_printed_before_the_run(files, capsys):
    prepare("train_ppo_ray", words(RL, "--critic.adam.lr", "1", "--vllm.enforce_eager", "--device", "cpu"))

    assert capsys.readouterr().err.splitlines() == [
        "note: --critic.adam.lr has no effect without --algo.advantage.estimator gae.",
        "note: no effect on the CPU: --vllm.enforce_eager.",
    ]


def test_console_command_lists_its_commands(capsys):
    main.main([])
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in (*COMMANDS, "quickstart"))


def test_console_command_passes_its_words_on(capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["train-dpo", "--adam.lr", "1"])
    assert caught.value.code == 2
    assert "openrlhf train_dpo: --model.model_name_or_path is missing" in capsys.readouterr().err


def test_console_command_names_the_nearest_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(["train_ppo"])
    assert caught.value.code == 2
    assert "unknown command 'train_ppo'; did you mean train_ppo_ray?" in capsys.readouterr().err

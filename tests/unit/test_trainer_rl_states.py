"""Which states an RL run goes on from, and which folders it leaves alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from openrlhf.config import CkptConfig, ConfigError, PPOCkptConfig
from openrlhf.trainer import rl_states, supervised_outputs
from openrlhf.trainer.fixed_settings import refuse_other_settings, write_fixed
from openrlhf.trainer.rl_states import RLStates

FIXED = {"--train.seed": 1, "--actor.adam.betas": [0.9, 0.95], "--actor.adam.lr": 1e-6}


@pytest.fixture
def ckpt(tmp_path: Path) -> PPOCkptConfig:
    return PPOCkptConfig(output_dir=str(tmp_path / "out"), path=str(tmp_path / "states"), save_steps=1)


def write(folder: Path, name: str = "complete") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    return folder


def states_of(ckpt: PPOCkptConfig, *, critic: bool = True) -> RLStates:
    return RLStates(ckpt, has_critic=critic)


@pytest.mark.parametrize("place", ["_actor/global_step3", "_critic/global_step3", "global_step3_hf"])
def test_a_new_run_that_saves_is_refused_the_folder_of_another(ckpt: PPOCkptConfig, place: str) -> None:
    states_of(ckpt).check(FIXED)
    write(Path(ckpt.path) / place, "config.json" if place.endswith("_hf") else "complete")
    for critic in (True, False):
        with pytest.raises(ConfigError, match="--ckpt.path .*states holds .* of another run .global_step3"):
            states_of(ckpt, critic=critic).check(FIXED)
    # One that saves nothing takes nothing from it.
    states_of(replace(ckpt, save_steps=-1)).check(FIXED)


def test_a_run_that_can_go_on_does_and_is_told_how_where_it_was_not_asked_to(ckpt: PPOCkptConfig) -> None:
    resuming = replace(ckpt, load_enable=True)
    for role in ("_actor", "_critic"):
        write(Path(ckpt.path) / role / "global_step3")
    write(Path(ckpt.path) / "_actor" / "global_step4")
    with pytest.raises(ConfigError, match="add --ckpt.load_enable to go on from them"):
        states_of(ckpt).check(FIXED)
    states_of(resuming).check(FIXED)
    assert states_of(ckpt).to_resume() is None
    assert states_of(resuming).to_resume() == Path(ckpt.path) / "_actor" / "global_step3"
    assert states_of(resuming, critic=False).to_resume() == Path(ckpt.path) / "_actor" / "global_step4"


def test_states_of_an_actor_that_never_had_a_critic_are_refused_and_kept(ckpt: PPOCkptConfig) -> None:
    state = write(Path(ckpt.path) / "_actor" / "global_step3")
    with pytest.raises(ConfigError, match="global_step3. that this run cannot go on from"):
        states_of(replace(ckpt, load_enable=True)).check(FIXED)
    assert state.is_dir()


def test_a_critic_of_a_first_save_that_was_killed_is_no_obstacle_and_goes_before_the_next(ckpt: PPOCkptConfig) -> None:
    states = states_of(replace(ckpt, load_enable=True))
    critic = write(Path(ckpt.path) / "_critic" / "global_step5")
    states.check(FIXED)
    assert states.to_resume() is None
    states.go_on_after(0)
    states.sweep()
    assert not critic.exists()


def test_states_after_the_one_that_a_run_goes_on_from_go_before_its_next_save(ckpt: PPOCkptConfig) -> None:
    path = Path(ckpt.path)
    for folder in ("_actor/global_step3", "_critic/global_step3", "_actor/global_step4", "_critic/global_step5"):
        write(path / folder)
    write(path / "global_step4_hf", "config.json")
    states = states_of(replace(ckpt, load_enable=True))
    states.go_on_after(3)
    states.sweep()
    left = sorted(str(found.relative_to(path)) for found in path.rglob("global_step*"))
    assert left == ["_actor/global_step3", "_critic/global_step3"]


@pytest.mark.parametrize("flag", FIXED)
def test_other_settings_than_those_of_the_state_are_refused_before_anything_is_loaded(
    ckpt: PPOCkptConfig, flag: str
) -> None:
    states = states_of(replace(ckpt, load_enable=True, save_steps=-1), critic=False)
    state = write(Path(ckpt.path) / "_actor" / "global_step3")
    # As a kill right after the state was whole leaves it.
    states.check({**FIXED, flag: 7})
    write_fixed(state, FIXED)
    states.check(FIXED)
    with pytest.raises(ConfigError) as caught:
        states.check({**FIXED, flag: 7})
    assert str(caught.value) == (
        f"--ckpt.load_enable: {state} was written with {flag} {FIXED[flag]}, and this run has 7: resume with the same, "
        "or start anew without the flag, in another --ckpt.path."
    )
    states.check({**FIXED, "--a.new.flag": 1})
    with pytest.raises(ConfigError, match=flag):
        refuse_other_settings(state, FIXED, {flag: 7})


@pytest.mark.parametrize(
    ("save_steps", "evaluates", "key", "locked"),
    [(1, False, "", True), (-1, True, "", True), (-1, True, "none", False), (-1, False, "", False)],
)
def test_the_folder_of_states_is_locked_where_a_run_writes_states_or_its_best_model(
    ckpt: PPOCkptConfig, save_steps: int, evaluates: bool, key: str, locked: bool
) -> None:
    ckpt = replace(ckpt, save_steps=save_steps, best_metric_key=key)
    with rl_states.sole_run(ckpt, FIXED, print, has_critic=False, evaluates=evaluates):
        assert (Path(ckpt.output_dir) / ".lock").exists()
        assert (Path(ckpt.path) / ".lock").exists() is locked


def test_a_run_is_refused_under_the_lock_so_that_no_other_can_come_between(ckpt: PPOCkptConfig) -> None:
    write(Path(ckpt.path) / "_actor" / "global_step3")
    folders = rl_states.sole_run(ckpt, FIXED, print, has_critic=False, evaluates=False)
    with pytest.raises(ConfigError, match="states of another run"), folders:
        raise AssertionError("the run has begun")
    assert not (Path(ckpt.path) / ".lock").exists()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_supervised_run_is_refused_the_folder_of_another_as_well(ckpt: PPOCkptConfig) -> None:
    new = CkptConfig(output_dir=ckpt.output_dir, path=ckpt.path, save_steps=1)
    resuming, saving_nothing = replace(new, load_enable=True), replace(new, save_steps=-1)

    def start(config: CkptConfig) -> None:
        with supervised_outputs.sole_run(config, print):
            assert os.listdir(config.output_dir) == [".lock"]

    for config in (new, resuming):
        start(config)
    export = write(Path(ckpt.path) / "global_step2_hf", "config.json")
    for config in (new, resuming):
        with pytest.raises(ConfigError, match="checkpoints of another run .global_step2_hf. that this run cannot go"):
            start(config)
    write(Path(ckpt.path) / "global_step2")
    with pytest.raises(ConfigError, match="add --ckpt.load_enable to go on from them, or name another folder"):
        start(new)
    for config in (resuming, saving_nothing):
        start(config)
    assert export.is_dir()

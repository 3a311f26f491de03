"""Folders of states whose names DeepSpeed would read as patterns."""

from __future__ import annotations

import pytest

from openrlhf.config.checks_training import check_checkpoints
from openrlhf.config.errors import ConfigError
from tests.unit.test_config_checks import SFT, built


@pytest.mark.parametrize("flags", [("--ckpt.load_enable",), ("--ckpt.save_steps", "4")])
@pytest.mark.parametrize("folder", ["runs[1]/states", "states*", "what?"])
def test_a_name_that_is_a_pattern_is_refused_where_states_are_written_or_read(
    folder: str, flags: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match="which DeepSpeed reads as a pattern") as caught:
        check_checkpoints(built("train_sft", SFT, "--ckpt.path", folder, *flags))
    assert str(caught.value).startswith(f"--ckpt.path {folder}: ")


def test_other_names_pass_and_a_run_without_states_may_be_called_anything() -> None:
    check_checkpoints(built("train_sft", SFT, "--ckpt.path", "a run's (2nd)+states", "--ckpt.save_steps", "4"))
    check_checkpoints(built("train_sft", SFT, "--ckpt.path", "runs[1]"))

"""Weights of another shape than config.json says, and weights that no one asked for, are said in one line each."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf.config import ConfigError
from openrlhf.models.loading import load_causal_lm
from tests.tiny_models import make_tiny_model


def load(folder: Path):
    return load_causal_lm(folder, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden": 128}, r"lm_head.weight is \[512, 128\] in the files and \[512, 64\] by the config"),
        ({"vocab": 300}, r"lm_head.weight is \[300, 64\] in the files and \[512, 64\] by the config"),
        ({"num_key_value_heads": 4}, r"k_proj.bias is \[64\] in the files and \[32\] by the config"),
    ],
)
def test_a_weight_of_another_shape_is_named_with_both_shapes_and_no_table_is_printed(
    changes: dict, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path / "model", tie=False)
    other = make_tiny_model(tmp_path / "other", tie=False, **changes)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    capfd.readouterr()
    with pytest.raises(ConfigError, match=f"{folder} do not fit its config.json: .*{said}") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert "REPORT" not in "".join(capfd.readouterr())


def test_weights_that_the_model_has_no_use_for_are_a_warning_of_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_model(tmp_path / "model", tie=False)
    weights = load_file(folder / "model.safetensors")
    extra = {f"extra.{n}.weight": torch.ones(2) for n in range(5)}
    save_file(weights | extra, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="openrlhf"):
        load(folder)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        f"{folder} holds weights that the model has no use for: "
        "extra.0.weight, extra.1.weight, extra.2.weight and 2 more"
    )

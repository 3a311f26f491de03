"""A state is loaded into a model of its own shapes, or refused before anything of it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.backends.shapes import SHAPES_FILE, difference_of, parameter_shapes, refuse_other_model, write_shapes
from openrlhf.config import ConfigError
from openrlhf.trainer.workers import TrainWorker


def test_the_first_parameter_that_differs_is_named_with_both_shapes() -> None:
    assert difference_of({"a": [2], "b": [3]}, {"a": (2,), "b": (3,)}) is None
    assert difference_of({"a": [2], "b": [3]}, {"a": [2], "b": [4]}) == "b is [3] there and [4] in this run"
    assert difference_of({"a": [2]}, {"a": [2], "b": [3]}) == "b is missing there"
    assert difference_of({"a": [2], "b": [3]}, {"a": [2]}) == "b is missing in this run"


def test_a_state_without_the_file_is_not_refused(tmp_path: Path) -> None:
    refuse_other_model(tmp_path, {"a": [2]})
    write_shapes(tmp_path, {"a": [2]})
    refuse_other_model(tmp_path, {"a": (2,)})
    with pytest.raises(ConfigError, match=f"the checkpoint {tmp_path} was written by another model: a is .2. there"):
        refuse_other_model(tmp_path, {"a": [3]})


class Recording:
    """A backend that notes which states it reads and writes."""

    def __init__(self, width: int) -> None:
        self.module = torch.nn.Linear(width, 2)
        self.loaded: list[Path] = []

    def save_checkpoint(self, folder: Path, state: dict[str, Any]) -> None:
        folder.mkdir()

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        self.loaded.append(folder)
        return {}


def worker_of(backend: Recording, rank: int = 0) -> TrainWorker:
    worker = TrainWorker(rank, 2)
    worker._backend = backend
    return worker


def test_every_rank_of_an_rl_run_compares_the_shapes_before_its_backend_reads_the_state(tmp_path: Path) -> None:
    same, wider = Recording(3), Recording(4)
    folder = tmp_path / "global_step1"
    worker_of(same).save_checkpoint(str(folder), {})
    assert json.loads((folder / SHAPES_FILE).read_text()) == parameter_shapes(same.module)
    for rank in (0, 1):
        worker_of(same, rank).load_checkpoint(str(folder))
        with pytest.raises(ConfigError, match=r"weight is \[2, 3\] there and \[2, 4\] in this run"):
            worker_of(wider, rank).load_checkpoint(str(folder))
    assert same.loaded == [folder, folder] and wider.loaded == []

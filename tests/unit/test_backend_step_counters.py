"""Step counters of a converted state stand where the optimizer looks for them."""

from __future__ import annotations

import pytest
import torch

from openrlhf.backends.universal import place_steps


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_counters_go_to_the_weights_of_a_fused_step_and_none_is_shared(fused: bool, device: str) -> None:
    # Stands for another device than the CPU.
    weights = [torch.nn.Parameter(torch.empty(2, device="meta")) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights)
    optimizer.param_groups[0]["fused"] = fused
    shared = torch.tensor(7.0)
    for weight in weights:
        optimizer.state[weight] = {"step": shared}
    place_steps(optimizer)
    first, second = (optimizer.state[weight]["step"] for weight in weights)
    assert {first.device.type, second.device.type} == {device}
    assert first is not second and first is not shared
    if not fused:
        first += 1
        assert (first, second, shared) == (8, 7, 7)

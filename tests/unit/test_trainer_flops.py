"""Operations of training by hand, peaks by name, and a utilisation that is left out where one of them is unknown."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.trainer.device_meter import Usage, peak_memory, utilisation
from openrlhf.trainer.flops import ModelFlops, attended_pairs, model_flops, peak_flops
from openrlhf.trainer.instruments import usage_metrics

SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def made(kind: str, model: type = AutoModelForCausalLM, **changes: object) -> torch.nn.Module:
    config = AutoConfig.for_model(kind, **{**SIZES, **HEADS, **changes})
    return model.from_config(config)


def parameters(module: torch.nn.Module, without: str = "none") -> int:
    return sum(p.numel() for name, p in module.named_parameters() if without not in name)


def test_a_tied_table_counts_as_the_head_and_an_untied_one_is_only_looked_up() -> None:
    tied, untied = (made("qwen2", tie_word_embeddings=tie) for tie in (True, False))
    assert model_flops(tied).per_token == 6 * parameters(tied)
    assert model_flops(untied).per_token == 6 * parameters(untied, "embed_tokens") == model_flops(tied).per_token
    judge = made("qwen2", AutoModelForSequenceClassification, num_labels=1)
    assert model_flops(judge).per_token == 6 * parameters(judge, "embed_tokens")


def test_weights_that_are_frozen_have_no_gradient_of_their_own_to_be_computed() -> None:
    module = made("qwen2", tie_word_embeddings=True)
    module.requires_grad_(False)
    assert model_flops(module).per_token == 4 * parameters(module)


def test_attention_costs_twelve_operations_for_each_pair_layer_and_width() -> None:
    flops = model_flops(made("qwen3", head_dim=8))
    assert flops.attention == ((32, None, 2),)
    pairs = 3 * 3 / 2 + 5 * 5 / 2
    assert flops.training([3, 5]) == pytest.approx(8 * flops.per_token + 12 * 32 * 2 * pairs)


def test_a_window_bounds_the_pairs_of_those_layers_that_have_it() -> None:
    assert attended_pairs(10, None) == attended_pairs(10, 10) == 50 and attended_pairs(10, 4) == 32
    flops = model_flops(
        made("gemma3_text", head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    )
    assert sorted(flops.attention, key=str) == [(32, 6, 1), (32, None, 1)]
    assert model_flops(made("mistral", sliding_window=6)).attention == ((16, 6, 2),)


def test_of_a_mixture_of_experts_those_that_a_token_is_routed_to_count() -> None:
    module = made("qwen2_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, decoder_sparse_step=1)
    experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
    others = parameters(module, ".experts.") - module.get_input_embeddings().weight.numel()
    assert experts > 0 and model_flops(module).per_token == pytest.approx(6 * (others + experts / 4))


def test_layers_that_are_no_attention_leave_the_operations_unknown() -> None:
    assert model_flops(AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **SIZES))) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA L40", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


MODEL = ModelFlops(60.0, ())


def rank(seconds: float = 2.0, peak: float | None = 1000.0, gib: float | None = 3.0) -> Usage:
    return Usage(gib, seconds, MODEL, peak)


def test_utilisation_is_of_all_devices_by_the_slowest_rank() -> None:
    # 2 passes of 60 operations for 10 tokens, against 4 seconds of twice 1000.
    assert utilisation([rank(2.0), rank(4.0)], [4, 6], passes=2) == pytest.approx(2 * 600 / (4 * 2000))


@pytest.mark.parametrize("ranks", [[rank(), rank(peak=None)], [rank(0.0), rank(0.0)], [Usage(1.0, 2.0, None, 10.0)]])
def test_a_utilisation_that_cannot_be_known_is_left_out_and_not_zero(ranks: list[Usage]) -> None:
    assert utilisation(ranks, [4, 6]) is None
    assert usage_metrics([("actor", ranks)], [4, 6], 1).keys() == {"memory/actor_gib"}


def test_memory_is_that_of_the_fullest_rank_of_each_part_and_of_the_largest_reward_model() -> None:
    assert peak_memory([rank(gib=None)]) is None
    parts = [
        ("actor", [rank(gib=3.0), rank(gib=5.0)]),
        ("ref", [rank(0.0, gib=1.0)]),
        ("critic", [rank(1.0, gib=2.0)]),
        ("reward 0", [rank(0.0, gib=8.0)]),
        ("reward 1", [rank(0.0, gib=7.0)]),
    ]
    assert usage_metrics(parts, [10], 1) == {
        "memory/actor_gib": 5.0,
        "throughput/mfu": pytest.approx(600 / 4000),
        "memory/ref_gib": 1.0,
        "memory/critic_gib": 2.0,
        "throughput/critic_mfu": pytest.approx(600 / 1000),
        "memory/reward_gib": 8.0,
    }
    assert usage_metrics([("actor", [rank(gib=None, peak=None)])], [10], 1) == {}

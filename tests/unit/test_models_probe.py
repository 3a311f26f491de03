"""At load, a model that would be silently wrong when packed, or scored inside its head, is found out."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf.config.errors import ConfigError
from openrlhf.data.packed_batch import pack_rows
from openrlhf.models.forward import ForwardPlan, score_tokens
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.probe import plan_forward
from tests.tiny_models import make_tiny_model, make_tiny_moe

CPU = torch.device("cpu")


def _plan(folder: Path, *, packing_samples: bool = True, attention: str = "auto", dtype: torch.dtype = torch.float32):
    model = load_causal_lm(folder, dtype=dtype, attn_implementation=attention, device="cpu")
    return model, plan_forward(model, packing_samples=packing_samples, device=CPU)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma3", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_common_models_run_packed_with_logprobs_inside_the_head(
    tmp_path: Path, architecture: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_moe(tmp_path) if architecture == "moe" else make_tiny_model(tmp_path, architecture)
    with caplog.at_level(logging.WARNING, logger="openrlhf"):
        assert _plan(folder, dtype=dtype)[1] == ForwardPlan(packed=True, in_head=True)
    assert not caplog.records


def _single_row_logprobs(folder: Path, row: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    log_softmax = model(row[None]).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), log_softmax.gather(-1, row[1:, None])[:, 0]])


@pytest.mark.parametrize(
    ("architecture", "changes", "plan", "said"),
    [
        ("gemma2", {}, ForwardPlan(packed=True, in_head=False), "changes its logits"),
        # So weak that a random model's log-probs hardly show it; a trained one's would.
        ("gemma2", {"final_logit_softcapping": 30.0}, ForwardPlan(packed=True, in_head=False), "changes its logits"),
        ("cohere", {}, ForwardPlan(packed=True, in_head=False), "changes its logits"),
        ("mamba", {}, ForwardPlan(packed=False, in_head=True), "every row is padded"),
    ],
)
def test_a_model_that_needs_another_way_gets_it_says_so_and_is_right(
    tmp_path: Path, architecture: str, changes: dict, plan: ForwardPlan, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_model(tmp_path, architecture, **changes)
    with caplog.at_level(logging.WARNING, logger="openrlhf"):
        model, found = _plan(folder)
    assert found == plan
    assert said in caplog.text
    rows = [torch.arange(5, 18), torch.arange(40, 49)]
    scores = score_tokens(model, pack_rows(rows, [torch.arange(row.numel()) > 0 for row in rows]), plan=found)
    expected = torch.cat([_single_row_logprobs(folder, row) for row in rows])
    torch.testing.assert_close(scores.logprobs, expected, rtol=0, atol=1e-5)


def test_a_kernel_that_lets_rows_see_each_other_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf.models import forward

    monkeypatch.setattr(forward, "packing_arguments", lambda *_: {})
    assert not _plan(make_tiny_model(tmp_path, "qwen2"))[1].packed


def test_no_packing_samples_runs_padded(tmp_path: Path) -> None:
    assert _plan(make_tiny_model(tmp_path, "qwen2"), packing_samples=False)[1] == ForwardPlan(packed=False)


def _make_encoder(folder: Path, kind: str, *, is_decoder: bool) -> Path:
    config = AutoConfig.for_model(
        kind,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        is_decoder=is_decoder,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["auto", "eager", "sdpa"])
def test_an_encoder_is_refused_by_name_under_every_kernel_and_the_same_as_a_decoder_is_not(
    tmp_path: Path, kind: str, dtype: torch.dtype, attention: str
) -> None:
    folder = _make_encoder(tmp_path / "encoder", kind, is_decoder=False)
    with pytest.raises(ConfigError, match=f"{folder} .*is no causal language model: .* moved the log-probs"):
        _plan(folder, dtype=dtype, attention=attention)
    _plan(_make_encoder(tmp_path / "decoder", kind, is_decoder=True), dtype=dtype, attention=attention)


def test_a_decoder_whose_config_lets_it_look_ahead_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "gemma3", use_bidirectional_attention=True)
    with pytest.raises(ConfigError, match="is no causal language model"):
        _plan(folder)


def test_the_check_leaves_the_kernel_as_it_was_chosen(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2")
    before = load_causal_lm(folder, dtype=torch.float32, device="cpu").config._attn_implementation
    assert _plan(folder)[0].config._attn_implementation == before


def test_a_model_with_a_weight_that_is_no_number_is_refused_by_the_weights_name(tmp_path: Path) -> None:
    model = load_causal_lm(make_tiny_model(tmp_path, "qwen2"), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    said = "answers with values that are no numbers: model.layers.0.mlp.down_proj.weight of its weights hold some"
    with pytest.raises(ConfigError, match=said):
        plan_forward(model, packing_samples=True, device=CPU)

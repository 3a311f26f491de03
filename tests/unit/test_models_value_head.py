"""Scalar heads: found or refused by name, and one score per token that plain transformers gives as well."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from openrlhf.config import ConfigError
from openrlhf.data.packed_batch import PackedBatch, empty_batch, pack_rows
from openrlhf.models.forward import ForwardPlan, last_token_scores, score_hidden, score_values, state_values
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.probe import plan_forward
from openrlhf.models.value_head import HeadSpec
from tests.tiny_models import END_ID, PAD_ID, make_tiny_model, make_tiny_moe

CPU = torch.device("cpu")
PACKED, PADDED = ForwardPlan(packed=True, in_head=False), ForwardPlan(packed=False, in_head=False)
LENGTHS = (17, 4, 1, 11)
HIDDEN = 64


def with_head(folder: Path, name: str = "score", architecture: str = "qwen2", **config: Any) -> Path:
    """A tiny reward model whose files call the head ``name``; further entries of its config."""
    make_tiny_model(folder, architecture, tie=architecture != "llama")
    weight = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(5))
    return changed(folder, {f"{name}.weight": weight}, **config)


def changed(folder: Path, weights: dict[str, torch.Tensor], **config: Any) -> Path:
    """A saved model with further or other weights and config entries."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **weights}, path, metadata={"format": "pt"})
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, **config}))
    return folder


def _load(folder: Path, dtype: torch.dtype = torch.float32, attention: str = "auto", **head: Any) -> PreTrainedModel:
    return load_causal_lm(
        folder, dtype=dtype, attn_implementation=attention, device="cpu", head=HeadSpec(**{"seed": 1, **head})
    )


def _batch(lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 512, (length,), generator=generator) for length in lengths]
    return pack_rows(rows, [torch.arange(length) >= 2 for length in lengths])


def _gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _prefix_scores(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """What plain transformers gives each token as the last one of a row."""
    return torch.stack(
        [
            model(row[None, : stop + 1]).logits[0, 0]
            for row in batch.tokens.split(batch.lengths.tolist())
            for stop in range(row.numel())
        ]
    )


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma3", "gemma2"])
def test_packed_and_padded_rows_give_the_scores_and_gradients_of_plain_transformers(
    tmp_path: Path, architecture: str
) -> None:
    folder = with_head(tmp_path, architecture=architecture)
    plain = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    batch = _batch()
    weights = torch.linspace(-1, 2, batch.tokens.numel())
    expected = _prefix_scores(plain, batch)
    wanted = _gradients(plain, (expected * weights).sum())
    for attention in ("auto", "eager"):
        ours = _load(folder, attention=attention)
        for plan in (PACKED, PADDED):
            raw = score_values(ours, batch, plan)
            assert raw.dtype == torch.float32 and raw.shape == batch.tokens.shape
            torch.testing.assert_close(raw, expected, rtol=1e-5, atol=1e-5)
            for name, gradient in _gradients(ours, (raw * weights).sum()).items():
                scale = wanted[name].abs().max().item()
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5 * scale)
    bf16 = score_values(_load(folder, torch.bfloat16), batch, PACKED)
    assert bf16.dtype == torch.float32
    assert (bf16 - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_values_stand_at_the_token_whose_state_they_judge_and_scores_at_the_last_token() -> None:
    raw = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True)
    bounds = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    values = state_values(raw, bounds)
    assert values.tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 5.0]
    values.sum().backward()
    assert raw.grad.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    scores = last_token_scores(raw, bounds)
    assert scores.tolist() == [3.0, 4.0, 6.0]
    raw.grad = None
    scores.sum().backward()
    assert raw.grad.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]


def test_what_stands_at_the_last_token_of_a_row_reaches_no_value_of_the_next_not_even_nan() -> None:
    raw = torch.tensor([1.0, float("nan"), 3.0, float("nan")])
    assert state_values(raw, torch.tensor([0, 2, 4])).tolist() == [0.0, 1.0, 0.0, 3.0]


def test_the_head_of_a_bf16_model_is_computed_in_float32(tmp_path: Path) -> None:
    model = _load(make_tiny_model(tmp_path / "model", "qwen2"), torch.bfloat16, fresh=True, seed=2)
    batch = pack_rows([torch.arange(3, 40)], [torch.arange(37) >= 2])
    scores, hidden = score_values(model, batch, PACKED), score_hidden(model, batch, PACKED)
    exact = hidden.double() @ model.score.weight[0].double()
    # As many bits as a float32 has, where a bf16 head would leave eight.
    assert torch.allclose(scores.double(), exact, rtol=1e-5, atol=1e-7)
    assert not torch.equal(scores, scores.bfloat16().float())


def test_a_row_without_any_token_has_no_score() -> None:
    with pytest.raises(ValueError, match="without any token"):
        last_token_scores(torch.zeros(2), torch.tensor([0, 2, 2]))


@pytest.mark.parametrize("plan", [PACKED, PADDED])
def test_an_empty_micro_batch_keeps_a_gradient_path_to_every_weight(tmp_path: Path, plan: ForwardPlan) -> None:
    model = _load(with_head(tmp_path))
    batch = empty_batch(pad_token_id=PAD_ID)
    values = state_values(score_values(model, batch, plan), batch.cu_seqlens)
    gradients = _gradients(model, torch.where(batch.action_mask, values, 0.0).sum())
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("name", "prefix", "config"),
    [
        ("score", "score", {}),
        ("value_head", "value_head", {}),
        ("value_head", "score", {"value_head_prefix": "value_head"}),
        ("score", "value_head", {}),
    ],
)
@pytest.mark.parametrize("kind", ["single", "sharded", "pickled"])
def test_a_head_is_found_under_the_flag_under_the_configs_name_and_as_score(
    tmp_path: Path, name: str, prefix: str, config: dict[str, str], kind: str
) -> None:
    folder = with_head(tmp_path, name, **config)
    weights = load_file(folder / "model.safetensors")
    if kind == "pickled":
        torch.save(weights, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    elif kind == "sharded":
        (folder / "model.safetensors").unlink()
        files = {key: f"model-{1 + (name in key)}.safetensors" for key in weights}
        for file in set(files.values()):
            part = {key: tensor for key, tensor in weights.items() if files[key] == file}
            save_file(part, folder / file, metadata={"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    model = _load(folder, prefix=prefix)
    assert torch.equal(model.score.weight, weights[f"{name}.weight"])
    assert model.config.value_head_prefix == "score"
    exported = tmp_path / "exported"
    model.save_pretrained(exported)
    assert {"score.weight"} == {key for key in load_file(exported / "model.safetensors") if "model" not in key}
    batch = _batch()
    again = _load(exported, prefix=prefix)
    assert torch.equal(score_values(again, batch), score_values(model, batch))


def test_of_two_heads_the_one_that_the_flag_names_is_taken(tmp_path: Path) -> None:
    folder = with_head(tmp_path, "value_head")
    other = torch.ones(1, HIDDEN)
    changed(folder, {"score.weight": other})
    assert torch.equal(_load(folder, prefix="score").score.weight, other)
    assert not torch.equal(_load(folder, prefix="value_head").score.weight, other)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({}, "has no scalar head (neither value_head.weight nor score.weight): name its head with"),
        ({"value_head.weight": torch.zeros(2, HIDDEN)}, "value_head.weight of shape [2, 64]"),
        ({"value_head.weight": torch.zeros(1, HIDDEN // 2)}, "value_head.weight of shape [1, 32]"),
        ({"value_head.weight": torch.zeros(HIDDEN)}, "value_head.weight of shape [64]"),
        ({"score.weight": torch.zeros(3, HIDDEN)}, "score.weight of shape [3, 64]"),
        (
            {"value_head.0.weight": torch.zeros(8, HIDDEN), "value_head.2.weight": torch.zeros(1, 8)},
            "value_head.0.weight of shape [8, 64] and 1 more weights under this name, which is not a scalar head",
        ),
        ({"value_head.bias": torch.zeros(1)}, "value_head.bias of shape [1]"),
        (
            {"value_head.weight": torch.zeros(1, HIDDEN), "value_head.bias": torch.ones(1)},
            "the head of {folder} has a bias",
        ),
    ],
)
def test_a_head_that_is_missing_or_of_another_shape_is_refused_and_never_drawn_at_random(
    tmp_path: Path, weights: dict[str, torch.Tensor], said: str
) -> None:
    # RB36
    folder = changed(make_tiny_model(tmp_path), weights)
    with pytest.raises(ConfigError) as caught:
        _load(folder, prefix="value_head")
    message = str(caught.value)
    assert said.format(folder=folder) in message and str(folder) in message and "\n" not in message
    assert "--ds.value_head_prefix" in message


def test_a_bias_of_zero_changes_no_score_and_is_left_out(tmp_path: Path) -> None:
    folder = changed(with_head(tmp_path, "value_head"), {"value_head.bias": torch.zeros(1)})
    assert "score.bias" not in _load(folder, prefix="value_head").state_dict()


def test_a_prefix_that_names_something_else_of_the_model_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", tie=False)
    with pytest.raises(ConfigError, match=r"--ds.value_head_prefix lm_head: .*lm_head.weight of shape \[512, 64\]"):
        _load(folder, prefix="lm_head")
    with pytest.raises(ConfigError, match="--ds.value_head_prefix model: .* more weights under this name"):
        _load(folder, prefix="model")


def test_missing_or_misshapen_weights_of_the_body_are_named_with_a_head_as_well(tmp_path: Path) -> None:
    folder = with_head(tmp_path / "model")
    name = "model.layers.0.mlp.down_proj.weight"
    weights = load_file(folder / "model.safetensors")
    for other in (None, torch.zeros(3, 3)):
        kept = {key: value for key, value in (weights | {name: other}).items() if value is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        for fresh in (False, True):
            with pytest.raises(ConfigError, match=f"lack weights .*{name}"):
                _load(folder, fresh=fresh)


def test_a_fresh_head_is_small_not_zero_and_follows_its_seed_alone(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    torch.manual_seed(1)
    first = _load(folder, fresh=True, seed=3)
    torch.manual_seed(2)
    second = _load(folder, fresh=True, seed=3)
    assert torch.equal(first.score.weight, second.score.weight)
    assert not torch.equal(first.score.weight, _load(folder, fresh=True, seed=4).score.weight)
    half = _load(folder, torch.bfloat16, fresh=True, seed=3)
    assert torch.equal(half.score.weight, first.score.weight.bfloat16())
    assert 0.7 < first.score.weight.std() * (HIDDEN + 1) < 1.3
    raw = score_values(first, _batch())
    assert 0 < raw.std() < 0.5
    gradients = _gradients(first, raw.square().sum())
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def test_a_fresh_head_takes_the_place_of_one_that_is_there_whatever_its_shape(tmp_path: Path) -> None:
    folder = with_head(tmp_path / "one")
    assert not torch.equal(_load(folder, fresh=True).score.weight, _load(folder).score.weight)
    labels = changed(make_tiny_model(tmp_path / "two"), {"score.weight": torch.ones(2, HIDDEN)}, num_labels=2)
    assert _load(labels, fresh=True).score.weight.shape == (1, HIDDEN)


@pytest.mark.parametrize(
    ("entries", "mean", "std"), [({}, 0.0, 1.0), ({"mean": -0.25, "std": 3}, -0.25, 3.0), ({"mean": 2}, 2.0, 1.0)]
)
def test_reward_statistics_are_read_from_the_config(
    tmp_path: Path, entries: dict[str, Any], mean: float, std: float
) -> None:
    config = _load(with_head(tmp_path, **entries)).config
    assert (config.mean, config.std) == (mean, std)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"mean": "high"}, "gives 'high' as the mean"),
        ({"std": 0.0}, "gives 0.0 as the std of the rewards; it has to be a number above 0"),
        ({"std": -1.0}, "gives -1.0 as the std"),
        ({"std": float("nan")}, "gives nan as the std"),
        ({"mean": True}, "gives True as the mean"),
    ],
)
def test_reward_statistics_that_are_no_numbers_are_refused(tmp_path: Path, entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="config.json of") as caught:
        _load(with_head(tmp_path, **entries))
    assert said in str(caught.value)


def test_a_family_without_a_scalar_head_and_an_encoder_with_another_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds a mamba, which transformers cannot run as a model with a scalar head"):
        _load(make_tiny_model(tmp_path / "mamba", "mamba"), fresh=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", vocab_size=64, **sizes))
    encoder.save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path / "bert", fresh=True)
    assert "becomes a BertForSequenceClassification, whose head is not one linear layer" in str(caught.value)


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma3", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fresh", [False, True])
def test_common_models_with_a_head_run_packed(
    tmp_path: Path, architecture: str, dtype: torch.dtype, fresh: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if architecture == "moe":
        folder = changed(make_tiny_moe(tmp_path), {"score.weight": 10 * torch.ones(1, HIDDEN)})
    else:
        folder = with_head(tmp_path, architecture=architecture)
    with caplog.at_level(logging.WARNING, logger="openrlhf"):
        model = _load(folder, dtype, fresh=fresh)
        assert plan_forward(model, packing_samples=True, device=CPU) == PACKED
    assert not [record for record in caplog.records if record.name.startswith("openrlhf")]
    assert "LOAD REPORT" not in caplog.text


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_lets_rows_see_each_other_is_found_out_whatever_the_head_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool, dtype: torch.dtype
) -> None:
    from openrlhf.models import forward

    monkeypatch.setattr(forward, "packing_arguments", lambda *_: {})
    model = _load(with_head(tmp_path), dtype, fresh=fresh)
    assert plan_forward(model, packing_samples=True, device=CPU) == PADDED


def test_a_model_that_changes_scores_around_its_head_is_refused(tmp_path: Path) -> None:
    model = _load(with_head(tmp_path))
    model.score.register_forward_hook(lambda module, inputs, output: output)
    assert plan_forward(model, packing_samples=True, device=CPU) == PACKED
    plain = model.forward.__self__.plain_forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        out.logits = 2 * out.logits
        return out

    model.forward.__self__.plain_forward = doubled
    with pytest.raises(ConfigError, match="changes scores around its head"):
        plan_forward(model, packing_samples=True, device=CPU)


def test_a_language_model_has_no_values(tmp_path: Path) -> None:
    model = load_causal_lm(make_tiny_model(tmp_path), dtype=torch.float32, device="cpu")
    with pytest.raises(TypeError, match="without a scalar head"):
        score_values(model, _batch())


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_export_scores_padded_batches_alike_from_both_sides_when_only_the_tokenizer_knew_the_pad_token(
    tmp_path: Path, side: str
) -> None:
    folder = with_head(tmp_path / "source", pad_token_id=None)
    model = _load(folder, pad_token_id=PAD_ID)
    # A padding index would take the gradient from that token's embedding.
    assert model.get_input_embeddings().padding_idx is None
    model.save_pretrained(tmp_path / "out")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert plain.config.num_labels == 1 and plain.config.architectures == ["Qwen2ForSequenceClassification"]
    batch = _batch()
    rows, longest = batch.tokens.split(batch.lengths.tolist()), max(LENGTHS)
    pads = [torch.full((longest - row.numel(),), PAD_ID) for row in rows]
    pairs = zip(pads, rows, strict=True)
    ids = torch.stack([torch.cat([pad, row] if side == "left" else [row, pad]) for pad, row in pairs])
    scores = plain(ids, attention_mask=(ids != PAD_ID).long()).logits[:, 0]
    ours = last_token_scores(score_values(model, batch), batch.cu_seqlens)
    torch.testing.assert_close(scores, ours, rtol=1e-5, atol=1e-5)


def test_a_model_without_any_pad_token_says_that_its_export_scores_single_rows_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="openrlhf"):
        _load(with_head(tmp_path, pad_token_id=None))
    assert "names no pad token" in caplog.text


def test_a_pad_token_that_also_ends_rows_is_said_to_move_the_score_of_an_export(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_head(tmp_path, pad_token_id=END_ID)
    with caplog.at_level(logging.WARNING, logger="openrlhf"):
        model = _load(folder)
        _load(folder, pad_token_id=PAD_ID)
    assert caplog.text.count("scores an export one token earlier") == 1
    # As it says: the score that transformers gives is the one before the EOS.
    row = torch.tensor([5, 6, 7, END_ID])
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    raw = score_values(model, pack_rows([row], [torch.arange(4) > 0]))
    torch.testing.assert_close(plain(row[None]).logits[0, 0], raw[2])

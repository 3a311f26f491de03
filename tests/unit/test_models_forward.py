"""Packed rows, padded rows and single rows give the same log-probs and gradients, on every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf.data.packed_batch import PackedBatch, empty_batch, pack_rows
from openrlhf.models.forward import ForwardPlan, score_tokens
from openrlhf.models.loading import load_causal_lm
from tests.tiny_models import make_tiny_model

PACKED, PADDED = ForwardPlan(packed=True), ForwardPlan(packed=False)
# Longer and shorter than the sliding windows; one row of one token.
LENGTHS = (17, 4, 1, 11)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    names = ("qwen2", "qwen3", "llama", "mistral", "gemma3")
    return {name: make_tiny_model(root / name, name, tie=name != "llama") for name in names}


def _load(folder: Path, attention: str = "auto", **options: bool) -> PreTrainedModel:
    return load_causal_lm(folder, dtype=torch.float32, attn_implementation=attention, device="cpu", **options)


def _batch(lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 512, (length,), generator=generator) for length in lengths]
    # Prompt, answer, an observation that is not trained, answer.
    masks = [(torch.arange(length) >= 2) & (torch.arange(length) % 7 != 5) for length in lengths]
    return pack_rows(rows, masks)


def _row_by_row(model: PreTrainedModel, batch: PackedBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropies = [], []
    for row, mask in zip(
        batch.tokens.split(batch.lengths.tolist()), batch.action_mask.split(batch.lengths.tolist()), strict=True
    ):
        log_softmax = (model(row[None]).logits[0, :-1] / temperature).log_softmax(-1)
        chosen = torch.cat([torch.zeros(1), log_softmax.gather(-1, row[1:, None])[:, 0]])
        entropy = torch.cat([torch.zeros(1), -(log_softmax.exp() * log_softmax).sum(-1)])
        logprobs.append(torch.where(mask, chosen, 0.0))
        entropies.append(torch.where(mask, entropy, 0.0))
    return torch.cat(logprobs), torch.cat(entropies)


def _gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "mistral", "gemma3"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_padded_and_single_rows_agree_in_values_and_gradients(
    folders: dict[str, Path], name: str, temperature: float
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32, attn_implementation="eager")
    batch = _batch()
    weights = torch.linspace(-1, 2, batch.tokens.numel())
    expected = _row_by_row(plain, batch, temperature)
    wanted = _gradients(plain, (expected[0] * weights + 0.1 * expected[1]).sum())
    ours = {attention: _load(folders[name], attention) for attention in ("auto", "sdpa", "eager")}
    assert ours["auto"].config._attn_implementation == "segment_sdpa"
    for attention, plan in (
        ("auto", PACKED),
        ("auto", PADDED),
        ("auto", ForwardPlan(in_head=False)),
        ("auto", ForwardPlan(packed=False, in_head=False)),
        ("sdpa", PACKED),
        ("eager", PACKED),
        ("eager", PADDED),
    ):
        found = score_tokens(ours[attention], batch, temperature=temperature, entropy=True, plan=plan)
        assert found.logprobs.dtype == torch.float32 and found.logprobs.shape == batch.tokens.shape
        torch.testing.assert_close(found.logprobs, expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(found.entropy, expected[1], rtol=0, atol=1e-5)
        gradients = _gradients(ours[attention], (found.logprobs * weights + 0.1 * found.entropy).sum())
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[parameter], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(folders: dict[str, Path], reentrant: bool) -> None:
    batch = _batch()
    model = _load(folders["mistral"])
    wanted = _gradients(model, score_tokens(model, batch).logprobs.sum())
    model = _load(folders["mistral"], gradient_checkpointing=True, gradient_checkpointing_reentrant=reentrant).train()
    assert model.is_gradient_checkpointing
    layer = model.model.layers[0]
    # Dropout is off, so no state of generators has to be saved and put back.
    assert layer._gradient_checkpointing_func.keywords == {"use_reentrant": reentrant, "preserve_rng_state": False}
    for name, gradient in _gradients(model, score_tokens(model, batch).logprobs.sum()).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", [PACKED, PADDED])
def test_a_rows_logprobs_do_not_depend_on_the_rows_beside_it(folders: dict[str, Path], plan: ForwardPlan) -> None:
    # RB18: positions start at each row's first token, however much padding the longest row costs.
    model = _load(folders["qwen3"])
    batch = _batch((5, 60, 23))
    together = score_tokens(model, batch, plan=plan).logprobs.split(batch.lengths.tolist())
    for row, mask, found in zip(
        batch.tokens.split(batch.lengths.tolist()),
        batch.action_mask.split(batch.lengths.tolist()),
        together,
        strict=True,
    ):
        alone = score_tokens(model, pack_rows([row], [mask]), plan=plan).logprobs
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("plan", [PACKED, PADDED])
def test_a_pad_row_changes_nothing(folders: dict[str, Path], plan: ForwardPlan) -> None:
    model = _load(folders["qwen2"])
    batch = _batch((9, 6))
    padded = PackedBatch(
        tokens=torch.cat([batch.tokens, torch.zeros(3, dtype=torch.long)]),
        cu_seqlens=torch.cat([batch.cu_seqlens, torch.tensor([18], dtype=torch.int32)]),
        action_mask=torch.cat([batch.action_mask, torch.zeros(3, dtype=torch.bool)]),
        pad_rows=1,
    )
    found = score_tokens(model, padded, plan=plan).logprobs
    torch.testing.assert_close(found[:15], score_tokens(model, batch, plan=plan).logprobs, rtol=0, atol=2e-6)
    assert (found[15:] == 0).all()


@pytest.mark.parametrize("plan", [PACKED, PADDED, ForwardPlan(in_head=False)])
def test_a_batch_with_nothing_trained_gives_zero_and_a_zero_gradient_for_every_weight(
    folders: dict[str, Path], plan: ForwardPlan
) -> None:
    model = _load(folders["llama"])
    scores = score_tokens(model, empty_batch(pad_token_id=0), entropy=True, plan=plan)
    assert scores.logprobs.tolist() == [0.0, 0.0] and scores.entropy.tolist() == [0.0, 0.0]
    gradients = _gradients(model, scores.logprobs.sum() + scores.entropy.sum())
    assert len(gradients) == len(list(model.parameters()))
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_training_mode_gives_the_logprobs_of_evaluation_mode(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", attention_dropout=0.5)
    model = _load(folder)
    batch = _batch()
    torch.testing.assert_close(
        score_tokens(model.train(), batch).logprobs, score_tokens(model.eval(), batch).logprobs, rtol=0, atol=0
    )

"""Adapters on the DeepSpeed backend: against plain peft, after a stop, over 4-bit weights, and switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config import ConfigError, LoraConfig
from openrlhf.models.value_head import HeadSpec
from tests.integration import backend_worker as worker
from tests.tiny_models import make_tiny_model

STEPS = range(worker.STEPS)
LORA = LoraConfig(rank=4, alpha=8)
SEED = 42


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    policy = make_tiny_model(root / "policy", "qwen2", tie=True)
    torch.manual_seed(6)
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(root / "critic")
    other = make_tiny_model(root / "other", "qwen2", tie=True, seed=1)
    return {"policy": policy, "critic": root / "critic", "other": other}


def _plain_peft(model: Any, task: str) -> Any:
    torch.manual_seed(SEED)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type=task)
    )


class _Policy(AutoModelForCausalLM):
    @classmethod
    def from_pretrained(cls, folder: Path, **options: Any) -> Any:
        return _plain_peft(AutoModelForCausalLM.from_pretrained(folder, **options), "CAUSAL_LM")


class _Critic(AutoModelForSequenceClassification):
    @classmethod
    def from_pretrained(cls, folder: Path, **options: Any) -> Any:
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **options)
        # A row alone has no padding that would have to be found.
        model.config.pad_token_id = None
        return _plain_peft(model, "SEQ_CLS")


def _row_score_loss(model: Any, row: torch.Tensor, mask: torch.Tensor, index: int) -> torch.Tensor:
    return (model(row[None]).logits[0, 0] - 1).square()


def _batch_score_loss(backend: Any, batch: Any, tokens: int, index: int) -> torch.Tensor:
    scores = backend.row_scores(batch)
    return (scores[: batch.num_rows - batch.pad_rows] - 1).square().sum() / tokens


def _as_saved(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What of plain peft's weights is trained, under the names that files give it."""
    kept = {name: tensor for name, tensor in weights.items() if ".lora_" in name or "modules_to_save" in name}
    return {name.replace(".modules_to_save.", ".").replace(".default.", "."): item for name, item in kept.items()}


def _merged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole model, from plain peft's weights and the definition."""
    found = {}
    for name, tensor in weights.items():
        if ".lora_" in name or "original_module" in name:
            continue
        plain = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        adapter = name.replace(".base_layer.weight", "")
        if f"{adapter}.lora_A.default.weight" in weights:
            first, second = (weights[f"{adapter}.lora_{which}.default.weight"] for which in "AB")
            tensor = tensor + LORA.alpha / LORA.rank * second @ first
        found[plain.replace(".base_layer.", ".")] = tensor
    return found


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], case: str) -> None:
    assert sorted(found) == sorted(expected), case
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() <= 1e-6, f"{case}: {name}"


def _make(folder: Path, stage: int, **options: Any) -> Any:
    return worker.make_backend(folder, stage, lora=LORA, seed=SEED, **options)


def _train_every_way(folders: dict[str, Path], expected: dict[str, dict[str, Any]], out: Path) -> None:
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("policy", 0, {}),
        ("policy", 2, {}),
        ("policy", 3, {"gradient_checkpointing": True}),
        ("critic", 3, {}),
    ]
    if torch.distributed.get_world_size() == 1:
        cases.append(("policy", 2, {"gradient_checkpointing": True, "gradient_checkpointing_reentrant": True}))
    else:
        cases += [("policy", 1, {"packing_samples": False}), ("policy", 3, {"one_batch": True}), ("critic", 2, {})]
    for number, (kind, stage, options) in enumerate(cases):
        case = f"{kind}, stage {stage}, {options}"
        one_batch = options.pop("one_batch", False)
        critic = kind == "critic"
        if critic:
            options["head"] = HeadSpec()
        backend = _make(folders[kind], stage, ema=True, **options)
        loss = _batch_score_loss if critic else worker.logprob_loss
        found = worker.train_with_backend(backend, STEPS, batch_loss=loss, ema=True, one_batch=one_batch)
        for key in ("losses", "norms"):
            assert found[key] == pytest.approx(expected[kind][key], rel=1e-5, abs=1e-6), f"{case}: {key}"
        assert backend.unmoved_parameters() == [], case
        _assert_close(worker.full_weights(backend), _merged(expected[kind]["weights"]), case)
        for ema, wanted in ((False, "weights"), (True, "average")):
            folder = out / f"{number}{wanted}"
            backend.save_hf(folder, ema=ema)
            if backend.rank == 0:
                saved = load_file(folder / "adapter_model.safetensors")
                _assert_close(saved, _as_saved(expected[kind][wanted]), f"{wanted} of {case}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_take_the_steps_of_plain_peft_and_so_do_their_average_and_the_merged_weights(
    models: dict[str, Path], tmp_path: Path, ranks: int
) -> None:
    expected = {
        "policy": worker.plain_training(models["policy"], auto_class=_Policy),
        "critic": worker.plain_training(models["critic"], auto_class=_Critic, row_loss=_row_score_loss),
    }
    assert all(norm > 0.5 for norm in expected["critic"]["norms"][:1]), "the clip has to be active"
    worker.run_ranks(_train_every_way, ranks, models, expected, tmp_path)


def _stop_and_resume(folders: dict[str, Path], out: Path) -> None:
    cases: list[tuple[int, dict[str, Any]]] = [(0, {}), (2, {"dtype": "bf16"}), (3, {})]
    for number, (stage, options) in enumerate(cases):
        state = out / str(number) / "global_step2"
        whole = _make(folders["policy"], stage, ema=True, **options)
        worker.train_with_backend(whole, range(2), ema=True)
        whole.save_checkpoint(state, {"step": 2})
        went_on = worker.train_with_backend(whole, range(2, 3), ema=True)
        resumed = _make(folders["policy"], stage, ema=True, **options)
        assert resumed.load_checkpoint(state) == {"step": 2}
        assert worker.train_with_backend(resumed, range(2, 3), ema=True) == went_on, options
        weights = worker.full_weights(whole)
        for name, tensor in worker.full_weights(resumed).items():
            assert torch.equal(tensor, weights[name]), f"stage {stage}, {options}: {name}"
        if stage == 0:
            held = torch.load(state / "state" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
            assert len(held) == 28 and all(".lora_" in name for name in held)
        other = _make(folders["other"], stage, ema=True, **options)
        with pytest.raises(ConfigError, match="holds adapters of another model"):
            other.load_checkpoint(state)
    plain = worker.make_backend(folders["policy"], 0, seed=SEED)
    with pytest.raises(ConfigError, match="holds adapters and this run trains the whole model"):
        plain.load_checkpoint(out / "0" / "global_step2")
    plain.save_checkpoint(out / "plain" / "global_step1", {"step": 1})
    with pytest.raises(ConfigError, match="holds the whole model and this run trains adapters"):
        _make(folders["policy"], 0).load_checkpoint(out / "plain" / "global_step1")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_with_adapters_resumes_bit_for_bit_over_the_weights_that_it_left_out(
    models: dict[str, Path], tmp_path: Path, ranks: int
) -> None:
    worker.run_ranks(_stop_and_resume, ranks, models, tmp_path)


def _ask_below(folder: Path) -> None:
    batch = worker.micro_batches(9)[0]
    for stage in (2, 3):
        backend = _make(folder, stage, gradient_checkpointing=True)
        with torch.no_grad():
            start = backend.forward(batch).logprobs
            assert torch.equal(backend.forward(batch, adapters=False).logprobs, start)
        worker.train_with_backend(backend, range(2))
        with torch.no_grad():
            assert torch.equal(backend.forward(batch, adapters=False).logprobs, start)
            assert not torch.allclose(backend.forward(batch).logprobs, start, atol=1e-4)
        # Asking between the micro-batches of a step changes nothing about the step.
        plain = _make(folder, stage, gradient_checkpointing=True)
        worker.train_with_backend(plain, range(2))

        def loss_after_asking(backend: Any, batch: Any, tokens: int, index: int) -> torch.Tensor:
            with torch.no_grad():
                backend.forward(batch, adapters=False)
            return worker.logprob_loss(backend, batch, tokens, index)

        found = worker.train_with_backend(backend, range(2, 3), batch_loss=loss_after_asking)
        assert found == worker.train_with_backend(plain, range(2, 3))


def test_the_model_below_adapters_is_asked_between_micro_batches_and_stays_the_one_that_was_loaded(
    models: dict[str, Path],
) -> None:
    worker.run_ranks(_ask_below, 2, models["policy"])

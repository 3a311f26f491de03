"""The attention of packed rows, and how a kernel is chosen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf.config import ConfigError, kernels
from openrlhf.data.packed_batch import pack_rows
from openrlhf.models import attention
from openrlhf.models.attention import choose_attention, segment_attention
from openrlhf.models.forward import score_tokens
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.probe import plan_forward
from tests.tiny_models import tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _choose(
    architecture: str,
    requested: str = "auto",
    device: torch.device = CPU,
    dtype: torch.dtype = torch.bfloat16,
    **changes: object,
) -> str:
    config = tiny_config(architecture, **changes)
    return choose_attention(config, AutoModelForCausalLM._model_mapping[type(config)], requested, device, dtype)


def _eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], window: int | None):
    """Softmax over an explicit mask: same row, not later, inside the window."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    back = place[:, None] - place
    mask = (row[:, None] == row) & (back >= 0) & (back < (window or sum(lengths)))
    scores = (query @ key.transpose(-1, -2) * 0.3).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


# Rows of nearly equal length go through one padded call, others one by one.
@pytest.mark.parametrize("lengths", [[9], [7, 8, 7], [20, 1, 3, 6], [1, 1]])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_segment_attention_equals_attention_under_an_explicit_mask(
    lengths: list[int], window: int | None, key_heads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    states = [
        torch.randn(1, heads, total, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]
    found, _ = segment_attention(
        torch.nn.Module(), *states, None, scaling=0.3, sliding_window=window, segment_lengths=lengths
    )
    expected = _eager(*states, lengths, window)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad((found * upstream).sum(), states), torch.autograd.grad((expected * upstream).sum(), states)
    )


def test_what_segment_attention_cannot_compute_is_refused() -> None:
    states = [torch.randn(1, 2, 5, 8)] * 3
    with pytest.raises(ConfigError, match="softcap"):
        segment_attention(torch.nn.Module(), *states, None, softcap=50.0)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma3", "cohere", "qwen2_moe"])
def test_auto_takes_segments_on_the_cpu_where_rows_and_windows_are_all_there_is(architecture: str) -> None:
    assert _choose(architecture) == "segment_sdpa"


def test_auto_takes_no_kernel_that_would_leave_something_out() -> None:
    # Gemma 2 caps its attention logits, which SDPA would silently not do.
    assert _choose("gemma2") == "eager"
    assert _choose("gemma2", attn_logit_softcapping=None) == "segment_sdpa"
    assert _choose("llama", device=CUDA) == "sdpa"


def test_auto_takes_the_newest_flash_attention_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"flash_attn"}
    monkeypatch.setattr(attention, "find_spec", lambda name: SimpleNamespace() if name in installed else None)
    assert _choose("llama", device=CUDA) == "flash_attention_2"
    installed.add("flash_attn_interface")
    assert _choose("llama", device=CUDA) == "flash_attention_3"
    assert _choose("llama", device=CUDA, dtype=torch.float16) == "flash_attention_3"
    assert _choose("llama", device=CPU) == "segment_sdpa"


def test_auto_takes_no_flash_attention_for_32_bit_weights_and_refuses_it_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (attention, kernels):
        monkeypatch.setattr(module, "find_spec", lambda name: SimpleNamespace())
    assert _choose("llama", device=CUDA, dtype=torch.float32) == "sdpa"
    assert _choose("llama", "flash_attention_2", CUDA) == "flash_attention_2"
    with pytest.raises(ConfigError, match="flash_attention_2 computes in 16 bits alone"):
        _choose("llama", "flash_attention_2", CUDA, torch.float32)


def test_a_kernel_asked_for_by_name_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="attn_implementation flash_attention_2 needs a GPU"):
        _choose("llama", "flash_attention_2")
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="flash_attn, which is not installed"):
        _choose("llama", "flash_attention_2", CUDA)
    with pytest.raises(ConfigError, match="nonsense"):
        _choose("llama", "nonsense")
    assert _choose("llama", "eager") == "eager"


@pytest.mark.parametrize(("family", "changes"), [("falcon", {}), ("stablelm", {"num_key_value_heads": 2})])
def test_a_family_with_a_kernel_table_of_its_own_is_given_one_that_stands_in_it(
    tmp_path: Path, family: str, changes: dict[str, int]
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100, **changes}
    config = AutoConfig.for_model(family, bos_token_id=1, eos_token_id=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, dtype=torch.float32, device="cpu")
    assert model.config._attn_implementation == "sdpa"
    plan = plan_forward(model, packing_samples=True, device=CPU)
    rows = [torch.arange(5, 18), torch.arange(40, 49)]
    packed = score_tokens(model, pack_rows(rows, [torch.arange(row.numel()) > 0 for row in rows]), plan=plan).logprobs
    for row, found in zip(rows, packed.split([13, 9]), strict=True):
        expected = model(row[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None])[:, 0]
        torch.testing.assert_close(found[1:], expected, rtol=0, atol=1e-5)

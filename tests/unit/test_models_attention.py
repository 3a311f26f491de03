"""The attention of packed rows, and how a kernel is chosen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from openrlhf.config import ConfigError, kernels
from openrlhf.data.packed_batch import pack_rows
from openrlhf.models import attention
from openrlhf.models.attention import choose_attention, packing_arguments, segment_attention, varlen_attention
from openrlhf.models.forward import score_tokens
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.probe import plan_forward
from tests.tiny_models import make_tiny_model, tiny_config

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


def _choose_for_falcon(requested: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """A family that looks its kernels up in a table of its own."""
    config = AutoConfig.for_model("falcon", hidden_size=32, num_attention_heads=2)
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


# Rows of similar length share one padded call.
@pytest.mark.parametrize("lengths", [[9], [7, 8, 7], [20, 1, 3, 6], [1, 1], [3, 20, 19, 2, 2]])
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


def _flash(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What PyTorch documents of ``varlen_attn``, whose kernel there is on GPUs alone: windows leave the token itself
    uncounted, and key heads are shared where that was asked for.
    """
    lengths = cu_seq_q.diff().tolist()
    assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == max(lengths)
    assert scale == 0.3 and window_size[1] == 0 and enable_gqa == (query.shape[1] != key.shape[1])
    window = None if window_size[0] == -1 else window_size[0] + 1
    return _eager(*(state.transpose(0, 1)[None] for state in (query, key, value)), lengths, window)[0]


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_varlen_kernel_is_asked_for_what_segments_compute(
    window: int | None, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", _flash)
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 1, 12]
    states = [torch.randn(1, heads, 20, 8, generator=generator) for heads in (4, key_heads, key_heads)]
    expected, _ = segment_attention(
        torch.nn.Module(), *states, None, 0.3, sliding_window=window, segment_lengths=lengths
    )
    arguments = packing_arguments("torch_varlen", torch.tensor([0, 7, 8, 20], dtype=torch.int32), lengths)
    found, _ = varlen_attention(
        torch.nn.Module(), *states, scaling=0.3, sliding_window=window, is_causal=True, **arguments
    )
    torch.testing.assert_close(found, expected)


def test_a_call_of_the_varlen_kernel_that_is_not_packed_runs_sdpa() -> None:
    states = [torch.randn(2, 2, 5, 8)] * 3
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    expected, _ = segment_attention(torch.nn.Module(), *states, None)
    for given in (None, mask):
        torch.testing.assert_close(varlen_attention(torch.nn.Module(), *states, given)[0], expected)


def test_what_segment_attention_cannot_compute_is_refused() -> None:
    states = [torch.randn(1, 2, 5, 8)] * 3
    with pytest.raises(ConfigError, match="segment_sdpa cannot compute softcap"):
        segment_attention(torch.nn.Module(), *states, None, softcap=50.0)
    with pytest.raises(ConfigError, match="torch_varlen cannot compute s_aux"):
        varlen_attention(torch.nn.Module(), *states, None, s_aux=torch.zeros(2))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma3", "cohere", "qwen2_moe"])
def test_auto_takes_segments_on_the_cpu_where_rows_and_windows_are_all_there_is(architecture: str) -> None:
    assert _choose(architecture) == "segment_sdpa"


def test_auto_takes_no_kernel_that_would_leave_something_out() -> None:
    # Gemma 2 caps its attention logits, which SDPA would silently not do.
    assert _choose("gemma2") == "eager"
    assert _choose("gemma2", attn_logit_softcapping=None) == "segment_sdpa"
    assert _choose("gemma2", device=CUDA) == "eager"


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
    assert _choose("llama", device=CUDA, dtype=torch.float32) == "segment_sdpa"
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


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma3", "cohere", "qwen2_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_takes_the_varlen_kernel_on_gpus_without_flash_attention(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert _choose(architecture, device=CUDA, dtype=dtype) == "torch_varlen"
    assert _choose(architecture, "torch_varlen", CUDA, dtype) == "torch_varlen"


@pytest.mark.parametrize(
    ("changes", "capability", "reason"),
    [
        ({"head_dim": 264}, (9, 0), "its heads have size 264, not one multiple of 8 up to 256"),
        ({"head_dim": 12}, (9, 0), "its heads have size 12"),
        ({}, (7, 5), "Tesla T4 is older than Ampere"),
    ],
)
def test_a_gpu_or_head_that_the_varlen_kernel_cannot_take_gets_segments_and_is_refused_by_name(
    changes: dict[str, int], capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert _choose("llama", device=CUDA, **changes) == "segment_sdpa"
    with pytest.raises(ConfigError, match=f"torch_varlen cannot run the model: {reason}.*; take auto"):
        _choose("llama", "torch_varlen", CUDA, **changes)


def test_the_varlen_kernel_is_refused_where_attention_is_more_than_rows_and_in_32_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match="the attention of a falcon is more than causal rows"):
        config = AutoConfig.for_model("falcon", hidden_size=32, num_attention_heads=2)
        choose_attention(
            config, AutoModelForCausalLM._model_mapping[type(config)], "torch_varlen", CUDA, torch.bfloat16
        )
    with pytest.raises(ConfigError, match="torch_varlen computes in 16 bits alone"):
        _choose("llama", "torch_varlen", CUDA, torch.float32)
    with pytest.raises(ConfigError, match="torch_varlen needs a GPU"):
        _choose("llama", "torch_varlen", CPU)


def test_sdpa_by_name_runs_row_by_row_where_rows_are_all_there_is() -> None:
    assert _choose("qwen2", "sdpa") == _choose("qwen2", "sdpa", CUDA) == "segment_sdpa"
    assert _choose_for_falcon("sdpa", CPU) == _choose_for_falcon("sdpa", CUDA) == "sdpa"


def test_latent_attention_with_value_heads_of_another_size_takes_no_varlen_kernel() -> None:
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    config = AutoConfig.for_model("deepseek_v3", hidden_size=64, num_attention_heads=4, **sizes)
    assert attention._head_sizes(config) == {24, 16}


@pytest.mark.parametrize("lengths", [(9,), (5, 5, 5), (20, 1, 3, 6), (1, 1), (64, 60, 3, 2, 2, 50)])
def test_rows_share_padded_calls_that_waste_little(lengths: tuple[int, ...]) -> None:
    groups = attention._groups(lengths)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[row] for row in group]
        assert sizes[0] == max(sizes)
        assert len(sizes) * max(sizes) <= attention.PADDING_WASTE * sum(sizes)
    assert attention._groups((64,) * 32) == (tuple(range(32)),)


def test_packed_rows_make_no_mask_and_ask_the_device_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path, "mistral")
    model = load_causal_lm(tmp_path, dtype=torch.float32, device=CPU)
    rows = [torch.arange(5, 18), torch.arange(40, 49)]
    batch = pack_rows(rows, [torch.arange(row.numel()) > 0 for row in rows])
    expected = score_tokens(model, batch).logprobs

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("read the borders of rows off the positions")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    assert torch.equal(score_tokens(model, batch).logprobs, expected)


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

"""Tiny random models and a tokenizer, made on the spot, so that tests run the real parts without a download."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
PAD_ID, START_ID, END_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What each architecture needs beyond the common sizes. Small windows, so that short rows already cross them.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "llama": {"model_type": "llama", "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 6, "head_dim": None},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 6,
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
    # Logits changed after the head (soft-capped, scaled): a path that skips that is silently wrong.
    "gemma2": {"model_type": "gemma2", "sliding_window": 6, "head_dim": 32, "final_logit_softcapping": 3.0},
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "qwen2_moe": {"model_type": "qwen2_moe"},
    # A state-space model: its state runs over the borders of packed rows.
    "mamba": {"model_type": "mamba"},
}


@cache
def _tokenizer_object(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (
        "hello world , what is 1 + 2 ? the answer is 3 . user assistant system think about it step by step "
        "one two three four five red green blue"
    )
    # The sums give enough merges to fill the vocabulary: every id that a model samples can then be decoded.
    sums = [f"{n} + {2 * n} = {3 * n}" for n in range(400)]
    tokenizer.train_from_iterator([text] * 10 + sums, trainer)
    return tokenizer


def make_tokenizer(vocab: int = 512, *, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every text can be encoded and comes back the same; pad and EOS differ; no BOS.

    Args:
        vocab: at most this many entries; at least 259 (the bytes and three special tokens).
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer_object(vocab), pad_token=PAD, eos_token=END, additional_special_tokens=[START]
    )
    tokenizer.model_max_length = 2048
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def tiny_config(
    architecture: str = "qwen2",
    *,
    tie: bool = True,
    vocab: int = 512,
    hidden: int = 64,
    layers: int = 2,
    **changes: Any,
) -> Any:
    """The config of a tiny model; ``changes`` override any entry of it."""
    values: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": tie,
        **ARCHITECTURES[architecture],
        **changes,
    }
    if "layer_types" in values:
        values["layer_types"] = (values["layer_types"] * layers)[:layers]
    return AutoConfig.for_model(values.pop("model_type"), **values)


def make_tiny_model(
    folder: str | Path,
    architecture: str = "qwen2",
    *,
    tie: bool = True,
    vocab: int = 512,
    hidden: int = 64,
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """Writes a random model with its tokenizer as a folder that transformers and vLLM load.

    Biases and norm weights are moved off 0 and 1, so that one that is lost or swapped changes the output.

    Args:
        architecture: a key of ``ARCHITECTURES``.
        tie: input and output embeddings are one tensor.
        changes: further entries of the model's config.

    Returns: ``folder``.
    """
    folder = Path(folder)
    config = tiny_config(architecture, tie=tie, vocab=vocab, hidden=hidden, layers=layers, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.05 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(
        eos_token_id=END_ID, pad_token_id=PAD_ID, temperature=0.7, do_sample=True
    )
    model.to(dtype).save_pretrained(folder)
    if tokenizer:
        make_tokenizer(vocab).save_pretrained(folder)
    return folder


def make_tiny_moe(folder: str | Path, **changes: Any) -> Path:
    """A mixture of four experts; transformers holds their weights fused, and files hold them one by one."""
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}
    return make_tiny_model(folder, "qwen2_moe", tie=False, num_experts_per_tok=2, **sizes, **changes)

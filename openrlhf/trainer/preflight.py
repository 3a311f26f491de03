"""What the models of a run must allow before any process is started: the same for every training command."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers import AutoModelForSequenceClassification, GenerationConfig

from openrlhf.config import ConfigError, DPOConfig, PPOConfig, RMConfig, SFTConfig
from openrlhf.config.parse import print_note
from openrlhf.data.spans import turn_ends
from openrlhf.data.templates import encode, render_messages, render_prompt, require_chat_template
from openrlhf.models.loading import check_context, load_config, load_tokenizer, reading
from openrlhf.models.value_head import HeadSpec, find_head, prepare_head
from openrlhf.trainer.dry_run_parts import model_facts


def run(config: SFTConfig | RMConfig | DPOConfig | PPOConfig) -> None:
    """Reads configs, tokenizers and scalar heads of the models, no other weights, and finds the layers for adapters.

    Raises: ConfigError, as ``_check_models`` does, and where --ds.lora.target_modules do not fit a model.
    """
    _check_models(config)
    if config.ds.lora.rank > 0:
        _check_adapters(config)


def _check_adapters(config: SFTConfig | RMConfig | DPOConfig | PPOConfig) -> None:
    from openrlhf.trainer.launch import critic_source

    rl = isinstance(config, PPOConfig)
    path = config.actor.model_name_or_path if rl else config.model.model_name_or_path
    models = [(path, isinstance(config, RMConfig))]
    if rl and config.has_critic:
        models.append((critic_source(config)[0], True))
    for path, scalar in models:
        model_facts(path, config.trust_remote_code, scalar=scalar, trained=config.ds)


def _check_models(config: SFTConfig | RMConfig | DPOConfig | PPOConfig) -> None:
    """Reads configs, tokenizers and scalar heads of the models, no other weights.

    Raises:
        ConfigError: there is no such model; --data.max_len is longer than it can place; it lacks embeddings for what a
            tokenizer writes; a critic or a reward model has no scalar head; a reference reads token ids otherwise.
    """
    if isinstance(config, SFTConfig):
        _check_context(config, config.model.model_name_or_path)
        return
    if isinstance(config, RMConfig):
        _check_new_head(config)
        return
    if isinstance(config, DPOConfig):
        _check_context(config, config.model.model_name_or_path)
        if config.model.has_reference and config.ref.model_name_or_path:
            _check_reference(config, config.ref.model_name_or_path)
        return
    _check_context(config, config.actor.model_name_or_path)
    policy = _tokenizer(config, config.actor.model_name_or_path)
    written = policy_tokens(policy, apply_chat_template=config.data.apply_chat_template)
    _check_embeddings(config, config.actor.model_name_or_path, policy, written, "--actor.model_name_or_path")
    if config.data.apply_chat_template:
        _tell_of_endings(config, policy)
    if config.has_critic:
        _check_critic(config, policy, written)
    for path in config.reward_models:
        _check_reward_model(config, path, policy, written)


def _tell_of_endings(config: PPOConfig, tokenizer: Any) -> None:
    """A response whose end the engine does not know runs on to its limit, and is rewarded as that."""
    path = config.actor.model_name_or_path
    stops = stop_tokens(path, tokenizer, config.trust_remote_code)
    try:
        ends = turn_ends(tokenizer)
        opening = render_messages(tokenizer, [{"role": "user", "content": "a"}]).lstrip()
    except (ValueError, ArithmeticError, RecursionError):
        # RL renders questions alone, and some templates are made for those.
        return
    if not ends or opening.startswith(ends[0]):
        # What opens turns ends none: the template closes them with words, or not at all.
        return
    if not stops & set(tokenizer.convert_tokens_to_ids(list(ends))):
        print_note(
            f"the chat template of {path} ends a turn with {ends[0]!r}, and engines do not stop there: they stop at "
            f"eos_token of tokenizer_config.json ({tokenizer.eos_token!r}) and eos_token_id of generation_config.json. "
            f"Unless the model was trained to answer otherwise, give one of them {ends[0]!r} "
            f"({tokenizer.convert_tokens_to_ids(ends[0])})."
        )


def stop_tokens(path: str, tokenizer: Any, trust_remote_code: bool) -> set[int]:
    """Returns: the ids at which vLLM ends a response: the tokenizer's EOS, and what the model's files name.

    Raises: ConfigError where generation_config.json is none; vLLM would fall over it as well.
    """
    try:
        named = GenerationConfig.from_pretrained(path).eos_token_id
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"generation_config.json of {path} cannot be used: {error}; mend it or delete it") from error
    except OSError:
        # Without that file vLLM takes what config.json says.
        loaded = load_config(path, trust_remote_code=trust_remote_code)
        named = GenerationConfig.from_model_config(loaded).eos_token_id
    known = named if isinstance(named, list) else [named]
    return {number for number in (*known, tokenizer.eos_token_id) if isinstance(number, int)}


def _check_new_head(config: RMConfig) -> None:
    path = config.model.model_name_or_path
    _check_scalar(config, path, "--model.model_name_or_path", fresh=True)
    loaded = load_config(path, trust_remote_code=config.trust_remote_code)
    try:
        taken = find_head(path, loaded, config.ds.value_head_prefix) is not None
    except ConfigError:
        taken = True  # A head of another shape: a classifier of several labels.
    if taken:
        print_note(f"{path} has a head for sequence classification; a new one takes its place.")


def _check_reference(config: DPOConfig, path: str) -> None:
    _check_context(config, path)
    own = _tokenizer(config, config.model.model_name_or_path)
    try:
        other = other_token(own, _tokenizer(config, path))
    except ConfigError:
        # It is given token ids, so it may come without a tokenizer; then there is nothing to compare.
        return
    if other is not None:
        number, ours, theirs = other
        raise ConfigError(
            f"--ref.model_name_or_path {path} reads the token ids of the model that is trained, and calls token "
            f"{number} {theirs!r} where that one calls it {ours!r}: take a reference with the same vocabulary"
        )


def critic_flag(config: PPOConfig) -> str:
    """Returns: the flag that the critic's weights come from."""
    if config.critic.model_name_or_path:
        return "--critic.model_name_or_path"
    return "--reward.model_name_or_path" if config.reward_models else "--actor.model_name_or_path"


def _check_context(config: SFTConfig | RMConfig | DPOConfig | PPOConfig, path: str) -> None:
    check_context(path, config.data.max_len, trust_remote_code=config.trust_remote_code)


def _check_critic(config: PPOConfig, policy: Any, written: set[int]) -> None:
    from openrlhf.trainer.launch import critic_source

    path, fresh = critic_source(config)
    flag = critic_flag(config)
    _check_scalar(config, path, flag, fresh=fresh)
    if path == config.actor.model_name_or_path:
        return
    reads = f"the critic ({flag} {path}) reads the policy's token ids, and"
    remedy = (
        "give --critic.model_name_or_path a model with the policy's vocabulary (the policy itself, for instance, with "
        "--critic.fresh_head)"
    )
    other = other_token(policy, _tokenizer(config, path))
    if other is not None:
        number, ours, theirs = other
        raise ConfigError(f"{reads} calls token {number} {theirs!r} where the policy calls it {ours!r}: {remedy}")
    known, largest = _embeddings(config, path), max(written)
    if largest >= known:
        raise ConfigError(f"{reads} has only {known} embeddings where the policy's rows hold token {largest}: {remedy}")


def _check_reward_model(config: PPOConfig, path: str, policy: Any, written: set[int]) -> None:
    flag = "--reward.model_name_or_path"
    _check_scalar(config, path, flag, fresh=False)
    stored = load_config(path, trust_remote_code=config.trust_remote_code).to_dict()
    # The plan of a dry run says so itself.
    if config.reward.normalize_enable and not config.dry_run and None in (stored.get("mean"), stored.get("std")):
        print_note(f"--reward.normalize_enable changes nothing: config.json of {path} stores no mean and std.")
    tokenizer = _tokenizer(config, path)
    # One with a vocabulary of its own reads text, not the policy's ids.
    same = tokenizer.get_vocab() == policy.get_vocab()
    _check_embeddings(config, path, tokenizer, written if same else text_tokens(tokenizer), flag)


def _check_scalar(config: RMConfig | PPOConfig, path: str, flag: str, *, fresh: bool) -> None:
    """Raises ConfigError where a model cannot give every token of a row one number."""
    _check_context(config, path)
    loaded = load_config(path, trust_remote_code=config.trust_remote_code)
    if not config.trust_remote_code and type(loaded) not in AutoModelForSequenceClassification._model_mapping:
        raise ConfigError(f"{flag} {path} holds a {loaded.model_type}, which cannot be given a scalar head")
    try:
        with reading("model", path):
            prepare_head(path, loaded, HeadSpec(prefix=config.ds.value_head_prefix, fresh=fresh))
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _check_embeddings(config: PPOConfig, path: str, tokenizer: Any, written: set[int], flag: str) -> None:
    """Raises ConfigError where a model has no embedding for one of the ids ``written`` in its rows."""
    known, largest = _embeddings(config, path), max(written)
    if largest >= known:
        raise ConfigError(
            f"{flag} {path}: its rows hold token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), and the "
            f"model has only {known} embeddings: take the tokenizer that belongs to the model, or resize its "
            "embeddings first"
        )


def _embeddings(config: PPOConfig, path: str) -> int:
    return load_config(path, trust_remote_code=config.trust_remote_code).get_text_config().vocab_size


def text_tokens(tokenizer: Any) -> set[int]:
    """Returns: the ids that ordinary text needs, and the end of a row.

    Tokens that were added to a tokenizer and that no text spells out may lie outside the model: Gemma 3's text models
    have one for images.
    """
    added = tokenizer.added_tokens_decoder
    ids = {number for number in tokenizer.get_vocab().values() if number not in added}
    return ids if tokenizer.eos_token_id is None else ids | {tokenizer.eos_token_id}


def policy_tokens(tokenizer: Any, *, apply_chat_template: bool) -> set[int]:
    """Returns: the ids that a policy's rows need: those of text, the padding, and what the chat template writes."""
    ids = text_tokens(tokenizer) | {tokenizer.pad_token_id}
    if apply_chat_template:
        require_chat_template(tokenizer)
        # A template may refuse a single message of a user's; whether it fits the prompts is for the data to say.
        with suppress(ValueError):
            rendered = render_prompt(tokenizer, "a", apply_chat_template=True)
            ids |= set(encode(tokenizer, rendered.text, templated=rendered.templated))
    return ids


def other_token(first: Any, second: Any) -> tuple[int, str, str] | None:
    """Compares two tokenizers, apart from what was added to either.

    Returns: the smallest id that they call differently, and both names; None where one can read the other's ids.
    """
    added = first.added_tokens_decoder.keys() | second.added_tokens_decoder.keys()
    names = {number: token for token, number in second.get_vocab().items()}
    return min(
        (
            (number, token, names[number])
            for token, number in first.get_vocab().items()
            if number not in added and names.get(number, token) != token
        ),
        default=None,
    )


def _tokenizer(config: DPOConfig | PPOConfig, path: str) -> Any:
    return load_tokenizer(
        path, use_fast=not config.data.disable_fast_tokenizer, trust_remote_code=config.trust_remote_code
    )

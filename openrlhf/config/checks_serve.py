"""Checks of the reward server's flags against this machine. Nothing heavy is imported."""

from __future__ import annotations

from pathlib import Path

from openrlhf.config.api_keys import server_key
from openrlhf.config.checks_system import check_whole_model, detect_device, looks_local, visible_gpus
from openrlhf.config.commands import ServeRMConfig
from openrlhf.config.errors import ConfigError
from openrlhf.config.kernels import check_experts, check_installed, check_runs
from openrlhf.config.versions import REQUIRED, check_versions

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# What the server does not stand on.
_UNUSED = ("deepspeed",)


def check_serve(config: ServeRMConfig) -> None:
    """Raises ConfigError for a model, a kernel or a key that is missing."""
    path = config.reward.model_name_or_path
    if not path:
        raise ConfigError("--reward.model_name_or_path is missing: give a folder or a hub name.")
    if "," in path:
        raise ConfigError(f"--reward.model_name_or_path {path}: a server serves one model; start one for each.")
    if looks_local(path):
        check_whole_model("reward.model_name_or_path", Path(path))
        if not Path(path, "config.json").is_file():
            raise ConfigError(
                f"--reward.model_name_or_path {path} is not a model folder: there is no config.json in it."
            )
    if config.ds.load_in_4bit:
        raise ConfigError("--ds.load_in_4bit: the server holds its model in --ds.param_dtype; leave the flag out.")
    check_versions({package: wanted for package, wanted in REQUIRED.items() if package not in _UNUSED})
    check_installed(config.ds.attn_implementation)
    server_key(config.api_key_file, config.api_key_env)


def check_serve_device(config: ServeRMConfig) -> None:
    """Raises ConfigError where this machine lacks the GPU that is asked for, and for what the device cannot do."""
    if config.device == "cuda" and not visible_gpus():
        raise ConfigError("--device cuda: this machine shows no NVIDIA GPU; take --device cpu or auto.")
    device, ds = detect_device(config.device), config.ds
    check_runs(ds.attn_implementation, device=device, half=ds.param_dtype != "fp32")
    check_experts(ds.experts_implementation, device=device, param_dtype=ds.param_dtype)


def serve_notes(config: ServeRMConfig) -> list[str]:
    """Returns: a sentence where a server is open to everyone."""
    if config.host in LOOPBACK or config.api_key_file or config.api_key_env:
        return []
    return [f"--host {config.host} opens the server to the network, and no key is asked for (--api_key_file)."]

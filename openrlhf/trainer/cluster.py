"""Ray for one run: started here or joined, the environment of its workers, and the places that they get."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf.config import PPOConfig, check_device, device_notes, known_device
from openrlhf.config.parse import print_note
from openrlhf.trainer.ray_reaper import start_reaper
from openrlhf.utils.errors import RunError
from openrlhf.utils.termination import Terminated, raise_on_sigterm

WORKER_ENV = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_BATCH_INVARIANT": "0",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "PYTHONUNBUFFERED": "1",
}
"""What workers get where the user has set nothing."""

_LOOPBACK = "127.0.0.1"

_LOCAL_ENV = {
    # What is left of a Ray whose head was killed looks for it this long (seconds) before it ends as well. The driver is
    # aborted then, and who signals all processes of a job ends the head at once: what unwinds a run has to be faster.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
    # Nothing outside this machine has any business with a local run, and Ray runs what it is sent.
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": _LOOPBACK,
}

_PLACEMENT_TIMEOUT_S = 120.0


def worker_env(user_env: Mapping[str, str], defaults: Mapping[str, str] = WORKER_ENV) -> dict[str, str]:
    """Returns: ``defaults``, each replaced by what the user has set."""
    return {name: user_env.get(name, value) for name, value in defaults.items()}


@contextlib.contextmanager
def ray_started(*, logical_cpus: int) -> Iterator[None]:
    """Joins the cluster that the environment names, or starts a local one, and leaves it at the end.

    A Ray that this process has joined before is left as it is.

    Args:
        logical_cpus: places that the run asks for; a local Ray gets at least so many, whatever the machine has.
    """
    if ray.is_initialized():
        yield
        return
    # Ray would hide the GPUs from workers that ask for none, and says in a warning that it will stop doing so.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    local = not os.environ.get("RAY_ADDRESS")
    try:
        if local:
            _start_local(logical_cpus)
        else:
            ray.init(logging_level="ERROR")
    except SystemExit as stop:
        # While it starts, Ray answers SIGTERM by a handler of its own, which leaves without a word.
        raise Terminated from stop
    # That handler is still there, and now prints a stack of Ray's C++ side.
    raise_on_sigterm()
    reaper = start_reaper() if local else None
    try:
        yield
    finally:
        ray.shutdown()
        if reaper is not None:
            reaper.stdin.close()


def _start_local(logical_cpus: int) -> None:
    for name, value in _LOCAL_ENV.items():
        os.environ.setdefault(name, value)
    with _children_apart():
        ray.init(
            address="local",
            _node_ip_address=_LOOPBACK,
            num_cpus=max(logical_cpus, os.cpu_count() or 1),
            include_dashboard=False,
            logging_level="ERROR",
            object_store_memory=_object_store_bytes(),
        )


@contextlib.contextmanager
def _children_apart() -> Iterator[None]:
    """While it lasts, what this process starts (with a ``preexec_fn``, as Ray does) gets process groups of its own.

    `timeout` and others signal a run's whole group: Ray and the engines would be gone before the run could end them,
    and leave shared memory behind.
    """
    active = [True]
    # A hook cannot be taken back, so it has to look whether it is still meant.
    os.register_at_fork(after_in_child=lambda: os.setpgid(0, 0) if active else None)
    try:
        yield
    finally:
        active.clear()


def _cpu_env() -> dict[str, str]:
    # vLLM binds each engine's threads to cores of its own, and trainers could not use those in their turn.
    return {
        "DS_ACCELERATOR": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
    }


def _object_store_bytes() -> int | None:
    """Ray's own choice is a third of the memory; a laptop's run needs far less, and shared memory may be small."""
    import shutil

    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return max(80 * 2**20, min(2 * 2**30, free // 4)) if free else None


@contextlib.contextmanager
def ray_session(config: PPOConfig) -> Iterator[str]:
    """Ray for the time of a run. Yields: "cuda" or "cpu", what the run's models stand on.

    Raises:
        ConfigError: the device cannot do what the flags ask for.
    """
    with ray_started(logical_cpus=sum(role_sizes(config).values()) + 1):
        device = config.device
        if device == "auto":
            device = "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
        if known_device(config) is None:
            # Only the cluster could tell the device, so what depends on it was not checked at the start.
            check_device(config, device)
            for note in device_notes(config, device):
                print_note(note)
        yield device


@dataclass(frozen=True)
class Place:
    """Where one worker runs.

    Attributes:
        group: Ray's placement group.
        bundle: index in it.
        share: part of the bundle's accelerator, or of its CPU, that the worker takes.
        on_gpu: whether the bundle has a GPU.
    """

    group: PlacementGroup
    bundle: int
    share: float
    on_gpu: bool

    def options(self) -> dict[str, Any]:
        """Returns: the options of the worker's actor."""
        env = worker_env(os.environ) if self.on_gpu else worker_env(os.environ, WORKER_ENV | _cpu_env())
        return {
            "num_cpus": self.share,
            "num_gpus": self.share if self.on_gpu else 0,
            "max_restarts": 0,
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundle
            ),
        }


def role_sizes(config: PPOConfig) -> dict[str, int]:
    """Returns: workers of every role that this run starts; no reference model where the KL coefficient is 0."""
    sizes = {"actor": config.actor.world_size}
    if config.algo.kl.enabled:
        sizes["ref"] = config.ref.world_size
    if config.has_critic:
        sizes["critic"] = config.critic.world_size
    sizes |= dict.fromkeys(reward_roles(config), config.reward.world_size)
    sizes["engine"] = config.vllm.num_engines
    return sizes


def reward_roles(config: PPOConfig) -> list[str]:
    """Returns: the roles of the reward models, in the order of their names."""
    count = len(config.reward_models)
    return ["reward"] if count == 1 else [f"reward {number}" for number in range(count)]


def colocated_roles(config: PPOConfig) -> list[tuple[str, ...]]:
    """Returns: the roles, those that share places together in one tuple."""
    train, roles = config.train, list(role_sizes(config))
    together: list[tuple[str, ...]] = []
    if train.colocate_all:
        together.append(tuple(role for role in roles if role != "engine" or not train.async_enable))
    else:
        if train.colocate_actor_ref:
            together.append(tuple(role for role in roles if role in ("actor", "ref")))
        if train.colocate_critic_reward:
            together.append(tuple(role for role in roles if role == "critic" or role.startswith("reward")))
    shared = [group for group in together if group]
    return shared + [(role,) for role in roles if not any(role in group for group in shared)]


def place_roles(config: PPOConfig, *, on_gpu: bool) -> dict[str, list[Place]]:
    """Reserves a place for every worker.

    Raises:
        RunError: the cluster has too little; the message says what is asked for and what there is.
    """
    sizes = role_sizes(config)
    places: dict[str, list[Place]] = {}
    for roles in colocated_roles(config):
        count = max(sizes[role] for role in roles)
        group = placement_group([{"CPU": 1, "GPU": 1} if on_gpu else {"CPU": 1}] * count, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=_PLACEMENT_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            unit = "GPUs" if on_gpu else "CPU places"
            raise RunError(
                f"{' + '.join(roles)} need {count} {unit}, the Ray cluster has {ray.available_resources()} free of "
                f"{ray.cluster_resources()}: lower --vllm.num_engines or --<role>.num_gpus_per_node "
                "(actor, ref, critic, reward), or share places with --train.colocate_all"
            ) from error
        for role in roles:
            places[role] = [Place(group, index, 1.0 / len(roles), on_gpu) for index in range(sizes[role])]
    return places

"""Where the workers of an RL run stand: which roles share places, their environment, and the GPUs of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf.config import PPOConfig
from openrlhf.utils.errors import RunError

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

_PLACEMENT_TIMEOUT_S = 120.0


def worker_env(user_env: Mapping[str, str], defaults: Mapping[str, str] = WORKER_ENV) -> dict[str, str]:
    """Returns: ``defaults``, each replaced by what the user has set."""
    return {name: user_env.get(name, value) for name, value in defaults.items()}


def _cpu_env(sharing: int) -> dict[str, str]:
    """Of a worker that computes at the same time as others do, ``sharing`` of them with itself."""
    # vLLM binds each engine's threads to cores of its own, and trainers could not use those in their turn.
    return {
        "DS_ACCELERATOR": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Threads that have no core keep all others of their forward waiting.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // sharing)),
    }


@dataclass(frozen=True)
class Place:
    """Where one worker runs.

    Attributes:
        group: Ray's placement group.
        bundle: index in it.
        share: part of the bundle's accelerator, or of its CPU, that the worker takes.
        on_gpu: whether the bundle has a GPU.
        cards: GPUs of its node that the worker is told to take, where it spans several bundles; Ray counts none of
            them then.
        sharing: workers that compute on the cores of a CPU at the same time, this one among them.
    """

    group: PlacementGroup
    bundle: int
    share: float
    on_gpu: bool
    cards: tuple[str, ...] = ()
    sharing: int = 1

    def options(self) -> dict[str, Any]:
        """Returns: the options of the worker's actor."""
        env = worker_env(os.environ) if self.on_gpu else worker_env(os.environ, WORKER_ENV | _cpu_env(self.sharing))
        if self.cards:
            # Ray hides all GPUs from a worker that it counts none for, unless it is told not to.
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(self.cards), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        return {
            "num_cpus": self.share,
            "num_gpus": self.share if self.on_gpu and not self.cards else 0,
            "max_restarts": 0,
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundle
            ),
        }


def role_sizes(config: PPOConfig) -> dict[str, int]:
    """Returns: workers of every role that this run starts; no reference model where the KL coefficient is 0, or where
    the actor is one with its adapters off.
    """
    sizes = {"actor": config.actor.world_size}
    if config.algo.kl.enabled and not config.reference_below_adapters:
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


def places_of(config: PPOConfig, roles: Sequence[str], widths: Mapping[str, int]) -> int:
    """Returns: the GPUs, or the places on a CPU, that roles take which share them.

    Args:
        widths: of one worker, by role; 1 for those that are not named.
    """
    sizes = role_sizes(config)
    each = {"engine": config.engines_per_place}
    return max(sizes[role] * widths.get(role, 1) // each.get(role, 1) for role in roles)


def place_roles(config: PPOConfig, *, on_gpu: bool) -> dict[str, list[Place]]:
    """Reserves a place for every worker.

    Raises:
        RunError: the cluster has too little; the message says what is asked for and what there is.
    """
    sizes = role_sizes(config)
    # GPUs of one worker; on a CPU the processes of an engine share its place.
    widths = {role: config.vllm.tensor_parallel_size if on_gpu and role == "engine" else 1 for role in sizes}
    places: dict[str, list[Place]] = {}
    for roles in colocated_roles(config):
        count = places_of(config, roles, widths)
        group = _reserve(roles, count, on_gpu)
        share = 1.0 / (len(roles) + ("engine" in roles) * (config.engines_per_place - 1))
        for role in roles:
            if widths[role] == 1:
                sharing = sizes[role] if role == "engine" else 1
                places[role] = [
                    Place(group, index % count, share, on_gpu, sharing=sharing) for index in range(sizes[role])
                ]
            else:
                places[role] = _wide_places(group, sizes[role], widths[role], share)
    return places


def _reserve(roles: Sequence[str], count: int, on_gpu: bool) -> PlacementGroup:
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
    return group


def _wide_places(group: PlacementGroup, count: int, width: int, share: float) -> list[Place]:
    """Places of workers that take ``width`` GPUs each: bundles that stand on one node, wherever Ray has put them."""
    bundles: dict[str, list[tuple[str, int]]] = {}
    for bundle, (node, card) in enumerate(_cards(group)):
        bundles.setdefault(node, []).append((card, bundle))
    found = []
    for on_node in bundles.values():
        # By number, so that 9 stands before 10.
        on_node.sort(key=lambda held: (len(held[0]), held))
        for first in range(0, len(on_node) - width + 1, width):
            cards, members = zip(*on_node[first : first + width], strict=True)
            found.append(Place(group, members[0], share, on_gpu=True, cards=cards))
    if len(found) < count:
        held = ", ".join(str(len(on_node)) for on_node in bundles.values())
        raise RunError(
            f"--vllm.tensor_parallel_size {width} needs {count} times {width} GPUs of one node; the places that Ray "
            f"gave lie {held} on a node"
        )
    return found[:count]


def _cards(group: PlacementGroup) -> list[tuple[str, str]]:
    """Node of each bundle, and its GPU as ``CUDA_VISIBLE_DEVICES`` calls it: by a number, or by a name."""
    own_card = ray.remote(num_cpus=0, num_gpus=0.01)(
        lambda: (ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0]))
    )
    asked = [
        own_card.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            )
        ).remote()
        for bundle in range(group.bundle_count)
    ]
    return ray.get(asked, timeout=_PLACEMENT_TIMEOUT_S)

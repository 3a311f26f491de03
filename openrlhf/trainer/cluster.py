"""Ray for one run: started here or joined."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import ray

from openrlhf.config import PPOConfig, check_device, device_notes, known_device
from openrlhf.config.parse import print_note
from openrlhf.trainer.placement import role_sizes
from openrlhf.trainer.ray_reaper import start_reaper
from openrlhf.utils.termination import Terminated, raise_on_sigterm

_LOOPBACK = "127.0.0.1"

_LOCAL_ENV = {
    # What is left of a Ray whose head was killed looks for it this long (seconds) before it ends as well. The driver is
    # aborted then, and who signals all processes of a job ends the head at once: what unwinds a run has to be faster.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
    # Nothing outside this machine has any business with a local run, and Ray runs what it is sent.
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": _LOOPBACK,
}


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

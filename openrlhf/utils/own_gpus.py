"""Which GPUs a Ray worker sees where Ray has been told to leave that alone."""

from __future__ import annotations

import os

LEFT_ALONE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def keep_own_gpus() -> None:
    """Hides the other workers' GPUs from this process, before anything has looked at them.

    With ``RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES`` a worker sees all GPUs of its node, and would take the first.
    """
    import ray

    if os.environ.get(LEFT_ALONE, "0").lower() not in ("1", "true"):
        return
    own = [str(number) for number in ray.get_gpu_ids()]
    if own:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)

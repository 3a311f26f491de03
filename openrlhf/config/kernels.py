"""Which kernels there are for attention and for experts, what they are installed with and where they run."""

from __future__ import annotations

from importlib.util import find_spec

from openrlhf.config.errors import ConfigError

# Kernel -> the module that holds it. Newest first: the order in which "auto" looks for them on GPUs.
FLASH_PACKAGES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
# PyTorch's own kernels over packed rows: SDPA on groups of rows, and its flash kernel for rows of any length.
SEGMENT, VARLEN = "segment_sdpa", "torch_varlen"
OURS = (SEGMENT, VARLEN)
KERNELS = ("auto", "eager", "sdpa", "flex_attention", *OURS, *FLASH_PACKAGES)

FLAG = "--ds.attn_implementation"


def is_from_hub(kernel: str) -> bool:
    """Returns: whether the name is that of a kernel on the hub: owner/name."""
    return "/" in kernel


def is_flash(kernel: str) -> bool:
    """Returns: whether a kernel is flash attention, which knows 16-bit numbers alone; the hub's are told by name."""
    return kernel in (VARLEN, *FLASH_PACKAGES) or (is_from_hub(kernel) and "flash" in kernel.rpartition("/")[2])


def check_installed(kernel: str) -> None:
    """Raises ConfigError for an attention kernel that is unknown or not installed."""
    if is_from_hub(kernel):
        if find_spec("kernels") is None:
            raise ConfigError(f"{FLAG} {kernel} comes from the hub through the package kernels; pip install kernels.")
        return
    if kernel not in KERNELS:
        raise ConfigError(f"{FLAG} must be one of {', '.join(KERNELS)}, or a hub kernel, found {kernel!r}.")
    module = FLASH_PACKAGES.get(kernel)
    if module is not None and find_spec(module) is None:
        raise ConfigError(
            f"{FLAG} {kernel} needs the package {module}, which is not installed; install it or take auto."
        )


def check_runs(kernel: str, *, device: str, half: bool) -> None:
    """Raises ConfigError for a kernel that cannot compute there.

    Args:
        device: "cuda" or "cpu".
        half: weights have 16 bits.
    """
    if device == "cpu" and (kernel in (VARLEN, *FLASH_PACKAGES) or is_from_hub(kernel)):
        raise ConfigError(f"{FLAG} {kernel} needs a GPU, and the device is the CPU; take auto.")
    if is_flash(kernel) and not half:
        raise ConfigError(
            f"{FLAG} {kernel} computes in 16 bits alone, and --ds.param_dtype is fp32; take auto, or bf16 weights."
        )


def check_experts(kernel: str | None, *, device: str, param_dtype: str) -> None:
    """Raises ConfigError for a kernel for experts that cannot compute there; the model decides whether it takes one."""
    if kernel == "deepgemm" and (device == "cpu" or param_dtype != "bf16"):
        raise ConfigError(
            f"--ds.experts_implementation deepgemm computes on GPUs in bf16 alone, and the run is on {device} in "
            f"{param_dtype}; leave the flag out."
        )


def check_liger(wanted: bool) -> None:
    """Raises ConfigError where Liger's kernels are asked for and not installed."""
    if wanted and find_spec("liger_kernel") is None:
        raise ConfigError("--ds.use_liger_kernel needs the package liger-kernel; pip install 'openrlhf[liger]'.")


def check_liger_device(wanted: bool, *, device: str) -> None:
    """Raises ConfigError where Liger's kernels cannot run. Args: device: "cuda" or "cpu"."""
    if wanted and device == "cpu":
        raise ConfigError("--ds.use_liger_kernel needs a GPU, and the device is the CPU; leave the flag out.")

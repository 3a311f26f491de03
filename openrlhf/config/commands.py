"""The whole tree of each command: what `parse` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from openrlhf.config.algo import AlgoConfig
from openrlhf.config.ckpt import CkptConfig, LoggerConfig, PPOCkptConfig, logger_of
from openrlhf.config.data import (
    DPOEvalConfig,
    EvalConfig,
    PreferenceDataConfig,
    PromptDataConfig,
    ServeDataConfig,
    SFTDataConfig,
    SupervisedEvalConfig,
)
from openrlhf.config.deepspeed import (
    DeepSpeedConfig,
    PPODeepSpeedConfig,
    PrecisionConfig,
    RMDeepSpeedConfig,
    ServeDeepSpeedConfig,
)
from openrlhf.config.model import (
    ActorConfig,
    CriticConfig,
    DPOModelConfig,
    DPORefConfig,
    OwnOptimizer,
    RefConfig,
    RMModelConfig,
    SFTModelConfig,
)
from openrlhf.config.optimizer import adamw
from openrlhf.config.reward import RewardConfig, ServeRewardConfig
from openrlhf.config.rollout import RolloutConfig, VllmConfig
from openrlhf.config.train import PPOTrainConfig, RMTrainConfig, SFTTrainConfig, TrainConfig


@dataclass(frozen=True)
class BaseConfig:
    """What every command takes."""

    config: str | None = None
    """YAML file with flags of this command, nested or dotted; flags on the command line override it."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model or tokenizer."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where models run; auto takes GPUs where there are any."""


@dataclass(frozen=True)
class TrainingConfig(BaseConfig):
    """What every training command takes."""

    local_rank: int = -1
    """Set by launchers; ranks come from the environment."""
    use_ms: bool = False
    """Take models and data sets from ModelScope instead of the Hugging Face hub."""
    dry_run: bool = False
    """Check everything, print the plan and leave."""


@dataclass(frozen=True)
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning."""

    model: SFTModelConfig = field(default_factory=SFTModelConfig)
    optimizer: OwnOptimizer = field(default_factory=lambda: adamw(5e-6))
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    eval: SupervisedEvalConfig = field(default_factory=SupervisedEvalConfig)
    train: SFTTrainConfig = field(default_factory=SFTTrainConfig)
    ds: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(path="./ckpt/checkpoints_sft"))
    logger: LoggerConfig = field(default_factory=lambda: logger_of("openrlhf_train_sft"))


@dataclass(frozen=True)
class RMConfig(TrainingConfig):
    """Reward model training."""

    model: RMModelConfig = field(default_factory=RMModelConfig)
    optimizer: OwnOptimizer = field(default_factory=lambda: adamw(9e-6))
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    eval: SupervisedEvalConfig = field(default_factory=SupervisedEvalConfig)
    train: RMTrainConfig = field(default_factory=RMTrainConfig)
    ds: RMDeepSpeedConfig = field(default_factory=RMDeepSpeedConfig)
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(path="./ckpt/checkpoints_rm"))
    logger: LoggerConfig = field(default_factory=lambda: logger_of("openrlhf_train_rm"))


@dataclass(frozen=True)
class DPOConfig(TrainingConfig):
    """Direct preference optimisation."""

    model: DPOModelConfig = field(default_factory=DPOModelConfig)
    ref: DPORefConfig = field(default_factory=DPORefConfig)
    optimizer: OwnOptimizer = field(default_factory=lambda: adamw(1e-5))
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    eval: DPOEvalConfig = field(default_factory=DPOEvalConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    ds: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(path="./ckpt/checkpoints_dpo"))
    logger: LoggerConfig = field(default_factory=lambda: logger_of("openrlhf_train_dpo"))

    @property
    def reference_below_adapters(self) -> bool:
        """Whether the reference is the model that is trained, with its adapters off."""
        own = self.ref.model_name_or_path in (None, self.model.model_name_or_path)
        return self.model.has_reference and self.ds.lora.rank > 0 and own


@dataclass(frozen=True)
class PPOConfig(TrainingConfig):
    """Reinforcement learning with Ray, vLLM and DeepSpeed."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    train: PPOTrainConfig = field(default_factory=PPOTrainConfig)
    ds: PPODeepSpeedConfig = field(default_factory=PPODeepSpeedConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    ckpt: PPOCkptConfig = field(default_factory=PPOCkptConfig)
    logger: LoggerConfig = field(default_factory=lambda: logger_of("openrlhf_train_ppo"))

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.algo.advantage.estimator == "gae"

    @property
    def reference_below_adapters(self) -> bool:
        """Whether the reference is the actor, with its adapters off: no model of its own."""
        return self.algo.kl.enabled and self.ds.lora.rank > 0

    @property
    def engines_per_place(self) -> int:
        """Engines that share each GPU of the actor, or its place on a CPU; 1 where they stand apart from it."""
        if not self.train.colocate_all or self.train.async_enable:
            return 1
        return max(1, self.vllm.num_engines * self.vllm.tensor_parallel_size // self.actor.world_size)

    @property
    def reward_models(self) -> list[str]:
        """Folders or hub names of the reward models."""
        return [name.strip() for name in (self.reward.model_name_or_path or "").split(",") if name.strip()]


@dataclass(frozen=True)
class LoraCombinerConfig(BaseConfig):
    """Merge a LoRA adapter into its base model."""

    model_path: str | None = None
    """Folder or hub name of the base model; unset takes the one that the adapter names."""
    lora_path: str | None = None
    """Folder of the LoRA adapter."""
    output_path: str | None = None
    """Folder that the merged model is written to; new or empty."""
    is_rm: bool = False
    """The adapter is that of a reward model: the merged model has a scalar head."""
    ds: PrecisionConfig = field(default_factory=PrecisionConfig)


@dataclass(frozen=True)
class ServeRMConfig(BaseConfig):
    """Serve a reward model over HTTP."""

    reward: ServeRewardConfig = field(default_factory=ServeRewardConfig)
    data: ServeDataConfig = field(default_factory=ServeDataConfig)
    ds: ServeDeepSpeedConfig = field(default_factory=ServeDeepSpeedConfig)
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens the server to the network."""
    port: int = 5000
    """Port to listen on."""
    batch_size: int | None = None
    """Most texts of one forward; unset leaves it to --max_batch_tokens."""
    max_batch_tokens: int = 16384
    """Tokens of one forward, which texts of several requests share; a longer text gets one of its own."""
    max_waiting_texts: int = 8192
    """Texts that may be accepted and not yet answered; a request beyond that is told to come again (503)."""
    max_body_mb: int = 16
    """Largest body of a request in MiB."""
    api_key_file: str | None = None
    """File with the key that clients send as 'Authorization: Bearer KEY'; unset asks for none."""
    api_key_env: str | None = None
    """Environment variable that holds the key, in place of a file."""
    stop_timeout: float = 30.0
    """Seconds that requests under way have to be answered after SIGTERM or Ctrl-C."""
    use_ms: bool = False
    """Take the model from ModelScope instead of the Hugging Face hub."""


Config = SFTConfig | RMConfig | DPOConfig | PPOConfig | LoraCombinerConfig | ServeRMConfig

COMMANDS: dict[str, type] = {
    "train_sft": SFTConfig,
    "train_rm": RMConfig,
    "train_dpo": DPOConfig,
    "train_ppo_ray": PPOConfig,
    "lora_combiner": LoraCombinerConfig,
    "serve_rm": ServeRMConfig,
}


def command_of(config: Config) -> str:
    """Returns: the command whose tree this is."""
    return next(name for name, tree in COMMANDS.items() if type(config) is tree)

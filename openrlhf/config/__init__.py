"""Typed settings of every command: one frozen dataclass for each group of flags."""

from openrlhf.config.algo import AdvantageConfig, AlgoConfig, KLConfig
from openrlhf.config.checks import check, resolve
from openrlhf.config.checks_serve import check_serve_device
from openrlhf.config.checks_system import check_device, detect_device, device_notes, known_device, settle_device
from openrlhf.config.ckpt import CkptConfig, LoggerConfig, MlflowConfig, PPOCkptConfig, WandbConfig
from openrlhf.config.commands import (
    COMMANDS,
    Config,
    DPOConfig,
    LoraCombinerConfig,
    PPOConfig,
    RMConfig,
    ServeRMConfig,
    SFTConfig,
    command_of,
)
from openrlhf.config.data import (
    EvalConfig,
    PreferenceDataConfig,
    PromptDataConfig,
    SFTDataConfig,
    SupervisedDataConfig,
    SupervisedEvalConfig,
)
from openrlhf.config.deepspeed import (
    DeepSpeedConfig,
    LoadingConfig,
    LoraConfig,
    PPODeepSpeedConfig,
    PrecisionConfig,
    RMDeepSpeedConfig,
    ServeDeepSpeedConfig,
)
from openrlhf.config.errors import ConfigError
from openrlhf.config.flags_yaml import to_flags_yaml
from openrlhf.config.model import (
    ActorConfig,
    CriticConfig,
    DPOModelConfig,
    DPORefConfig,
    ModelConfig,
    PlacementConfig,
    RefConfig,
    RMModelConfig,
    SFTModelConfig,
)
from openrlhf.config.notes import notes
from openrlhf.config.optimizer import AdamConfig, MuonConfig, OptimizerConfig
from openrlhf.config.parse import parse
from openrlhf.config.reward import RewardConfig, ServeRewardConfig
from openrlhf.config.rollout import RolloutConfig, VllmConfig
from openrlhf.config.train import PPOTrainConfig, SFTTrainConfig, TrainConfig

__all__ = [
    "COMMANDS",
    "ActorConfig",
    "AdamConfig",
    "AdvantageConfig",
    "AlgoConfig",
    "CkptConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DPOConfig",
    "DPOModelConfig",
    "DPORefConfig",
    "DeepSpeedConfig",
    "EvalConfig",
    "KLConfig",
    "LoadingConfig",
    "LoggerConfig",
    "LoraCombinerConfig",
    "LoraConfig",
    "MlflowConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimizerConfig",
    "PPOCkptConfig",
    "PPOConfig",
    "PPODeepSpeedConfig",
    "PPOTrainConfig",
    "PlacementConfig",
    "PrecisionConfig",
    "PreferenceDataConfig",
    "PromptDataConfig",
    "RMConfig",
    "RMDeepSpeedConfig",
    "RMModelConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTModelConfig",
    "SFTTrainConfig",
    "ServeDeepSpeedConfig",
    "ServeRMConfig",
    "ServeRewardConfig",
    "SupervisedDataConfig",
    "SupervisedEvalConfig",
    "TrainConfig",
    "VllmConfig",
    "WandbConfig",
    "check",
    "check_device",
    "check_serve_device",
    "command_of",
    "detect_device",
    "device_notes",
    "known_device",
    "notes",
    "parse",
    "resolve",
    "settle_device",
    "to_flags_yaml",
]

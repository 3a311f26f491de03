"""The backend protocol on DeepSpeed: ZeRO 0 to 3, over NCCL on GPUs and gloo on CPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from openrlhf.backends.adapter_weights import merged_parameters, write_adapter_folder
from openrlhf.backends.answers import Answers
from openrlhf.backends.base import StepResult
from openrlhf.backends.checkpoint_files import load_training_state, save_training_state
from openrlhf.backends.distributed import shutdown_distributed
from openrlhf.backends.ds_config import KEEP_WHOLE, effective_stage, inference_config, training_config
from openrlhf.backends.frozen import fingerprint
from openrlhf.backends.movement import MovementWatch
from openrlhf.backends.moving_average import MovingAverage
from openrlhf.backends.muon import rates_of
from openrlhf.backends.optimizer import engine_with_optimizer
from openrlhf.backends.parked import Parked
from openrlhf.backends.residence import give_up, leave_accelerator, return_to
from openrlhf.backends.weights import full_parameters, write_hf_folder
from openrlhf.config import ConfigError, DeepSpeedConfig, OptimizerConfig
from openrlhf.models.adapters import has_adapters
from openrlhf.models.compiling import compile_layers
from openrlhf.models.forward import unwrap
from openrlhf.models.loading import DTYPES, load_causal_lm
from openrlhf.models.probe import plan_forward
from openrlhf.models.value_head import HeadSpec, set_statistics


class GradientError(ArithmeticError):
    """A gradient that is not finite, where no loss scale can have caused it."""


def _device(name: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def _loading(ds: DeepSpeedConfig) -> dict[str, Any]:
    """What ``load_causal_lm`` is told of a model that is trained and of one that only answers."""
    return {
        "dtype": DTYPES[ds.param_dtype],
        "attn_implementation": ds.attn_implementation,
        "experts_implementation": ds.experts_implementation,
        "liger": ds.use_liger_kernel,
    }


class DeepSpeedBackend(Answers):
    """One model, with an optimizer (``for_training``) or without one (``for_inference``).

    Every method is a collective: all ranks call it, in the same order. The process group must stand already
    (``init_distributed``).
    """

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        packing_samples: bool,
        stage: int,
        trainable: bool,
        fp16: bool = False,
        ema: bool = False,
        any_ranks: bool = False,
    ) -> None:
        """Takes over what the two constructors below prepared.

        Args:
            model: a DeepSpeed engine, or a plain model (inference on stages 0 to 2).
            stage: of ZeRO, as it really runs.
            fp16: steps may be skipped because the loss scale was too high.
            ema: a moving average of the weights is kept, from here on.
            any_ranks: checkpoints of another number of ranks may be loaded.
        """
        self.model = model
        self.module: Any = unwrap(model)
        self.device = device
        self.stage = stage
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._trainable = trainable
        self._fp16 = fp16
        self._any_ranks = any_ranks
        self._engine = None if model is self.module else model
        # DeepSpeed has laid nothing out in buffers of its own.
        self._plain = self._engine is None or stage == 0
        # fp32 without ZeRO: the one case in which DeepSpeed neither clips nor tells the norm.
        self._plain_norm: float | None = None
        self.plan = plan_forward(model, packing_samples=packing_samples, device=device)
        self._average = MovingAverage(self.module) if ema else None
        self._movement = MovementWatch(self.module, device) if trainable else None
        self._last_step: StepResult | None = None
        # While the model is off its accelerator, what brings it back.
        self._parked: Parked | None = None
        adapted = trainable and has_adapters(self.module)
        self._base = fingerprint(self.module, device, sharded=stage == 3) if adapted else None

    @classmethod
    def for_training(
        cls,
        model_path: str | Path,
        *,
        ds: DeepSpeedConfig,
        optimizer: OptimizerConfig,
        gradient_checkpointing: bool = False,
        gradient_checkpointing_reentrant: bool = False,
        total_steps: int,
        device: str,
        seed: int = 42,
        trust_remote_code: bool = False,
        keep_whole: int = KEEP_WHOLE,
        head: HeadSpec | None = None,
        ema: bool = False,
    ) -> DeepSpeedBackend:
        """Loads a model and an optimizer.

        Args:
            total_steps: optimizer steps of the whole run, which the learning-rate schedule spans.
            device: "cpu" or "cuda".
            seed: of everything random in training on this rank.
            keep_whole: on stage 3, parameters with fewer elements than this are not sharded.
            head: a scalar head in place of the one that gives logits: a critic or a reward model.
            ema: a moving average of the weights is kept, which starts at the loaded ones.
        """
        where = _device(device)
        torch.manual_seed(seed)
        config = training_config(ds, optimizer.max_norm, where, keep_whole=keep_whole)
        stage = effective_stage(ds.zero_stage, ds.param_dtype)
        model = load_causal_lm(
            model_path,
            **_loading(ds),
            device=where,
            trust_remote_code=trust_remote_code,
            gradient_checkpointing=gradient_checkpointing,
            gradient_checkpointing_reentrant=gradient_checkpointing_reentrant,
            zero3=config if stage == 3 else None,
            head=head,
            lora=ds.lora if ds.lora.rank else None,
            load_in_4bit=ds.load_in_4bit,
            seed=seed,
        )
        torch.manual_seed(seed + dist.get_rank())  # Ranks share their adapters, and each has its own dropout.
        engine, stepped = engine_with_optimizer(model, optimizer, total_steps, where, DTYPES[ds.param_dtype], config)
        backend = cls(
            engine,
            device=where,
            packing_samples=ds.packing_samples,
            stage=stage,
            trainable=True,
            fp16=ds.param_dtype == "fp16",
            ema=ema,
            any_ranks=ds.use_universal_ckpt,
        )
        if ds.torch_compile:
            compile_layers(backend.module)
        if stage == 0:
            stepped.register_step_pre_hook(backend._clip_hook(optimizer.max_norm))
        return backend

    @classmethod
    def for_inference(
        cls,
        model_path: str | Path,
        *,
        ds: DeepSpeedConfig,
        device: str,
        trust_remote_code: bool = False,
        keep_whole: int = KEEP_WHOLE,
        head: HeadSpec | None = None,
    ) -> DeepSpeedBackend:
        """Loads a model that only answers; sharded over the ranks on stage 3, whole on each otherwise.

        Args: as ``for_training``.
        """
        where = _device(device)
        sharded = ds.zero_stage == 3
        config = inference_config(ds, where, keep_whole=keep_whole) if sharded else None
        model = load_causal_lm(
            model_path,
            **_loading(ds),
            device=where,
            trust_remote_code=trust_remote_code,
            zero3=config,
            head=head,
        )
        model.requires_grad_(False)
        if sharded:
            import deepspeed

            model, *_ = deepspeed.initialize(model=model, config=config)
        model.eval()
        backend = cls(model, device=where, packing_samples=ds.packing_samples, stage=ds.zero_stage, trainable=False)
        if ds.torch_compile:
            compile_layers(backend.module)
        return backend

    @property
    def config(self) -> Any:
        """The transformers config; with a scalar head, ``mean`` and ``std`` are the statistics of its scores."""
        return self.module.config

    def set_reward_statistics(self, mean: float, std: float) -> None:
        """What ``save_hf`` is to write as the statistics of a reward model's scores.

        Raises: ConfigError where they are no numbers, or ``std`` is not above 0.
        """
        set_statistics(self.module.config, mean, std, source="the reward model's evaluation")

    def backward(self, loss: torch.Tensor) -> None:
        """Adds this rank's share: the sum over ranks and micro-batches of what is given here is the loss.

        Args:
            loss: scalar with a gradient path, zero too.
        """
        # DeepSpeed divides the sum over ranks by their number.
        self._engine.backward(loss * self.world_size)

    def step(self) -> StepResult:
        """Clips, moves the weights, clears the gradients and moves the scheduler.

        Raises:
            GradientError: the gradient is not finite, other than by an fp16 loss scale that was too high.
        """
        rates = rates_of(self._engine.optimizer.param_groups)
        self._engine.step()
        skipped = not self._engine.was_step_applied()
        norm = self._plain_norm if self.stage == 0 else self._engine.get_global_grad_norm()
        norm = math.nan if skipped else float(norm)
        if not math.isfinite(norm) and not (skipped and self._fp16):
            raise GradientError(f"the gradient's norm is {norm} in optimizer step {self._engine.global_steps}")
        self._last_step = StepResult(grad_norm=norm, skipped=skipped, **rates)
        return self._last_step

    def _clip_hook(self, max_norm: float) -> Any:
        def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            norm = nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else math.inf)
            self._plain_norm = float(norm)
            if not math.isfinite(self._plain_norm):
                raise GradientError(f"the gradient's norm is {self._plain_norm}; no weight was moved")

        return clip

    def all_reduce(self, value: float, op: str = "sum") -> float:
        """Returns: ``value`` reduced over the ranks ("sum", "max" or "min"), the same on all."""
        ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        tensor = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, ops[op])
        return tensor.item()

    def movement_warning(self) -> str | None:
        """To be called after each ``step``.

        Returns: once in a run, a sentence about trainable weights that do not move; None otherwise.
        """
        return None if self._last_step is None or self._movement is None else self._movement.warning(self._last_step)

    def unmoved_parameters(self) -> list[str]:
        """Names of trainable parameters that stand where they stood when the model was loaded (or a checkpoint was).

        To be asked after a step whose learning rate was above 0. Experts that no token was routed to are named too.
        """
        return [] if self._movement is None else self._movement.unmoved()

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields: HF names with whole tensors, tied weights once and adapters merged; they are live or made on the way,
        so hold few at a time.

        Every rank must consume it fully and in order.
        """
        parameters = merged_parameters if has_adapters(self.module) else full_parameters
        return parameters(self.module, sharded=self.stage == 3)

    def save_hf(self, folder: Path, *, ema: bool = False) -> None:
        """Writes a folder that transformers loads, or, of a model with adapters, their folder that peft loads; the
        tokenizer is not its business.

        Args:
            ema: the moving average of the weights instead of the weights.

        Raises:
            ConfigError: there is no moving average.
            RankError: it could not be written; what stood in the folder before still stands.
        """
        average = self._kept_average() if ema else None
        write = write_adapter_folder if has_adapters(self.module) else write_hf_folder
        write(self.module, Path(folder), sharded=self.stage == 3, average=average)

    def ema_update(self, beta: float) -> None:
        """Takes the present weights into their moving average: beta * average + (1 - beta) * weights.

        To be called after a ``step`` that was not skipped.

        Raises: ConfigError where none is kept.
        """
        self._kept_average().update(beta)

    def _kept_average(self) -> MovingAverage:
        if self._average is None:
            raise ConfigError("no moving average of the weights is kept: it starts with the run, --train.enable_ema")
        return self._average

    def save_checkpoint(self, folder: Path, state: dict[str, Any]) -> None:
        """Writes all that training needs to go on bit for bit: weights, their moving average, optimizer, schedule, RNG
        of all ranks.

        Args:
            state: what else the caller needs; anything that pickles.

        Raises:
            RankError: it could not be written, on all ranks; ``folder`` is then as it was.
        """
        save_training_state(self._engine, Path(folder), state, self._average, base=self._base)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Returns: the ``state`` that was given to ``save_checkpoint``.

        Raises:
            ConfigError: another number of ranks (unless ``ds.use_universal_ckpt``), another ZeRO stage or another dtype
                has written it, or it holds no moving average where one is kept.
            RankError: the folder is missing or incomplete.
        """
        state = load_training_state(
            self._engine, Path(folder), self._average, any_ranks=self._any_ranks, base=self._base
        )
        self._movement, self._last_step = MovementWatch(self.module, self.device), None
        return state

    def offload(self) -> None:
        """Moves weights and optimizer to host memory; nothing to do on a CPU.

        A sharded model without an optimizer stays: each rank holds only its part of it.
        """
        if self.device.type != "cpu" and self._parked is None and (self._plain or self._trainable):
            self._parked = leave_accelerator(self.module, self._engine, plain=self._plain)

    def reload(self) -> None:
        """Undoes ``offload``."""
        if self._parked is not None:
            return_to(self.device, self.module, self._engine, self._parked, plain=self._plain)
            self._parked = None

    def release(self) -> None:
        """Gives up the model's memory, while the process group stands on. Nothing may be asked of it afterwards."""
        if self._engine is not None:
            self._engine.destroy()
        give_up(self.module, self.device)
        self.model = self.module = self._engine = None

    def close(self) -> None:
        """Meets the other ranks and leaves the process group, so that no exit aborts."""
        if self._engine is not None:
            self._engine.destroy()
        shutdown_distributed()

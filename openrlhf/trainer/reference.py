"""What a reference model says about responses: asked during training, or once for all before it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from openrlhf.algorithms.preference_loss import response_sums
from openrlhf.backends.deepspeed_backend import DeepSpeedBackend
from openrlhf.backends.distributed import from_rank_0, raise_if_any
from openrlhf.config import ConfigError, DPOConfig
from openrlhf.data.batching import plan_micro_batches
from openrlhf.data.packed_batch import PackedBatch
from openrlhf.data.pair_packing import pack_pairs
from openrlhf.data.preference import PreferenceDataset
from openrlhf.tracking.progress import Bar
from openrlhf.trainer.supervised_outputs import state_to_resume
from openrlhf.trainer.supervised_run import check_vocabulary

FILE = "reference_logprobs.safetensors"


def reference_path(config: DPOConfig) -> str:
    """Returns: folder or hub name of the reference model."""
    return config.ref.model_name_or_path or config.model.model_name_or_path


def reference_flag(config: DPOConfig) -> str:
    """Returns: the flag that names it."""
    return "--ref.model_name_or_path" if config.ref.model_name_or_path else "--model.model_name_or_path"


class ReferenceModel:
    """A frozen model, or the one below the adapters of a model that is trained; every method is a collective."""

    def __init__(self, backend: DeepSpeedBackend, *, offload: bool = False, below_adapters: bool = False) -> None:
        """Args:
        offload: it stays in host memory but for the time that it is ``at_hand``.
        below_adapters: ``backend`` is the model that is trained.
        """
        self.backend = backend
        self._offload = offload
        self._below_adapters = below_adapters
        if offload:
            backend.offload()

    @classmethod
    def load(cls, config: DPOConfig, parts: list[PreferenceDataset], device: str) -> ReferenceModel:
        """Args: ``parts``: the data that it is going to be asked about.

        Raises: ConfigError where it lacks embeddings for them.
        """
        path = reference_path(config)
        backend = DeepSpeedBackend.for_inference(
            path, ds=config.ds, device=device, trust_remote_code=config.trust_remote_code
        )
        check_vocabulary(backend, parts, path, reference_flag(config))
        return cls(backend, offload=config.ref.offload and not config.ref.precompute)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """While it lasts, the model is where it can be asked."""
        if not self._offload:
            yield
            return
        self.backend.reload()
        yield
        self.backend.offload()

    @torch.no_grad()
    def sums(self, batch: PackedBatch) -> torch.Tensor:
        """Returns: float64 [N], the log-probs of each row's response, summed, on the model's device."""
        batch = batch.to(self.backend.device)
        scores = self.backend.forward(batch, adapters=not self._below_adapters)
        sums, _ = response_sums(scores.logprobs, batch.action_mask, batch.cu_seqlens)
        return sums

    def release(self) -> None:
        """Gives up its memory, where it has any of its own. Nothing may be asked of it afterwards."""
        if not self._below_adapters:
            self.backend.release()


def score_pairs(
    reference: ReferenceModel, data: PreferenceDataset, *, micro_batch_size: int, pad_token_id: int, what: str
) -> torch.Tensor:
    """Asks about all pairs, dealt out over the ranks; collective.

    Args:
        what: of the data, for the bar that rank 0 shows.

    Returns: float64 [pairs, 2] in host memory, the same on all ranks: sums of the chosen and of the rejected response.

    Raises: ConfigError where one is not finite, naming the row.
    """
    backend = reference.backend
    table = torch.zeros(len(data), 2, dtype=torch.float64)
    plan = plan_micro_batches(data.lengths.tolist(), backend.world_size, micro_batch_size=micro_batch_size)
    with _bar(f"reference log-probs of the {what} data", len(plan[0])) as bar:
        for pairs in plan[backend.rank]:
            sums = reference.sums(pack_pairs(data, pairs, pad_token_id))
            if pairs:
                table[pairs] = sums.view(-1, 2).cpu()
            bar.update()
    held = table.to(backend.device)
    dist.all_reduce(held)
    table = held.cpu()
    broken = (~torch.isfinite(table)).any(1).nonzero().flatten()
    if broken.numel():
        record = data[int(broken[0])]
        raise ConfigError(
            f"the reference model gives no finite log-prob for {record.source}, row {record.row} (and "
            f"{broken.numel() - 1} more): its weights are broken, or --ds.param_dtype cannot hold them"
        )
    return table


@contextmanager
def _bar(name: str, total: int) -> Iterator[Bar]:
    """Shows how many of ``total`` micro-batches are done, on rank 0; on the others a bar that nobody sees."""
    with ExitStack() as stack:
        first = dist.get_rank() == 0
        stream = sys.stdout if first else stack.enter_context(open(os.devnull, "w"))
        bar = Bar(name, total, "micro-batches", stream, live=first and stream.isatty())
        stack.callback(bar.close)
        yield bar


@dataclass(frozen=True)
class Store:
    """Where the log-probs of a run stand, so that a resumed one need not compute them again.

    Attributes:
        file: beside the states.
        reads: the run goes on from a state.
        writes: the run leaves states behind.
    """

    file: Path
    reads: bool
    writes: bool

    def read(self, marks: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Args: ``marks``: by part of the data, what its log-probs follow from.

        Returns: the parts that are there with the same mark.

        Raises: ConfigError where the file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        if not self.reads or not self.file.is_file():
            return {}
        try:
            with safe_open(self.file, framework="pt") as stored:
                there = stored.metadata() or {}
                return {part: stored.get_tensor(part) for part, mark in marks.items() if there.get(part) == mark}
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{self.file} cannot be read ({error}): remove it, and the reference's log-probs are computed again"
            ) from error

    def write(self, tables: Mapping[str, torch.Tensor], marks: Mapping[str, str]) -> None:
        """Raises: OSError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self.writes:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        try:
            save_file(dict(tables), partial, metadata=dict(marks))
        except SafetensorError as error:  # of a full disk, too
            raise OSError(str(error)) from error
        os.replace(partial, self.file)


def precomputed(
    config: DPOConfig,
    parts: Mapping[str, PreferenceDataset],
    load: Callable[[list[PreferenceDataset]], ReferenceModel],
    *,
    pad_token_id: int,
) -> dict[str, torch.Tensor]:
    """Log-probs of the reference for all data; the model is gone again when this returns. Collective.

    Args:
        parts: data by name.
        load: makes the reference for some of them, where it has to be asked.

    Returns: by name, float64 [pairs, 2].

    Raises:
        ConfigError: the model cannot be used.
        RankError: they could not be stored.
    """
    ckpt = config.ckpt
    # Without a state to go on from, a file that is there belongs to a run that is gone, whose reference may be as well.
    reads, writes = state_to_resume(ckpt) is not None, ckpt.save_steps > 0 and not ckpt.disable_ds
    store = Store(Path(ckpt.path) / FILE, reads, writes)
    first = dist.get_rank() == 0
    marks = {name: mark_of(config, data) for name, data in parts.items()} if first and (reads or writes) else {}
    tables = from_rank_0(_on_rank_0(f"reading {store.file}", lambda: store.read(marks)))
    missing = [name for name in parts if name not in tables]
    if first:
        for name in parts:
            how = f"to be computed for {len(parts[name])} pairs" if name in missing else f"read from {store.file}"
            print(f"reference log-probs of the {name} data: {how}", flush=True)
    if not missing:
        return tables
    reference = load([parts[name] for name in missing])
    size = config.train.micro_batch_size
    for name in missing:
        tables[name] = score_pairs(reference, parts[name], micro_batch_size=size, pad_token_id=pad_token_id, what=name)
    reference.release()
    _on_rank_0(f"writing {store.file}", lambda: store.write(tables, marks))
    return tables


def _on_rank_0(what: str, action: Callable[[], Any]) -> Any:
    """Collective: runs ``action`` on rank 0, and ends all ranks where it fails. Returns: on rank 0, what it gives."""
    result, problem = None, None
    if dist.get_rank() == 0:
        try:
            result = action()
        except (ConfigError, OSError) as error:
            problem = error
    raise_if_any(what, problem)
    return result


def mark_of(config: DPOConfig, data: PreferenceDataset) -> str:
    """What the log-probs of ``data`` follow from, as one word: model, dtype, tokens, and which are responses."""
    packed = config.reference_below_adapters and config.ds.load_in_4bit
    dtype = f"{config.ds.param_dtype} over nf4" if packed else config.ds.param_dtype
    digest = sha256(f"{reference_path(config)} {dtype} {len(data)}".encode())
    for record in data:
        for tokens, mask in ((record.chosen, record.chosen_mask), (record.rejected, record.rejected_mask)):
            digest.update(np.asarray([len(tokens), *tokens], dtype=np.int64).tobytes())
            digest.update(mask.numpy().tobytes())
    return digest.hexdigest()


def as_row_field(table: torch.Tensor, pairs: Any) -> torch.Tensor:
    """Returns: float64 [2K], the sums of K pairs in the order of their rows; [1] zeros for the batch of no pairs."""
    return table[list(pairs)].flatten() if len(pairs) else torch.zeros(1, dtype=table.dtype)

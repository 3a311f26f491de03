"""What a supervised run leaves behind: metrics, checkpoints, the exported model, the report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from openrlhf.backends.base import Backend
from openrlhf.backends.checkpoints import CheckpointStore, refuse_other_run
from openrlhf.backends.distributed import from_rank_0, raise_if_any
from openrlhf.backends.shapes import Shapes, refuse_other_model, write_shapes
from openrlhf.config import CkptConfig, ConfigError, LoggerConfig
from openrlhf.models.tokenizer_files import save_tokenizer
from openrlhf.tracking.metrics import MultiTracker, build_trackers
from openrlhf.tracking.progress import Bar, Console
from openrlhf.tracking.report import report_what_there_is, write_report
from openrlhf.trainer.fixed_settings import read_fixed, refuse_other_settings, write_fixed
from openrlhf.trainer.profiling import FOLDER
from openrlhf.utils.run_lock import RunLock

CONFIG_FILE = "config.yaml"


@contextmanager
def locked(ckpt: CkptConfig, warn: Callable[[str], None], *, keeps_best: bool = False) -> Iterator[None]:
    """While it lasts, no other run writes into the folders of this one.

    Args:
        keeps_best: a model is written below --ckpt.path whether or not there are checkpoints.

    Raises:
        ConfigError: another run holds one of them.
        OSError: one of them cannot be made.
    """
    folders = {"--ckpt.output_dir": ckpt.output_dir}
    if ckpt.save_steps > 0 or keeps_best:
        folders["--ckpt.path"] = ckpt.path
    with ExitStack() as held:
        for flag, folder in folders.items():
            held.enter_context(RunLock(folder, flag=flag, warn=warn))
        yield


@contextmanager
def sole_run(ckpt: CkptConfig, warn: Callable[[str], None]) -> Iterator[None]:
    """While it lasts, no other run writes into the folders of this one; collective.

    Raises:
        ConfigError: another run holds one of them, or has left checkpoints that this one would be mixed up with.
        RankError: one of them cannot be made.
    """
    with ExitStack() as held:
        problem: Exception | None = None
        if dist.get_rank() == 0:
            try:
                held.enter_context(locked(ckpt, warn))
                refuse_used(ckpt)
            except (ConfigError, OSError) as error:
                problem = error
        raise_if_any(f"taking {ckpt.output_dir}", problem)
        yield


def _store_of(ckpt: CkptConfig) -> CheckpointStore:
    return CheckpointStore(Path(ckpt.path), max_num=ckpt.max_num, max_mem_gb=ckpt.max_mem)


def state_to_resume(ckpt: CkptConfig) -> Path | None:
    """Returns: the state that the run goes on from; None where it starts at its first step."""
    return _store_of(ckpt).latest() if ckpt.load_enable else None


def refuse_used(ckpt: CkptConfig) -> None:
    """Raises ConfigError where a new run would save beside states of another one."""
    store = _store_of(ckpt)
    resumable = store.latest() is not None
    if ckpt.save_steps > 0 and not (ckpt.load_enable and resumable):
        refuse_other_run(ckpt.path, [store], resumable=resumable)


class SupervisedOutputs:
    """Rank 0 writes and speaks; the others take part where a model is gathered. Every method is a collective."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Any,
        *,
        shapes: Shapes,
        ckpt: CkptConfig,
        logger: LoggerConfig,
        command: str,
        title: str,
        config_yaml: str,
        before_export: Callable[[], str] | None = None,
    ) -> None:
        """Args:
        shapes: of the model's parameters, which a state to go on from must share.
        command: names the run where --logger.wandb.run_name does not.
        title: of the report.
        config_yaml: the resolved settings.
        before_export: a collective that adds what only the trained model tells to its config, and says so in a line.
        """
        self._backend = backend
        self._tokenizer = tokenizer
        self._shapes = dict(shapes)
        self._ckpt = ckpt
        self._logger = logger
        self.command = command
        self._title = title
        self._yaml = config_yaml
        self._before_export = before_export
        self._folder = Path(ckpt.output_dir)
        self.profile_folder = self._folder / FOLDER
        self._store = _store_of(ckpt)
        self._trackers: MultiTracker | None = None
        self._console: Console | None = None
        self._total = 0

    def resume(self, fixed: Mapping[str, Any]) -> dict[str, Any] | None:
        """Loads the newest checkpoint where --ckpt.load_enable asks for it.

        Args:
            fixed: by flag, what the run that wrote it must have had as well.

        Returns: the state that was saved with it; None where there is none to load.

        Raises: ConfigError where another model, other settings or another layout of ranks have written it.
        """
        if not self._ckpt.load_enable:
            return None
        # Rank 0 decides, so that ranks which see the folder at different moments take the same one.
        folder = from_rank_0(self._store.latest() if self._backend.rank == 0 else None)
        if folder is None:
            self.note(f"--ckpt.load_enable: there is no checkpoint under {self._ckpt.path}, starting anew")
            return None

        def refuse_others() -> None:
            # Before anything is loaded: what the optimizer or the adapters of another run hold would not fit.
            refuse_other_settings(folder, read_fixed(folder), fixed)
            refuse_other_model(folder, self._shapes)

        self._on_rank_0(f"reading {folder}", refuse_others)
        state = self._backend.load_checkpoint(folder)
        refuse_other_settings(folder, state["fixed"], fixed)
        self._store.go_on_after(state["step"])
        self.note(f"going on after step {state['step']} from {folder}")
        return state

    def open(self, step: int, total_steps: int) -> None:
        """Opens the files of the run; what a stopped run wrote after ``step`` is cut."""
        self._total = total_steps

        def open_files() -> None:
            self._console = Console(total_steps, first_step=step)
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / CONFIG_FILE).write_text(self._yaml)
            self._trackers = build_trackers(
                self._logger,
                self._folder,
                run_name=self._logger.wandb.run_name or self.command,
                run_config={"flags": self._yaml},
                resume_step=step,
                warn=self._console.warn,
            )

        self._on_rank_0(f"opening {self._folder}", open_files)

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Bar]:
        """Shows a bar over ``total`` items while the body runs; on the other ranks one that nobody sees."""
        if self._console is not None:
            with self._console.phase(name, total) as bar:
                yield bar
            return
        with open(os.devnull, "w") as nowhere:
            yield Bar(name, total, "samples", nowhere, live=False)

    def log(self, step: int, metrics: Mapping[str, float], *, always: bool = False) -> None:
        """Takes the metrics of a step, which every --logger.logging_steps are written and printed.

        Args:
            always: write and print at any step.

        Raises: RankError where they could not be written.
        """
        due = always or step % self._logger.logging_steps == 0

        def write() -> None:
            if self._trackers is not None and self._console is not None:
                self._trackers.log(step, metrics, always=always)
                if due:
                    self._console.step(step, metrics)

        if due:
            self._on_rank_0(f"writing the metrics of step {step}", write)
        else:
            write()

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Writes what --ckpt.disable_ds and --ckpt.save_hf ask for; older checkpoints go once it is whole.

        Raises: RankError where it could not be written; older checkpoints are then unharmed.
        """
        self._on_rank_0(f"removing what a stopped run left in {self._ckpt.path}", self._store.sweep)
        if not self._ckpt.disable_ds:
            folder = self._store.folder(step)
            self._backend.save_checkpoint(folder, state)
            self._on_rank_0(f"writing the checkpoint {folder}", lambda: self._describe_state(folder, state["fixed"]))
        if self._ckpt.save_hf:
            self.export(self._store.export_folder(step))
        self._on_rank_0(f"removing old checkpoints of {self._ckpt.path}", self._store.prune)

    def _describe_state(self, folder: Path, fixed: Mapping[str, Any]) -> None:
        write_fixed(folder, fixed)
        (folder / CONFIG_FILE).write_text(self._yaml)
        write_shapes(folder, self._shapes)

    def export(self, folder: Path) -> None:
        """Writes model and tokenizer as a folder that transformers loads.

        Raises: RankError where it could not be written.
        """
        if self._before_export is not None:
            self.note(self._before_export())
        self._backend.save_hf(folder)

        def write_rest() -> None:
            save_tokenizer(self._tokenizer, folder)
            (folder / CONFIG_FILE).write_text(self._yaml)

        self._on_rank_0(f"saving the tokenizer to {folder}", write_rest)

    def finish(self) -> None:
        """Exports the model to --ckpt.output_dir and writes the report."""
        self.export(self._folder)
        self._on_rank_0(f"writing the metrics to {self._folder}", self._close_trackers)

        def report() -> None:
            page = write_report(self._folder, self._title)
            self.note(f"model and metrics: {self._folder}; report: {page}")

        self._on_rank_0(f"writing the report to {self._folder}", report)

    def close(self) -> None:
        """After a failure, flushes what is open and writes the report of what there is, on one rank alone; a second
        failure does not hide the first.
        """
        unfinished = self._trackers is not None
        try:
            self._close_trackers()
        except OSError as error:
            self.warn(f"the last metrics are lost: {error}")
        if unfinished:
            try:
                report_what_there_is(self._folder, self._title)
            except (OSError, ValueError) as error:
                self.warn(f"there is no report: {error}")

    def warn(self, text: str) -> None:
        """Prints a warning, once for all ranks."""
        self.note(f"warning: {text}")

    def note(self, text: str) -> None:
        """Prints a line, once for all ranks."""
        if self._backend.rank == 0:
            (self._console or Console(self._total)).note(text)

    def _close_trackers(self) -> None:
        trackers, self._trackers = self._trackers, None
        if trackers is not None:
            trackers.close()

    def _on_rank_0(self, what: str, action: Callable[[], Any]) -> None:
        """Collective: runs ``action`` on rank 0; an OSError there ends all ranks with a sentence about ``what``, and a
        ConfigError with its own."""
        problem: Exception | None = None
        if self._backend.rank == 0:
            try:
                action()
            except (ConfigError, OSError) as error:
                problem = error
        raise_if_any(what, problem)

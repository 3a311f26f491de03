"""What a supervised run leaves behind: metrics, checkpoints, the exported model, the report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openrlhf.backends.base import Backend
from openrlhf.backends.checkpoints import CheckpointStore
from openrlhf.backends.distributed import raise_if_any
from openrlhf.config import CkptConfig, LoggerConfig
from openrlhf.tracking.metrics import MultiTracker, build_trackers
from openrlhf.tracking.progress import Bar, Console
from openrlhf.tracking.report import write_report

CONFIG_FILE = "config.yaml"


class SupervisedOutputs:
    """Rank 0 writes and speaks; the others take part where a model is gathered. Every method is a collective."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Any,
        *,
        ckpt: CkptConfig,
        logger: LoggerConfig,
        command: str,
        title: str,
        config_yaml: str,
    ) -> None:
        """Args:
        command: names the run where --logger.wandb.run_name does not.
        title: of the report.
        config_yaml: the resolved settings.
        """
        self._backend = backend
        self._tokenizer = tokenizer
        self._ckpt = ckpt
        self._logger = logger
        self._command = command
        self._title = title
        self._yaml = config_yaml
        self._folder = Path(ckpt.output_dir)
        self._store = CheckpointStore(Path(ckpt.path), max_num=ckpt.max_num, max_mem_gb=ckpt.max_mem)
        self._trackers: MultiTracker | None = None
        self._console: Console | None = None
        self._total = 0

    def resume(self) -> dict[str, Any] | None:
        """Loads the newest checkpoint where --ckpt.load_enable asks for it.

        Returns: the state that was saved with it; None where there is none to load.
        """
        if not self._ckpt.load_enable:
            return None
        newest = -1
        if self._backend.rank == 0 and (latest := self._store.latest()) is not None:
            newest = int(latest.name.removeprefix("global_step"))
        # Rank 0 decides, so that ranks which see the folder at different moments take the same one.
        newest = int(self._backend.all_reduce(newest, "max"))
        if newest < 0:
            self._say(f"--ckpt.load_enable: there is no checkpoint under {self._ckpt.path}, starting anew")
            return None
        folder = self._store.folder(newest)
        state = self._backend.load_checkpoint(folder)
        self._say(f"going on after step {newest} from {folder}")
        return state

    def open(self, step: int, total_steps: int) -> None:
        """Opens the files of the run; what a stopped run wrote after ``step`` is cut."""
        self._total = total_steps
        problem: Exception | None = None
        if self._backend.rank == 0:
            self._console = Console(total_steps, first_step=step)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / CONFIG_FILE).write_text(self._yaml)
                self._trackers = build_trackers(
                    self._logger,
                    self._folder,
                    run_name=self._logger.wandb.run_name or self._command,
                    run_config={"flags": self._yaml},
                    resume_step=step,
                    warn=self._console.warn,
                )
            except OSError as error:
                problem = error
        raise_if_any(f"opening {self._folder}", problem)

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
        """
        if self._trackers is None or self._console is None:
            return
        self._trackers.log(step, metrics, always=always)
        if always or step % self._logger.logging_steps == 0:
            self._console.step(step, metrics)

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Writes what --ckpt.disable_ds and --ckpt.save_hf ask for; older checkpoints go once it is whole.

        Raises: RankError where it could not be written; older checkpoints are then unharmed.
        """
        if not self._ckpt.disable_ds:
            folder = self._store.folder(step)
            self._backend.save_checkpoint(folder, state)
            problem: Exception | None = None
            if self._backend.rank == 0:
                try:
                    (folder / CONFIG_FILE).write_text(self._yaml)
                    self._store.prune()
                except OSError as error:
                    problem = error
            raise_if_any(f"writing the checkpoint {folder}", problem)
        if self._ckpt.save_hf:
            self.export(Path(self._ckpt.path) / f"global_step{step}_hf")

    def export(self, folder: Path) -> None:
        """Writes model and tokenizer as a folder that transformers loads."""
        self._backend.save_hf(folder)
        problem: Exception | None = None
        if self._backend.rank == 0:
            try:
                self._tokenizer.save_pretrained(folder)
                (folder / CONFIG_FILE).write_text(self._yaml)
            except OSError as error:
                problem = error
        raise_if_any(f"saving the tokenizer to {folder}", problem)

    def finish(self) -> None:
        """Exports the model to --ckpt.output_dir and writes the report."""
        self.export(self._folder)
        self.close()
        if self._backend.rank == 0:
            page = write_report(self._folder, self._title)
            self._say(f"model and metrics: {self._folder}; report: {page}")

    def close(self) -> None:
        """Flushes what is open; also after a failure, on one rank alone."""
        if self._trackers is not None:
            self._trackers.close()
            self._trackers = None

    def _say(self, text: str) -> None:
        if self._backend.rank == 0:
            (self._console or Console(self._total)).note(text)

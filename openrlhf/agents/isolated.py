"""Runs a user's own ``execute()`` in a thread beside the engine's, so that it cannot hold up the engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

from openrlhf.agents.base import AgentError, AgentExecutorBase, Engine
from openrlhf.agents.user_loop import UserLoops

_ENDED = "the engine was asked after the sample had ended"


class EngineBridge:
    """The engine as one sample sees it from another thread's event loop; see ``Engine``.

    After ``close`` it takes no request: code that goes on after its sample has ended must not sample while new weights
    are loaded.
    """

    def __init__(self, engine: Engine) -> None:
        """Call this, and ``close``, in the engine's own loop."""
        self._engine = engine
        self._home = asyncio.get_running_loop()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def weight_version(self) -> int:
        """Version of the engine's weights now."""
        return self._engine.weight_version

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """See ``Engine.generate``. The parameters may be changed as soon as this is called."""
        # Copied, as the request is made later and in another thread.
        params, prompt = copy.deepcopy(sampling_params), list(prompt_token_ids)
        return await self._there(lambda: self._engine.generate(prompt, params, multi_modal_data))

    async def check_health(self) -> None:
        """See ``Engine.check_health``."""
        await self._there(self._engine.check_health)

    def close(self) -> None:
        """Cancels requests under way and refuses others."""
        self._closed = True
        for task in self._running:
            task.cancel()

    async def _there(self, request: Callable[[], Awaitable[Any]]) -> Any:
        work = self._ask(request)
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._home)
        except RuntimeError as error:
            work.close()
            raise AgentError(_ENDED) from error
        return await asyncio.wrap_future(future)

    async def _ask(self, request: Callable[[], Awaitable[Any]]) -> Any:
        if self._closed:
            raise AgentError(_ENDED)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await request()
        finally:
            self._running.discard(task)


class IsolatedExecutor(AgentExecutorBase):
    """Another executor, run in its own thread.

    The samples of an executor share one event loop, so asyncio objects that it holds work. Its tokenizer is a copy:
    tokenizers change while they encode.
    """

    def __init__(self, executor: AgentExecutorBase) -> None:
        self._executor = executor
        self._name = f"{type(executor).__name__}.execute()"
        self._loops = UserLoops(self._name)
        self._tokenizer: Any = None
        self.retries, self.longest_block = executor.retries, executor.longest_block

    async def execute(
        self, *, sampling_params: Any, hf_tokenizer: Any, llm_engine: Engine, **others: Any
    ) -> dict[str, Any]:
        """Runs one sample; see ``AgentExecutorBase.execute``.

        The engine makes the text of its outputs, EOS and other special tokens kept, for code that reads it.

        Raises: what the executor raises; AgentError, where it blocks the thread for too long; HeldUpError, where
            another sample does.
        """
        if self._tokenizer is None:
            self._tokenizer = copy.deepcopy(hf_tokenizer)
        sampling_params.detokenize = True
        sampling_params.skip_special_tokens = False
        sampling_params.include_stop_str_in_output = True
        engine = EngineBridge(llm_engine)

        async def run() -> dict[str, Any]:
            return await self._executor.execute(
                sampling_params=sampling_params, hf_tokenizer=self._tokenizer, llm_engine=engine, **others
            )

        try:
            with self._loops.use(self.longest_block) as loop:
                return await loop.call(run, what=self._name)
        finally:
            engine.close()

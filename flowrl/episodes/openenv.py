"""`OpenEnv`: environments of OpenEnv as environments, by its clients or in this process."""

from __future__ import annotations

import inspect
from typing import Any

from flowrl.episodes.calls import called
from flowrl.episodes.environment import Answer, Reply, Row
from flowrl.episodes.text_env import TextEnvironment
from flowrl.episodes.tools import InvalidToolCall


class OpenEnv(TextEnvironment):
    """An environment of OpenEnv; a subclass makes it, and puts its actions and observations in words::

        class Echo(OpenEnv):
            def make(self):
                return EchoEnv(base_url="http://localhost:8000")

            def act(self, text):
                return EchoAction(message=text)

            def tell(self, seen):
                return seen.echoed_message

    Each episode has a client of its own, and so a session of its own, which is reset by ``Row.seed``; how many the
    server takes at a time is ``Interact(concurrency=...)``. `make` may as well give an `Environment` of the server's
    side, which is then stepped in this process, in a thread.
    """

    async def reset(self, row: Row) -> Reply:
        """The prompt, and what is seen at first."""
        made = await called(self.make, blocks=True)  # it may start a container
        self.env = await made if inspect.isawaitable(made) else made
        result = await self._ask(self.env.reset, seed=row.seed)
        seen = getattr(result, "observation", result)
        return Reply(self.opening(row, self.tell(seen)), done=bool(result.done))

    async def step(self, answer: Answer) -> Reply:
        """What is seen after the action that the answer is, and its reward."""
        try:
            action = self.act(answer.text)
        except InvalidToolCall as misfit:
            return self.misfits(misfit)
        result = await self._ask(self.env.step, action)
        seen = getattr(result, "observation", result)
        return Reply(self.tell(seen), None if result.reward is None else float(result.reward), bool(result.done))

    async def close(self) -> None:
        """End the session, if there is one."""
        if hasattr(self, "env"):
            await self._ask(self.env.close)

    async def _ask(self, method: Any, *given: Any, **named: Any) -> Any:
        """Clients are asynchronous; what runs in this process blocks."""
        if hasattr(self.env, "step_async"):
            return await called(lambda: method(*given, **named), blocks=True)
        return await called(lambda: method(*given, **named), blocks=False)

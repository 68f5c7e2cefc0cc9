"""`OpenEnv`: adapts environments of OpenEnv, through its clients or in this process."""

from __future__ import annotations

import inspect
from typing import Any

from flowrl.episodes.calls import call_user_code
from flowrl.episodes.environment import Answer, InvalidToolCall, Reply, Row
from flowrl.episodes.text_env import TextEnvironment


class OpenEnv(TextEnvironment):
    """An environment of OpenEnv; a subclass makes it and converts its actions and observations::

        class Echo(OpenEnv):
            def make(self):
                return EchoEnv(base_url="http://localhost:8000")

            def act(self, text):
                return EchoAction(message=text)

            def observation_text(self, observation):
                return observation.echoed_message

    Each episode has its own client and session, which ``Row.seed`` seeds. ``Interact(concurrency=...)`` limits the
    number of open sessions. `make` may also return the server's own `Environment`, which then runs in a thread of this
    process.
    """

    async def reset(self, row: Row) -> Reply:
        """The prompt and the first observation."""
        made = await call_user_code(self.make, blocks=True)  # it may start a container
        self.env = await made if inspect.isawaitable(made) else made
        result = await self._ask(self.env.reset, seed=row.seed)
        observation = getattr(result, "observation", result)
        return Reply(self.opening(row, self.observation_text(observation)), done=bool(result.done))

    async def step(self, answer: Answer) -> Reply:
        """The observation after the action in the answer, and its reward."""
        try:
            action = self.act(answer.text)
        except InvalidToolCall as invalid:
            return self.invalid_reply(invalid)
        result = await self._ask(self.env.step, action)
        observation = getattr(result, "observation", result)
        return Reply(
            self.observation_text(observation),
            None if result.reward is None else float(result.reward),
            bool(result.done),
        )

    async def close(self) -> None:
        """Close the session, if there is one."""
        if hasattr(self, "env"):
            await self._ask(self.env.close)

    async def _ask(self, method: Any, *given: Any, **named: Any) -> Any:
        """Call a client, which is asynchronous, or an environment of this process, which blocks."""
        if hasattr(self.env, "step_async"):
            return await call_user_code(lambda: method(*given, **named), blocks=True)
        return await call_user_code(lambda: method(*given, **named), blocks=False)

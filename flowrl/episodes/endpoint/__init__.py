"""An endpoint of OpenAI's chat completions for each episode, so that any program can be the agent."""

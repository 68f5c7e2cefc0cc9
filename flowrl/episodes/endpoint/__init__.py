"""An endpoint of OpenAI's chat completions and responses for each episode, so that any program can be the agent."""

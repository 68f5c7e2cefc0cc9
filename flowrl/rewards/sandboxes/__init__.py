"""Sandboxes, which run the programs of responses: subprocesses, Docker, SandboxFusion and E2B."""

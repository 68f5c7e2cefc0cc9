"""Requests of episodes to engines, and the clock that stops meanwhile."""

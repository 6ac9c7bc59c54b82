"""Provide the tools that an agent can call in its sandbox."""

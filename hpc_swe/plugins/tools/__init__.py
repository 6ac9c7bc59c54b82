"""What the agent can do in its sandbox."""

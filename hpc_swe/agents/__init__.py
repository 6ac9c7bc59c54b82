"""Hold what an episode consists of: agents, their tools, sandboxes, and conversations as tokens."""

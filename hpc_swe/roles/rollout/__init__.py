"""The rollout worker: runs episodes and records their tokens."""

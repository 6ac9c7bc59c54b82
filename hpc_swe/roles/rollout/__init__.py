"""Run episodes and record their tokens: the rollout worker."""

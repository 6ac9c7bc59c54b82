"""Grade episodes in fresh sandboxes: the reward worker."""

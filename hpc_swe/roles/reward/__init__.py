"""The reward worker: grades episodes in fresh sandboxes."""

"""Hold the five roles, which never import one another and meet only on disk."""

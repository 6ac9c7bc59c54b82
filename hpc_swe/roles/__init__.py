"""The five roles; they never import one another and meet only on disk."""

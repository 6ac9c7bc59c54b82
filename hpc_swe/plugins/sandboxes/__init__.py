"""Isolate what an episode runs."""

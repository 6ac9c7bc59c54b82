"""How things are put on the shared file system, and nothing of what they mean."""

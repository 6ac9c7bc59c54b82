"""Who starts processes."""

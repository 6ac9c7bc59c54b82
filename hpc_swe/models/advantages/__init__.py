"""Turn rewards into advantages."""

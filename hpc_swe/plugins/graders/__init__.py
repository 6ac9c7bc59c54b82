"""Who judges."""

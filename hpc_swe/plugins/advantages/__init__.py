"""How rewards become advantages."""

"""Load weights and adapters, and write them as files that engines read."""

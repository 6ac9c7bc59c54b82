"""Turn TOML files into the one configuration of a run, and say what follows from it."""

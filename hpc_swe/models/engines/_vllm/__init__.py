"""Hold what runs inside vLLM, or speaks with it, for the engine of that name."""

"""Build the model over its ranks, and run packed batches through it."""

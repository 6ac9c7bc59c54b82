"""The coordinator: dispatches requests, assembles groups, publishes batches."""

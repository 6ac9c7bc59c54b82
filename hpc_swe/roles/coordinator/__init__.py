"""Run the coordinator, which dispatches requests, assembles groups and publishes batches."""

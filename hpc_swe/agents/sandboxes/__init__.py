"""Open the sandboxes in which episodes act and tests run."""

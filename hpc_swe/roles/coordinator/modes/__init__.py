"""Do the work of one mode of a run: train on rewards, on conversations or on an archive, or evaluate."""

"""Make batches of the results of groups: advantages, samples, microbatches."""

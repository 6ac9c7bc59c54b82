"""Hold the benchmarks that users run: of the learner, of sandboxes, and of whole loops."""

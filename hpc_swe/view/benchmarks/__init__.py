"""Hold the benchmarks that users run: of the learner, of the weight hop, and of the whole loop.

Each prints one table with our figures, an alternative and the limits of the hardware, from one run.
"""

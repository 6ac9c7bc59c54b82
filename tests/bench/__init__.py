"""Simulators and benchmarks for users, each run as a module, and their own tests."""

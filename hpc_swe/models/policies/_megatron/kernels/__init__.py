"""Compute on one GPU, move data between GPUs, and repair megatron-core."""

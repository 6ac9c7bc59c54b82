"""Keep the optimizer's state: on GPUs, in host memory and in checkpoints."""

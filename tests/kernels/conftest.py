"""Without a GPU, Triton interprets the kernels, which must be asked for before it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

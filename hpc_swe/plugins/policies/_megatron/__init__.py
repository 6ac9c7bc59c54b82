"""The heavy half of the megatron policy.

shape      what a model's config.json says; without torch
hf         what a Hugging Face folder holds
parallel   joins the process group; ranks and groups
fusions    compiled or not, chosen before megatron-core is imported
compat     defects of megatron-core, mended
cpu        what differs without CUDA
stopwatch  seconds by part
spec       the model: norms, attention, log-probabilities in place of logits
experts    its mixture-of-experts layers
logprobs   fused output layer and log-probability
packing    a microbatch as tensors
convert    Hugging Face tensors <-> Megatron shards
optimizer  gradient buffers, AdamW, schedule
reference  the initial weights, swapped in
export     Hugging Face files
checkpoint distributed checkpoints
learner    the seam: train, export, save, load
"""

import warnings

# Advice to megatron-core's authors, at import and at each first call.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed|Please use DTensor")

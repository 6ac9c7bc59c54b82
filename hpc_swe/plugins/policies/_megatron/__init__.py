"""Contain the parts of the megatron policy; most import torch and megatron-core, so they are imported late.

settings   the keys of the policy; without torch
memory     estimate memory and files; without torch
fusions    choose whether megatron-core compiles its fused functions; must run before its import
compat     repair megatron-core where it needs Transformer Engine or CUDA
parallel   join the process group; tensor- and data-parallel ranks
packing    convert a microbatch to tensors
logprobs   output layer and log-probability in one function
model      the model: norms, attention, experts, log-probabilities instead of logits
weights    convert and exchange weights in Hugging Face's format
state      what training changes: optimizer, schedule, checkpoints, and the reference weights
learner    implement `Learner`: train, export, save, load
"""

import warnings

# These warnings advise the authors of megatron-core, at import and at each first call.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed|Please use DTensor")

"""Run a hybrid training of a random model, and print what each turn on the GPU cost.

    python -m tests.gpu.turns FOLDER [tiny] [0.6B] [4B]

trains three steps of each shape in FOLDER, with one GPU, or on the CPU where there is none. It prints a line
for each turn with its seconds and the GPU memory that was left in use, and what the engine's log says about
its sleep. On a GPU it then prints how fast pinned memory is made and copied. The variable MORE holds further
overrides, for two GPUs for example `policy.tensor_parallel=2 counts.inference=2 executor.gpus.learner=2`.
"""

import json
import logging
import os
import re
import sys
import time
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from hpc_swe import config as configuration
from hpc_swe import plugins
from hpc_swe.demo import model as demo_model
from hpc_swe.errors import HpcSweError
from hpc_swe.rundir import RunDir
from hpc_swe.runs import control, watch

CUDA = torch.cuda.is_available()
STEPS, LIMIT_S = 3, float(os.environ.get("LIMIT_S", "150"))
SHAPES = {  # hidden, inner, layers, heads, key-value heads
    "tiny": (128, 256, 2, 4, 2),
    "0.6B": (1024, 3072, 28, 16, 8),
    "4B": (2560, 9728, 36, 32, 8),
}
WORDS = [
    *(f"steps={STEPS}", "eval.every=0", 'sandbox={type="process"}', "executor.foreground=true", "seed=1"),
    *("groups.group_size=4", "groups.groups_per_step=2", "rollout.slots=8", "learner.checkpoint_every=100"),
    *("max_restarts=0", "inference.max_restarts=0", "agent.max_turns=2"),
]
GPU = ['engine.environ={VLLM_USE_FLASHINFER_SAMPLER="0"}', 'policy.recompute="full"']
CPU = [
    *('engine.device="cpu"', 'policy.device="cpu"', 'engine.dtype="float32"', 'policy.dtype="float32"'),
    *("engine.enforce_eager=true", "executor.gpus.learner=0", "executor.gpus.inference=0"),
]
SLEEP = re.compile(r"leep|wake|fall asleep|KV cache|[Gg]raph|raise |Error")


def make_model(folder: Path, shape: str) -> None:
    """Write a model with random weights and the demo's tokenizer."""
    folder.mkdir(parents=True)
    (folder / "chat_template.jinja").write_text(demo_model.TEMPLATE)
    talks = plugins.load("tasksets", {"type": "bugs"}).demonstrations(seed=0)
    tokenizer = demo_model.make_tokenizer(demo_model.texts(folder, islice(talks, 300)))
    demo_model.save_tokenizer(tokenizer, folder)
    hidden, inner, layers, heads, groups = SHAPES[shape]
    end, pad = (tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=128 if hidden > 128 else 32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=pad,
    )
    torch.set_default_dtype(torch.bfloat16 if CUDA else torch.float32)
    with torch.device("cuda" if CUDA else "cpu"):
        made = Qwen3ForCausalLM(config)
    made.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    made.save_pretrained(folder)
    print(f"{shape}: {sum(each.numel() for each in made.parameters()) / 1e9:.2f} B parameters", flush=True)


def train(root: Path, shape: str) -> RunDir:
    """Train the shape in a run folder below `root`."""
    began = time.monotonic()
    maker = get_context("spawn").Process(target=make_model, args=(root / shape / "model", shape))
    maker.start()  # this process must not hold memory of the GPU
    maker.join()
    made = time.monotonic()
    files = [Path("configs/demo.toml"), Path("configs/demo_hybrid.toml")]
    words = [f'model="{root / shape / "model"}"', *WORDS, *(GPU if CUDA else CPU)]
    words += os.environ.get("MORE", "").split()
    config, run = configuration.read(*files, overrides=words), RunDir(root / shape / "run")
    control.start(run, config)
    try:
        watch.watch(run, config, LIMIT_S, stop_on="error")
    except HpcSweError as error:
        print(f"{shape}: FAILED: {error}")
    print(f"{shape}: model made in {made - began:.0f} s, trained in {time.monotonic() - made:.0f} s")
    return run


def show(run: RunDir) -> None:
    """Print the turns, and what logs say about sleep."""
    for path in sorted(run.metrics.glob("learner-*")):
        for line in map(json.loads, path.read_text().splitlines()):
            found = {name: value for name, value in line["values"].items() if name.startswith("turn/")}
            step_s = sum(v for name, v in line["values"].items() if name.startswith("step_seconds/"))
            shown = "  ".join(f"{name.removeprefix('turn/')} {value:.2f}" for name, value in found.items())
            print(f"  step {line['step']}: {step_s:.1f} s in all; {shown or 'no turn'}")
    for role in ("learner", "inference"):
        for path in sorted(run.logs(role).glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            chosen = [line for line in lines if "GPUs" in line or SLEEP.search(line)]
            print(f"  {path.name}:", *(f"    {line[:220]}" for line in chosen[-40:]), sep="\n")


def copies() -> None:
    """Print how fast pinned memory is made and copied."""
    size = 8 * 2**30
    began = time.monotonic()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    made_s, device = time.monotonic() - began, torch.zeros(size, dtype=torch.uint8, device="cuda")
    rates = []
    for target, source in ((host, device), (device, host)):
        torch.cuda.synchronize()
        began = time.monotonic()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(size / (time.monotonic() - began) / 1e9)
    words = "pinned memory: made at {:.1f} GB/s, GPU to host {:.1f} GB/s, host to GPU {:.1f} GB/s"
    print(words.format(size / made_s / 1e9, *rates), flush=True)


if __name__ == "__main__":
    os.umask(0o077)
    logging.basicConfig(level=logging.WARNING)
    folder, *shapes = sys.argv[1:]
    for name in shapes or ["tiny"]:
        show(train(Path(folder).absolute(), name))
    if CUDA:
        copies()

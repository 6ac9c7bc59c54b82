"""Run a hybrid training of a random model, and print what each turn on the GPU cost.

    python -m tests.gpu.turns FOLDER [tiny] [0.6B] [4B]

trains three steps of each shape in FOLDER, with one GPU, or on the CPU where there is none. It prints a line
for each turn with its seconds and the GPU memory that was left in use, and what the engine's log says about
its sleep. The variable MORE holds further overrides, for two GPUs for example `policy.tensor_parallel=2
counts.inference=2 executor.gpus.learner=2`. It exits with 1 if a training failed or had no turn.
"""

import logging
import os
import re
import signal
import sys
import time
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch

from hpc_swe.base import cli, loader, metrics
from hpc_swe.base.errors import HpcSweError
from hpc_swe.base.rundir import RunDir
from hpc_swe.config import config as configuration
from hpc_swe.demo import model as demo_model
from hpc_swe.launch import control, watch

CUDA = torch.cuda.is_available()
STEPS, LIMIT_S = 3, float(os.environ.get("LIMIT_S", "150"))
SHAPES = demo_model.SHAPES | {"4B": demo_model.published("4B")}
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
    """Make a model with random weights and the demo's tokenizer."""
    talks = loader.load("tasksets", {"type": "bugs"}).demonstrations(seed=0)
    sizes = SHAPES[shape] | {"dtype": "bfloat16" if CUDA else "float32"}
    with torch.device("cuda" if CUDA else "cpu"):
        print(f"{shape}: {demo_model.make(folder, islice(talks, 300), 0, **sizes)}", flush=True)


def train(root: Path, shape: str) -> bool:
    """Train the shape in a run folder below `root`; return whether that succeeded."""
    began = time.monotonic()
    maker = get_context("spawn").Process(target=make_model, args=(root / shape / "model", shape))
    maker.start()  # this process must not hold memory of the GPU
    maker.join()
    made, is_done = time.monotonic(), False
    files = [Path("configs/demo.toml"), Path("configs/demo_hybrid.toml")]
    words = [f'model="{root / shape / "model"}"', *WORDS, *(GPU if CUDA else CPU)]
    words += os.environ.get("MORE", "").split()
    try:
        config, run = configuration.read(*files, overrides=words), RunDir(root / shape / "run")
        control.start(run, config)
        watch.watch(run, config, LIMIT_S, stop_on="error")
        is_done = True
    except HpcSweError as error:
        print(f"{shape}: FAILED: {error}")
    print(f"{shape}: model made in {made - began:.0f} s, trained in {time.monotonic() - made:.0f} s")
    return is_done


def show(run: RunDir) -> bool:
    """Print the turns, and what logs say about sleep; return whether there was a turn."""
    has_turns = False
    for path in sorted(run.metrics.glob("learner-*")):
        for line in metrics.decode(path.read_bytes())[0]:
            found = {name: value for name, value in line.values.items() if name.startswith("turn/")}
            step_s = sum(v for name, v in line.values.items() if name.startswith("step_seconds/"))
            shown = "  ".join(f"{name.removeprefix('turn/')} {value:.2f}" for name, value in found.items())
            has_turns |= bool(found)
            print(f"  step {line.step}: {step_s:.1f} s in all; {shown or 'no turn'}")
    for role in ("learner", "inference"):
        for path in sorted(run.logs(role).glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            chosen = [line for line in lines if "GPUs" in line or SLEEP.search(line)]
            print(f"  {path.name}:", *(f"    {line[:220]}" for line in chosen[-40:]), sep="\n")
    return has_turns


def main() -> int:
    """Train all shapes that the command line names; what a failed one has is shown as well."""
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a limit of time: stop the run, and show it
    logging.basicConfig(level=logging.WARNING)
    os.umask(0o077)
    what = "Run a hybrid training of random models, and print what each turn on the GPU cost."
    parser = cli.parser("tests.gpu.turns", what, "runs/turns", "runs/turns tiny 0.6B")
    parser.add_argument("folder", type=cli.folder, help="folder of the runs")
    parser.add_argument(
        "shape", nargs="*", default=["tiny"], help=f"sizes: {', '.join(SHAPES)} (default: tiny)"
    )
    arguments, failed = cli.parse(parser), 0
    root = arguments.folder
    for name in arguments.shape:
        is_done = False
        try:
            is_done = train(root, name)
        finally:
            has_turns = show(RunDir(root / name / "run"))
        failed += not (is_done and has_turns)
    print(f"{failed} shapes failed, or had no turn")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

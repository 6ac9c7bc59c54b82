"""Run the whole loop on this machine, up to a reward curve: python -m hpc_swe.demo.

The demo makes a tiny Qwen3, warm-starts it on scripted demonstrations, evaluates it on held-out tasks, trains
it with GRPO, and evaluates it again on the same tasks. Every part is the real one. A demo that is started
again skips the stages that are done.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from hpc_swe.agents.sandboxes.base import ImageSandboxes
from hpc_swe.base import cli, intervals, shipped, tables
from hpc_swe.base.errors import ConfigError, DeadlineError, HpcSweError
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store.parquet import evals
from hpc_swe.base.store.parquet.evals import Attempt
from hpc_swe.base.tables import console, say
from hpc_swe.cluster.executors.base import FOREGROUND
from hpc_swe.cluster.processes import completed
from hpc_swe.config import config as configuration
from hpc_swe.demo.stages import curve, newest, of_stage, watched
from hpc_swe.launch import control as run_control
from hpc_swe.models import builds
from hpc_swe.models.model_shape import read_config

MODEL_S = 3600.0  # longest wait for random weights to be written
EXPORT_S = 1800.0  # longest wait for the rewarded episodes
IMAGE_S = 1800.0  # longest wait for the image of the sandboxes
DECODINGS = ("greedy", "sampled")
CONTROLS = {
    "shuffled": ['advantage={type="shuffled"}'],
    "rejection": ["learner.optimizer.lr=0.0", "groups.resample=false"],
}


@dataclass(frozen=True)
class Demo:
    """Run the stages of one demo in one folder."""

    root: Path
    seed: int
    overrides: Sequence[str]
    quick: bool = False
    """Only the evaluations that GRPO makes while it trains are made."""
    steps: int = 0
    """Steps of GRPO; 0: those of the configuration."""
    given: Path | None = None
    """Folder of a model to start from, in place of one with random weights."""
    stage_minutes: float = 30.0
    """The longest that each stage may take, time in a queue included."""

    def make_image(self) -> None:
        """Build the image of the sandboxes where none is, as `make demo` does before, and try one.

        Raise ConfigError where none can be opened, before minutes go to a warm start.
        """
        config = configuration.from_words(["configs/demo.toml", *self.overrides])
        sandbox = config.sandbox
        if isinstance(sandbox, ImageSandboxes) and not Path(sandbox.images).exists():
            script = shipped.folder("containers") / "build_image.sh"
            run_command(["bash", str(script), sandbox.images], IMAGE_S)  # it says what fails
        if config.executor.is_here:
            sandbox.check()

    def make_model(self) -> Path:
        """Make the tokenizer, the chat template and random weights, unless they exist; return the folder."""
        if self.given:
            return self.given
        folder = self.root / "model"
        config = configuration.from_words(["configs/demo.toml", *self.overrides])
        if not (folder / "config.json").exists():
            words = ["hpc_swe.demo.model", f"--out={folder}", f"--seed={self.seed}"]
            words += [f"--taskset={json.dumps(configuration.dump(config)['taskset'])}"]
            words += [f"--context={config.rollout.context}"]
            if run_command([sys.executable, "-m", *words], MODEL_S):
                raise HpcSweError(f"{folder}: the demo's model was not made, for the reason above; try again")
        longest, context = read_config(folder)["max_position_embeddings"], config.rollout.context
        if longest < context:
            raise HpcSweError(
                f"{folder} was made for {longest} tokens, but rollout.context = {context}; "
                "name another folder by --out"
            )
        return folder

    def words(self, model: Path, *more: str) -> list[str]:
        """Return the files and overrides of a stage; `more` holds those that it has beside the demo's."""
        files = [word for word in more if "=" not in word]
        words = [f"configs/{word}.toml" for word in ("demo", *files)]
        words += [f"seed={self.seed}", f'model="{model.absolute()}"']
        words += [*(word for word in more if "=" in word), *of_stage(self.overrides, files)]
        if self.steps and not files:  # only GRPO and its controls have no file of their own
            words += [f"steps={self.steps}"]
        return words

    def stage(self, name: str, model: Path, *more: str) -> RunDir:
        """Run one stage to its end, unless it has finished already; return its run folder."""
        run = RunDir((self.root / name).absolute())
        config = configuration.from_words(self.words(model, *more))
        if not run.finished.exists():
            run_control.start(run, config)
            watched(name, run, config, 60 * self.stage_minutes)
        return run

    def export(self, run: RunDir) -> Path:
        """Write the rewarded episodes of a run as rows to train on; return their file."""
        rows = (self.root / "rewarded.parquet").absolute()
        words = ["hpc_swe.export_episodes", str(run.root), f"--out={rows}"]
        if run_command([sys.executable, "-m", *words], EXPORT_S):
            raise HpcSweError("hpc_swe.export_episodes failed for the reason above")
        return rows


def run_command(words: Sequence[str], timeout_s: float) -> int:
    """Return the exit code of a command, which says what fails; raise DeadlineError if it takes too long."""
    try:
        return completed(subprocess.Popen(words), timeout_s).returncode
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"{' '.join(words)}: it has not ended within {timeout_s:g} s") from None


def require_torch() -> None:
    """Raise HpcSweError where there are only the packages of a login node, which a wheel asks for."""
    if not builds.installed().torch:
        lists = shipped.folder("containers")
        raise HpcSweError(
            f"{sys.executable} has no torch, as on a login node: type {sys.executable} -m pip install "
            f"--no-deps -r {lists}/requirements-cpu.txt {lists}/vllm-name, or for GPUs "
            f"-r {lists}/requirements-gpu.txt"
        )


def rates(before: Sequence[Attempt], after: Sequence[Attempt]) -> Table:
    """Return a table of the solve rates on held-out tasks before and after, by decoding."""
    columns = ("held-out solve rate", "before", "after", "gain", "detectable", "infra failures")
    table = Table(*columns, title="mean over tasks [95 % interval over tasks]")
    for decoding in _decodings(before):
        first, last = (intervals.outcomes(attempts, decoding) for attempts in (before, after))
        rates = [intervals.solve_rate(first), intervals.solve_rate(last), intervals.gain(first, last)]
        ends = [[a.outcome for a in attempts if a.sampling == decoding] for attempts in (before, after)]
        failed = ", ".join(f"{found.count('infra_error')}/{len(found)}" for found in ends)
        table.add_row(decoding, *map(str, rates), f"{intervals.detectable(first):.3f}", failed)
    return table


def _decodings(attempts: Sequence[Attempt]) -> list[str]:
    return [name for name in DECODINGS if any(each.sampling == name for each in attempts)]


def _plot(root: Path, before: Sequence[Attempt], after: Sequence[Attempt], trained: RunDir) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    if rewards := curve(trained, "reward/mean"):  # rejection sampling has none
        axes.plot(*zip(*rewards, strict=True), label="training reward, all finished groups")
    if held_out := curve(trained, "solve/eval/greedy"):
        axes.plot(*zip(*held_out, strict=True), ":", color="C1", label="held-out, greedy, in training")
    for decoding, marker in zip(_decodings(before), "os", strict=False):
        ends = [intervals.solve_rate(intervals.outcomes(each, decoding)) for each in (before, after)]
        spread = [[end.mean - end.low for end in ends], [end.high - end.mean for end in ends]]
        steps, means = [0, len(rewards) or 1], [end.mean for end in ends]
        axes.errorbar(steps, means, spread, fmt=marker, label=f"held-out, {decoding}")
    axes.set(xlabel="training step", ylabel="solve rate", ylim=(0, 1.02), title="GRPO on bug-fix tasks")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(root / "reward.png", dpi=120)


def run(demo: Demo, control: str) -> None:
    """Run all stages in order, with GRPO or with a control instead, and show the result."""
    os.environ[FOREGROUND] = "1"
    began = time.monotonic()
    require_torch()
    if demo.given and not (demo.given / "config.json").exists():  # before minutes go to an image
        raise ConfigError(
            f"--model {demo.given}: no config.json there; give the folder of a Hugging Face model"
        )
    demo.make_image()
    name = control or "grpo"
    start = newest(demo.stage("sft", demo.make_model(), "demo_sft"))
    before = [] if demo.quick else [demo.stage("before", start, "demo_eval")]
    trained = demo.stage(name, start, *CONTROLS.get(control, []))
    if control == "rejection":
        source = f"sft.trajectories=[{json.dumps(str(demo.export(trained)))}]"
        trained = demo.stage("rejection-sft", start, "demo_sft", "demo_rejection", source)
    after = [demo.stage(f"after-{name}", newest(trained), "demo_eval") for _ in before]
    tables_of_evals = [run.eval_table("eval") for run in before + after] or sorted(trained.evals.iterdir())
    if tables_of_evals:
        first, last = (evals.read(tables_of_evals[place]) for place in (0, -1))
        tables.show(console, rates(first, last))
        _plot(demo.root, first, last, trained)
        say(f"reward curve: {demo.root / 'reward.png'}")
    say(f"all curves:   {Path(sys.executable).parent / 'tensorboard'} --logdir {demo.root}")
    console.print(f"{time.monotonic() - began:.0f} s in all")


EXAMPLES = (
    "",
    "--seed 1 --control shuffled",
    "configs/slurm_demo.toml --out /shared/me/demo",
    "--model MODEL configs/demo_gpu.toml configs/demo_model.toml --out runs/trial",
)


@cli.command
def main() -> None:
    """Run the demo that the command line describes."""
    os.umask(0o077)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    what = "Run the whole loop: on this machine, and without arguments, in 5 to 10 minutes."
    parser = cli.parser("hpc_swe.demo", what, *EXAMPLES)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="decides the weights at the start and the order of the tasks")
    add("--out", type=cli.path, help="folder of the stages (default: runs/demo-SEED)")
    add("--control", choices=sorted(CONTROLS), default="", help="run a control instead of GRPO")
    add("--model", type=cli.path, help="folder of another model to start from")
    add("--quick", action="store_true", help="evaluate only while GRPO trains, not before and after it")
    length = "steps of GRPO (default: as the files say; 48 draw a long curve)"
    add("--steps", type=cli.number(int, 1), default=0, metavar="N", help=length)
    longest = f"minutes that each stage may take, time in a queue included (default: {Demo.stage_minutes:g})"
    add("--stage-minutes", type=cli.number(float, 0.0), default=Demo.stage_minutes, metavar="N", help=longest)
    add("overrides", nargs="*", metavar="CONFIG", help=f"{cli.CONFIG}, for every stage")
    arguments = cli.parse(parser)
    root = arguments.out or Path(os.environ.get("HPC_SWE_RUNS", "runs")) / f"demo-{arguments.seed}"
    try:
        given = arguments.overrides, arguments.quick, arguments.steps
        demo = Demo(root, arguments.seed, *given, arguments.model, arguments.stage_minutes)
        run(demo, arguments.control)
    except KeyboardInterrupt:
        say("stopped; the same command continues from here")
        raise


if __name__ == "__main__":
    main()

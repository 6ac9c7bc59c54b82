"""Types the commands of README.md and docs/*.md into a fresh clone: as root below root's home, and as a user.

    python -m tests.docs.fresh [--user NAME] [--keep]

The clone is of this checkout's last commit, in a home that others cannot enter. Packages, images and agents
are this checkout's, so nothing is downloaded, and `make setup` there finds all of them. RULES say for each
command whether it is run, planned or looked up. For names such as MODEL and RUN there is something real.
"""

import argparse
import hashlib
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.docs.commands import PAGES, Command, commands
from tests.kit.checkout import ROOT

LIMIT_S, LEAVE_S = 600, 30
STAMPED = ("containers/requirements-cpu.txt", "pyproject.toml", "containers/vllm-name/pyproject.toml")
SMALL = """
[tasks]
eval = 2
[sandbox]
type = "process"
[engine]
type = "scripted"
replies = "{replies}"
max_model_len = 512
[eval]
samples = 1
[rollout]
slots = 2
[coordinator]
poll_s = 0.2
[lease]
beat_s = 0.5
ttl_s = 20.0
"""
MAKE = """
import json, shutil
import pyarrow as pa, pyarrow.parquet as pq
from pathlib import Path
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file("models/tiny/tokenizer.json")
said = tokenizer.encode('<tool_call>\\n{"name": "submit", "arguments": {}}\\n</tool_call><|im_end|>').ids
Path("models/replies.json").write_text(json.dumps([{"token_ids": said, "logprobs": [-1.0] * len(said)}]))
shutil.copytree("models/tiny", "models/long", dirs_exist_ok=True)
config = json.loads(Path("models/tiny/config.json").read_text()) | {"max_position_embeddings": 1 << 20}
Path("models/long/config.json").write_text(json.dumps(config))
for split in ("train", "test"):
    texts = {"test.py": f"def test_{split}():\\n    assert f() == 1\\n", "f.py": ""}
    files = [{"path": path, "content": text} for path, text in texts.items()]
    row = {"task_id": split, "problem_statement": split, "extra_info": {"files": files}}
    Path(".cache/swepdb").mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist([row]), f".cache/swepdb/rl_{split}.parquet")
    said = [{"role": "user", "content": split}, {"role": "assistant", "content": "Done."}]
    pq.write_table(pa.Table.from_pylist([{"messages": said}]), f".cache/swepdb/sft_{split}.parquet")
"""
"""Replies, a model whose plan takes long contexts, and rows: what a person would have."""
RUN, PLANNED, LOOKED_UP = "run", "planned", "looked up"
MINUTES, NETWORK, CLUSTER = "takes minutes", "needs the network", "needs a cluster"
RULES = (
    (r"make (?:setup|image|help)", RUN, r"\g<0>"),
    (r"make ([\w-]+)", PLANNED, r"make -n \1"),
    (r"(python -m hpc_swe\.status) (?:runs/\S+|evals/\S+|RUN)( --watch)?.*", RUN, r"\1 evals/mine\2"),
    (r"(python -m hpc_swe\.mine_history) REPOSITORY (.*)", RUN, r"\1 . \2 --since yesterday"),
    (r"python -m hpc_swe\.demo\.model .*", RUN, r"\g<0>"),
    (r"(python -m hpc_swe\.show) own/run(/tasks\.parquet)", RUN, r"\1 evals/mine\2"),
    (r"(python -m hpc_swe\.show) own/run --step 0", RUN, r"\1 evals/mine --step eval"),
    (r"python -m hpc_swe\.launch start .*demo_repository\.toml .*", LOOKED_UP, MINUTES),
    (r".*hpc_swe\.mine_history.*|.*pip download.*|apptainer build .*", LOOKED_UP, NETWORK),
    (r"(python -m hpc_swe\.show) runs/demo-0/grpo --step 12", RUN, r"\1 evals/mine --step eval"),
    (r"(python -m hpc_swe\.show) (?:PATH|FILE_OR_FOLDER)", RUN, r"\1 evals/mine/run.json && \1 evals/mine"),
    (r"(python -m hpc_swe\.show) runs/demo-0/grpo(/tasks\.parquet)?", RUN, r"\1 evals/mine\2"),
    (r"(python -m hpc_swe\.show) RUN( --limit \d+)", RUN, r"\1 evals/mine\2"),
    (r"(python -m hpc_swe\.show) RUN(/tasks\.parquet)?", RUN, r"\1 evals/mine\2"),
    (r"(python -m hpc_swe\.show) RUN/trajectories\.parquet", RUN, r"\1 .cache/swepdb/sft_test.parquet"),
    (r"(python -m hpc_swe\.export_episodes) RUN (.*)", RUN, r"\1 evals/mine \2 --min-reward 0"),
    (r"(python -m hpc_swe\.show) RUN --task TASK", RUN, r"\1 evals/mine --task bugs-eval-0"),
    (r"(python -m hpc_swe\.show) RUN .*--outcome \w+", RUN, r"\1 evals/mine --outcome no_submission"),
    (r"(python -m hpc_swe\.report) (?:runs/\S+|evals/\S+|RUN)( --\w.*)?", RUN, r"\1 evals/mine\2"),
    (r"(python -m hpc_swe\.launch start .*) model=/path/to/model (.*)", RUN, r"\1 model=models/tiny \2"),
    (
        r"(python -m hpc_swe\.launch start) CONFIG\.\.\. --run RUN",
        PLANNED,
        r"\1 {demo} --run runs/x --dry-run",
    ),
    (r".*recipes/local_4\.toml.*", LOOKED_UP, "needs GPUs"),
    (r"(python -m hpc_swe\.launch start .*swepdb.*) model=MODEL( .*)", PLANNED, r"\1 {long}\2"),
    (r"(python -m hpc_swe\.launch start .*swepdb.*)( --dry-run)", PLANNED, r"\1 {long}\2"),
    (
        r"(python -m hpc_swe\.launch start .*hybrid.*) model=MODEL --run RUN (.*)",
        PLANNED,
        r"\1 {long} {cpu} --run runs/x \2",
    ),
    (r"python -m hpc_swe\.launch start --run \S+ --upgrade .*", LOOKED_UP, CLUSTER),
    (r"(python -m hpc_swe\.launch start --run) (?:RUN \[KEY=VALUE\.\.\.\]|\S+)", RUN, r"\1 runs/mine"),
    (r"(python -m hpc_swe\.launch (?:tick|stop)) \S+(.*)", RUN, r"\1 runs/mine\2"),
    (r"(python -m hpc_swe\.launch keys) \[PREFIX\]", RUN, r"\1 groups"),
    (r"python -m hpc_swe\.launch keys(?: groups)?", RUN, r"\g<0>"),
    (r"python -m hpc_swe\.launch keys --markdown > .*", RUN, r"\g<0>"),
    (r"(python -m hpc_swe\.evaluate) CONFIG\S+ .*", RUN, r"\1 {small} --model models/tiny --out evals/mine"),
    (r"(python -m hpc_swe\.doctor)( CONFIG\.\.\.)?", RUN, r"\1 --shared runs || [ $? = 1 ]"),
    (r"(python -m hpc_swe\.doctor .+) --shared \S+", RUN, r"\1 --shared runs || [ $? = 1 ]"),
    (r"(python -m hpc_swe\.engine) CONFIG.*", RUN, r"VLLM_API_KEY=x \1 {demo}"),
    (r"tensorboard --logdir runs/demo-0", RUN, "{curves}tensorboard --logdir evals --port 0 {until_served}"),
    (r"sbatch/tensorboard.sh FOLDER.*", RUN, "{curves}sbatch/tensorboard.sh evals 0 {until_served}"),
    (r"sbatch/tick.sh FOLDER", RUN, "sbatch/tick.sh runs"),
    (r"(ls|touch) (requests|episodes|control)(.*)", RUN, r"cd evals/mine && \g<0>"),
    (r"pip (?:wheel|install) .*", LOOKED_UP, NETWORK),
    (r"hpc-swe demo", LOOKED_UP, MINUTES),
    (r"kill -9 PID", LOOKED_UP, "would end a process"),
    (r"(crontab) (sbatch/crontab.example)", PLANNED, r"\1 -n \2"),
    (r"python -m pytest (.*)", PLANNED, r"python -m pytest --collect-only -q \1 > /dev/null"),
    (r"hpc-swe (?:--help|--version)", RUN, r"\g<0>"),
    (r"hpc-swe launch \.\.\.", RUN, "hpc-swe launch keys groups"),
    (r"python -m hpc_swe\.demo .*demo_(?:two_)?gpu.*", LOOKED_UP, "needs a GPU"),
    (r"python -m hpc_swe\.benchmarks\.learner --shape (?!tiny).*", LOOKED_UP, "needs a GPU"),
    (r"python -m hpc_swe\.benchmarks\.learner --shape tiny .*", RUN, r"\g<0>"),
    (
        r"python -m hpc_swe\.benchmarks\.loop RUN.*|grep -rh .*RUN/logs.*",
        LOOKED_UP,
        "needs runs that have trained",
    ),
    (r"python -m hpc_swe\.benchmarks\.watch .*", LOOKED_UP, "does not end by itself"),
    (r"python -m hpc_swe\.benchmarks\.sandboxes .*", LOOKED_UP, "takes minutes"),
    (r"python -m hpc_swe\.demo .*slurm_demo.*|sbatch/role.*", LOOKED_UP, CLUSTER),
    (
        r".*pip install.*|.*hpc_swe\.build_images.*|.*hpc_swe\.prepare.*|.*build_agents.*",
        LOOKED_UP,
        NETWORK,
    ),
    (r"python -m hpc_swe\.make_bugs .*", LOOKED_UP, MINUTES),
    (
        r"python -m hpc_swe\.(?:evaluate|launch start|demo\.repair) configs/repair_1b\.toml .*",
        LOOKED_UP,
        "needs a GPU",
    ),
    (r"python -m hpc_swe\.select_rows .*", LOOKED_UP, "needs a finished evaluation"),
    (r"python -m hpc_swe\.check configs/(?:swepdb|repair_1b)\.toml .*", LOOKED_UP, "needs rows"),
    (r".*configs/swebench\.toml.*", LOOKED_UP, "needs the rows of the hub"),
    (r"python -m hpc_swe\.evaluate configs/swepdb\.toml .*", LOOKED_UP, CLUSTER),
    (r"python -m hpc_swe\.evaluate kodcode .*", LOOKED_UP, "needs a model and its engine"),
    (r"python -m swebench.*", LOOKED_UP, "is no program of ours"),
    (r"(?:PYTHONPATH=\S+ )?(?:python -m )?tests[./].*|python -m hpc_swe\.demo .*", LOOKED_UP, MINUTES),
    (r"python -m hpc_swe\.launch start .*inference\.url.*", LOOKED_UP, "needs an engine"),
    (r"python -m hpc_swe\.launch start .*executor\.runtime.*", LOOKED_UP, "needs a packed environment"),
    (r"containers/build_python\.sh", RUN, r"\g<0>"),
    (r"containers/build_runtime\.sh .*", LOOKED_UP, MINUTES),
    (
        r"python -m hpc_swe\.launch (?:start )?\.\.\..*|python -m (?:hpc_swe|jobs)\.[\w.]+",
        LOOKED_UP,
        "is not whole",
    ),
    (r"python3 -m venv .*|python - .*", LOOKED_UP, "is a program of others, or of the page's own"),
)
"""Expression of a command -> how it is tried here, and the line that is typed, or why none is."""
WORDS = {
    "demo": "configs/demo.toml model=models/tiny",
    "long": "model=models/long",
    "cpu": "engine.device=cpu policy.device=cpu executor.gpus.learner=0 executor.gpus.inference=0",
    "small": "configs/demo.toml models/small.toml",
    "curves": "mkdir -p evals/mine/tensorboard; rm -f served; ",
    "until_served": "> served 2>&1 & for n in {1..99}; do grep -q ' at http' served && break; sleep 0.5; done"
    "; kill $!; wait $!; grep ' at http' served",
}


@dataclass(frozen=True)
class Place:
    """A clone in somebody's home."""

    user: str
    home: Path
    shell_home: str
    """What HOME is there: root's own home is not moved."""

    @property
    def clone(self) -> Path:
        return self.home / "hpc_swe"

    def type(self, line: str) -> "subprocess.CompletedProcess[str]":
        """In a shell of the user's, in the clone, with its environment and nothing of this process's."""
        path = f"{self.clone}/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        values = {"HOME": self.shell_home, "USER": self.user, "LOGNAME": self.user, "PATH": path}
        values |= {"LANG": "C.UTF-8", "SHELL": "/bin/bash", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        clean = ["env", "-i", f"--chdir={self.clone}", *(f"{name}={value}" for name, value in values.items())]
        found = pwd.getpwnam(self.user)
        become = ["setpriv", f"--reuid={found.pw_uid}", f"--regid={found.pw_gid}", "--clear-groups"]
        become = become if found.pw_uid != os.geteuid() else []
        shell = ["bash", "-o", "pipefail", "-c", line]
        with tempfile.TemporaryFile("w+") as output:  # no pipe, which jobs would hold open
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            code = subprocess.run([*become, *clean, *shell], timeout=LIMIT_S, **streams).returncode
            output.seek(0)
            return subprocess.CompletedProcess(line, code, output.read(), "")

    def must(self, line: str) -> None:
        done = self.type(line)
        if done.returncode:
            raise SystemExit(f"{self.user}: {line}: exit code {done.returncode}\n{done.stdout[-2000:]}")


def make(user: str) -> Place:
    """A clone, its .venv and what its commands name."""
    found, is_me = pwd.getpwnam(user), pwd.getpwnam(user).pw_uid == os.geteuid()
    home = Path(tempfile.mkdtemp(prefix="fresh-", dir=found.pw_dir if is_me else "/var/tmp"))
    place = Place(user, home, found.pw_dir if is_me else str(home))
    subprocess.run(["git", "clone", "--quiet", ROOT, place.clone], check=True)
    install(place.clone)
    for folder in ("agents", "images"):
        (place.clone / ".cache" / folder).mkdir(parents=True)
        for made in (ROOT / ".cache" / folder).resolve().glob("*"):
            if made.name != "lock":
                (place.clone / ".cache" / folder / made.name).symlink_to(made)
    if not is_me:
        subprocess.run(["chown", "--recursive", "--no-dereference", f"{user}:", home], check=True)
    place.must("python -m pip install --quiet --no-deps --no-build-isolation --no-index --editable .")
    place.must("mkdir -p models && python -m hpc_swe.demo.model --out models/tiny")
    place.must(f"python - <<'END'\n{MAKE}\nEND")
    replies = place.clone / "models/replies.json"
    place.must(f"cat > models/small.toml <<'END'\n{SMALL.format(replies=replies)}\nEND")
    place.must(RULES_OF["evaluate"])
    return place


RULES_OF = {
    "evaluate": "python -m hpc_swe.evaluate {small} --model models/tiny --out evals/mine".format(**WORDS)
}


def install(clone: Path) -> None:
    """An environment with this one's packages, as `make setup` would leave it."""
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    [site] = (clone / ".venv/lib").glob("python*/site-packages")
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    (site / "packages.pth").write_text("\n".join(packages) + "\n")
    for script in (Path(sys.prefix) / "bin").iterdir():
        first, _, rest = script.read_bytes().partition(b"\n") if script.is_file() else (b"", b"", b"")
        made = clone / ".venv/bin" / script.name
        if first.startswith(b"#!") and b"python" in first and not made.exists():
            made.write_bytes(f"#!{clone}/.venv/bin/python\n".encode() + rest)
            made.chmod(0o755)
    sums = [f"{hashlib.sha256((clone / name).read_bytes()).hexdigest()}  {name}\n" for name in STAMPED]
    (clone / ".venv/setup.stamp").write_text("".join(sums))


def said(command: Command) -> str:
    """Without the remark beside it."""
    text = re.sub(r"\s+#.*|(?<=\w) {3,}.*", "", command.text).strip().replace(".venv/bin/", "")
    return re.sub(r"\s+", " ", text).replace(" [--watch]", " --watch")


def plan(command: Command) -> tuple[str, str] | None:
    """How a command is tried, and the line that is typed, or why none is; None where no rule knows it."""
    for expression, how, line in RULES:
        if match := re.fullmatch(expression, said(command)):
            return how, line if how == LOOKED_UP else match.expand(line).format(**WORDS)
    return None


def judge(place: Place, command: Command, typed: dict[str, str]) -> tuple[str, str, str]:
    """Its plan, and what is wrong with it; `typed` holds what was wrong with each line before."""
    how, line = plan(command) or (LOOKED_UP, "no rule knows it")
    wrong = looked_up(place, said(command), typed) if how == LOOKED_UP else complaint(place, line, typed)
    return how, line, wrong if plan(command) else f"add a rule to {Path(__file__).name}"


def complaint(place: Place, line: str, typed: dict[str, str]) -> str:
    if line not in typed:
        done = place.type(line)
        is_well = done.returncode == 0 and "Traceback" not in done.stdout
        typed[line] = "" if is_well else f"exit code {done.returncode}: {done.stdout[-1500:]}"
    return typed[line]


def looked_up(place: Place, text: str, typed: dict[str, str]) -> str:
    """Whether its program is there and its options are known."""
    program = re.match(
        r"(?:[A-Z_]+=\S+ )*(?:python -m ((?:hpc_swe|jobs|tests)\.[\w.]+(?: start)?)|(\w+/\S+))", text
    )
    if not program:
        return ""
    if program[2]:
        return complaint(place, f"test -x {program[2]}", typed)
    options = " ".join(re.findall(r" (--[a-z-]+)", text))
    if not options and program[1].startswith("tests"):  # it may know none at all, and begin
        return complaint(place, f"test -f {program[1].replace('.', '/')}.py", typed)
    helped = f"known=$(python -m {program[1]} --help) || exit 1"
    each = (
        f'for option in {options}; do grep -qe "$option" <<< "$known" || {{ echo no $option; exit 1; }}; done'
    )
    return complaint(place, f"{helped}; {each}", typed)


def left(place: Place) -> list[str]:
    """Processes that still run in the place a while after all was typed."""

    def found() -> list[str]:
        lines = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if (folder / "cwd").readlink().is_relative_to(place.home):
                    lines.append((folder / "cmdline").read_text().replace("\0", " "))
        return lines

    deadline = time.monotonic() + LEAVE_S
    while found() and time.monotonic() < deadline:
        time.sleep(0.2)
    return found()


def try_all(user: str, keep: bool) -> Counter[str]:
    """All commands as one user; prints a line for each."""
    place, counts, typed = make(user), Counter[str](), {}
    try:
        for command in (each for page in PAGES for each in commands(place.clone / page.relative_to(ROOT))):
            how, line, wrong = judge(place, command, typed)
            counts.update(["commands", how, *(["wrong"] if wrong else [])])
            print(f"{user}: {command.page}:{command.number}: {command.text}\n    {how}: {line}", flush=True)
            if wrong:
                print(f"    WRONG: {wrong}", flush=True)
    finally:
        place.type("python -m hpc_swe.launch stop runs/mine --now")
        counts.update(wrong=len(lasting := left(place)))
        print("".join(f"{user}: WRONG: a command left this behind: {line}\n" for line in lasting), end="")
        if not keep:
            shutil.rmtree(place.home)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Type the pages' commands into a fresh clone.")
    parser.add_argument(
        "--user", action="append", help="repeatable (default: this user, and nobody for root)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the clones behind")
    arguments = parser.parse_args()
    me = pwd.getpwuid(os.geteuid()).pw_name
    users = arguments.user or ([me, "nobody"] if me == "root" else [me])
    found = {user: try_all(user, arguments.keep) for user in users}
    columns = ("commands", RUN, PLANNED, LOOKED_UP, "wrong")
    print("\n" + "  ".join(["user".ljust(10), *columns]))
    for user, counts in found.items():
        cells = (str(counts[name]).rjust(len(name)) for name in columns)
        print("  ".join([user.ljust(10), *cells]))
    return 1 if any(counts["wrong"] for counts in found.values()) else 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())

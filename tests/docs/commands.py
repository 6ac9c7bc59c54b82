"""Types what README.md and docs/*.md tell people to type, as far as this machine can.

Each command of a block has its program, options and files looked up. What has a plan (`make -n`, the demo's
`--dry-run`) is planned as well. What needs a cluster, a run or the network is not run.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.kit.checkout import ROOT, typed

GENERATED = ROOT / "docs/commands.md"
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {GENERATED})]
PROGRAMS = {"apptainer", "crontab", "kill", "ls", "pip", "python", "python3", "sbatch", "scancel", "scontrol"}
PROGRAMS |= {"squeue", "ssh", "tensorboard", "touch", "vllm"}
"""Programs of others. They are not run here: they need a run, a cluster or a network, or change something."""
PLACES = re.compile(r"(?:configs|containers|docs|hpc_swe|jobs|sbatch|tests)/[\w./-]+")
OWN = re.compile(r"(?:make|hpc-swe|python -m (?:hpc_swe|jobs|tests)\.\S+|(?:sbatch|tests)/\S+) \S")
SETTING = re.compile(r"[A-Z_][A-Z0-9_]*=")
LIMIT_S = 300


@dataclass(frozen=True)
class Command:
    """One line of a page, with what follows after backslashes."""

    page: str
    number: int
    text: str

    @property
    def words(self) -> list[str]:
        """Without settings of the environment before it."""
        words = shlex.split(self.text, comments=True)
        while words and SETTING.match(words[0]):
            del words[0]
        return words


def commands(page: Path) -> Iterator[Command]:
    """Of all blocks, fenced or indented, and of what stands between backticks in the text."""
    fenced, held, first = False, "", 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
            continue
        if not (fenced or line.startswith("    ")):
            spans = re.findall(r"`([^`]+)`", line)
            yield from (Command(page.name, number, span) for span in spans if OWN.match(span))
            continue
        first = first or number
        held += line.strip().removesuffix("\\")
        if line.rstrip().endswith("\\"):
            held += " "
            continue
        for part in held.split(" && "):
            if is_command(part):
                yield Command(page.name, first, part)
        held, first = "", 0


def is_command(line: str) -> bool:
    """Other blocks hold pictures, settings and what programs print."""
    try:
        words = Command("", 0, line).words
    except ValueError:
        return False
    if not words or re.match(r"[\w.\"-]+ *= ", line):
        return False
    head = words[0]
    own = re.fullmatch(r"(\.venv/bin|sbatch|containers|tests)/[\w./-]+", head)
    return bool(own) or head in {*PROGRAMS, "make", "python", "python3", "hpc-swe"} and len(words) > 1


def judge(command: Command, scratch: Path) -> tuple[str, str]:
    """How it was tried, and what is wrong with it; empty when nothing is."""
    words = command.words
    for place in PLACES.findall(" ".join(words)):
        if not any((ROOT / place).parent.glob((ROOT / place).name)):
            return "looked up", f"there is no {place}"
    if words[0] == "make":
        return "planned", failure(["make", "-n", *words[1:]])
    if words[0] == "hpc-swe":
        words = ["python", "-m", "hpc_swe", *words[1:]]
    if words[0].removeprefix(".venv/bin/") in ("python", "python3") and words[1:2] == ["-m"]:
        return python(words[2], words[3:], scratch)
    if (ROOT / words[0]).is_file() and not words[0].startswith(".venv"):
        return "looked up", "" if os.access(ROOT / words[0], os.X_OK) else f"{words[0]} cannot be run"
    return "not run", ""


def python(module: str, words: list[str], scratch: Path) -> tuple[str, str]:
    """Ours are run by a plan where they have one; of all, the options must be known."""
    if not module.startswith(("hpc_swe", "jobs", "tests")):
        return "not run", ""
    unknown = [w for w in words if w.startswith("--") and w.partition("=")[0] not in help_of(module, words)]
    if unknown:
        return "looked up", f"{module} knows no {', '.join(unknown)}"
    files = [word for word in words if word.endswith(".toml")]
    if (module, *words[:1]) == ("hpc_swe.launch", "start") and files == ["configs/demo.toml"]:
        plan = [word for word in words[1:] if word.endswith(".toml") or "=" in word]
        plan = [word for word in plan if not word.startswith("model=")]
        plan += [f"model={model(scratch)}", "--dry-run", "--run", str(scratch / "run")]
        return "planned", failure([sys.executable, "-m", module, "start", *plan])
    return "options looked up", ""


@cache
def model(scratch: Path) -> Path:
    """A tiny one, for plans."""
    folder = scratch / "model"
    subprocess.run([sys.executable, "-m", "hpc_swe.demo.model", "--out", folder], cwd=ROOT, check=True)
    return folder


def help_of(module: str, words: list[str]) -> str:
    """Of the module, and of its verb when the first word is one."""
    verbs = [word for word in words[:1] if re.fullmatch(r"[a-z-]+", word)]
    return "".join(said(module, *each) for each in ((), tuple(verbs)))


@cache
def said(module: str, *verb: str) -> str:
    return typed(module, *verb, "--help").stdout


def failure(line: list[str]) -> str:
    """What a command says when it fails."""
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    return (
        "" if done.returncode == 0 else f"exit code {done.returncode}: {(done.stderr or done.stdout)[-300:]}"
    )

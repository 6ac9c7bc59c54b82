"""Counts what a run asks of the metadata server: python -m tests.bench.metadata --rollout 48 --reward 16.

strace reports every call of every process that names a path of the run folder, or an open file in it.
What it prints as cut in two, because another thread came between, is put together again.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from tests.kit.checkout import environment

TRACED = "%file,getdents64,fsync,fdatasync,fstat,fstatfs,ftruncate,fchmod,flock"
CHANGES = ("create", "rename", "unlink", "mkdir", "rmdir", "link")
"""Of the name space; each takes a lock on a folder."""
KINDS = (*CHANGES, "lost race", "open", "list", "page", "look up", "size", "fsync", "other")
MEANING = {
    "lost race": "a rename that found nothing: somebody was faster",
    "open": "an open to read or append",
    "list": "an open of a folder",
    "page": "getdents64: one page of names; the last is empty",
    "look up": "a stat or access by name",
    "size": "fstat of an open file",
    "other": "free space, and whatever else names a path",
}
SPOOLS = ("requests", "episodes", "scored")
NAMES = {"mkdirat": "mkdir", "unlinkat": "unlink", "linkat": "link", "symlink": "link", "getdents64": "page"}
LOOKUPS = ("stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink")
LINE = re.compile(r"(\d+) +([\d.]+) (?:<\.\.\. )?(\w+)(\(| resumed>)(.*)")


@dataclass(frozen=True)
class Count:
    """What was counted in one run."""

    calls: Counter[tuple[str, str]]
    """(folder of the run, kind) -> calls."""
    episodes: int
    workers: int
    seconds: float
    """From the first call in a spool to the last."""

    @property
    def lost(self) -> float:
        """Races lost for each claim."""
        return self.of(kinds=["lost race"]) / (2 * self.episodes)

    def listings(self, folders: Iterable[str]) -> float:
        """Of a worker in a second; the coordinator lists every spool once a second too, which is little."""
        return self.of(folders, ["list"]) / (self.workers * self.seconds)

    def of(self, folders: Iterable[str] = (), kinds: Iterable[str] = KINDS) -> int:
        """Calls of these kinds in these folders; none named is all."""
        wanted, sorts = set(folders), set(kinds)
        return sum(
            n for (where, kind), n in self.calls.items() if kind in sorts and where in (wanted or {where})
        )


def whole_lines(lines: Iterable[str]) -> Iterator[tuple[float, str, str]]:
    """(time, call, its arguments and result)."""
    begun: dict[tuple[str, str], str] = {}
    for line in lines:
        parts = LINE.match(line)
        if parts is None:
            continue
        thread, at, call, how, rest = parts.groups()
        if rest.endswith("<unfinished ...>"):
            begun[thread, call] = rest.removesuffix("<unfinished ...>")
        elif how == "(":
            yield float(at), call, rest
        else:
            yield float(at), call, begun.pop((thread, call), "") + rest


def kind(call: str, rest: str) -> str:
    """What a call is to the metadata server."""
    failed = re.search(r"= -1 E", rest) is not None
    if call in ("open", "openat", "creat"):
        if "O_CREAT" in rest:
            return "create" if "O_EXCL" in rest else "open"
        return "list" if "O_DIRECTORY" in rest else "open"
    if call.startswith("rename"):
        return "lost race" if failed else "rename"
    if call in ("fstat", "fstatfs") or "AT_EMPTY_PATH" in rest:
        return "size"
    if call in LOOKUPS or (failed and call in ("mkdir", "unlink", "unlinkat", "rmdir")):
        return "look up"
    if call == "unlinkat" and "AT_REMOVEDIR" in rest:
        return "rmdir"
    named = NAMES.get(call, call).replace("fdatasync", "fsync")
    return named if named in KINDS else "other"


def tally(lines: Iterable[str], root: Path) -> tuple[Counter[tuple[str, str]], float]:
    """Calls in the run folder by its folder and kind, and the seconds in which spools were used."""
    below = re.compile(re.escape(str(root)) + r'/?([^/">]*)')
    calls: Counter[tuple[str, str]] = Counter()
    asked: list[float] = []
    for at, call, rest in whole_lines(lines):
        if place := below.search(rest):
            what = (place[1] or ".", kind(call, rest))
            calls[what] += 1
            asked += [at] if what[0] in SPOOLS else []
    return calls, max(asked) - min(asked)


def count(rollout: int, reward: int, steps: int, episode_s: float) -> Count:
    """Play a run under strace."""
    with tempfile.TemporaryDirectory(prefix="hpc_swe.") as name:
        root, trace = Path(name) / "run", Path(name) / "trace"
        strace = ["strace", "-f", "-ttt", "--seccomp-bpf", "-qq", "-y", "-e", "signal=none", "-s", 300]
        company = [
            sys.executable,
            "-m",
            "tests.bench.company",
            root,
            "--rollout",
            rollout,
            "--reward",
            reward,
            "--steps",
            steps,
        ]
        command = [*strace, "-e", f"trace={TRACED}", "-o", trace, *company, "--episode-s", episode_s]
        subprocess.run(list(map(str, command)), env=environment(), check=True)
        rows = [pq.read_metadata(path).num_rows for path in (root / "archive/episodes").iterdir()]
        with trace.open(encoding="utf-8", errors="replace") as lines:
            calls, seconds = tally(lines, root)
        return Count(calls, sum(rows), rollout + reward, seconds)


def table(counted: Count) -> list[str]:
    """An episode's share, as a table in Markdown: where by kind."""
    kinds = [k for k in KINDS if counted.of(kinds=[k])]
    groups = {name: [name] for name in (*SPOOLS, "nodes", "control", "state")}
    known = {where for where, _ in counted.calls}
    groups["all else"] = sorted(known - groups.keys())
    groups["sum"] = []
    lines = [f"| an episode | changes | {' | '.join(kinds)} |", "|---" * (len(kinds) + 2) + "|"]
    for name, folders in groups.items():
        numbers = [counted.of(folders, CHANGES), *(counted.of(folders, [k]) for k in kinds)]
        lines.append(f"| {name} | {' | '.join(f'{n / counted.episodes:.2f}' for n in numbers)} |")
    return lines


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words.add_argument("--rollout", type=int, default=48, help="rollout workers")
    words.add_argument("--reward", type=int, default=16, help="reward workers")
    words.add_argument("--steps", type=int, default=8, help="optimizer steps of 64 episodes")
    words.add_argument("--episode-s", type=float, default=2.0, help="seconds of an episode")
    given = words.parse_args()
    counted = count(given.rollout, given.reward, given.steps, given.episode_s)
    print(*table(counted), sep="\n")
    print(f"\n{counted.episodes} episodes, {counted.workers} workers, {counted.seconds:.0f} s")
    print(f"a worker lists control/ {counted.listings(['control']):.2f} times a second, ready/ ", end="")
    print(
        f"{counted.listings(['requests', 'episodes']):.2f} times; it loses {counted.lost:.2f} races a claim"
    )
    print(*(f"{name}: {text}" for name, text in MEANING.items()), sep="\n")


if __name__ == "__main__":
    main()

"""Write one JSONL log of metrics per process, and define what every curve means.

`drawing` shows the logs in TensorBoard.
"""

import logging
import math
import os
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from hpc_swe.base.records import MetricLine
from hpc_swe.base.store import atomic

RECENT = 20  # values of a curve that `status` shows
METRICS = {
    "reward/mean": "mean reward of all finished episodes, in group order, trained or not",
    "reward/std": "standard deviation of those rewards",
    "reward/trained_mean": "mean reward of the groups that were trained",
    "reward/shaped": "mean reward less the penalties of [shaping]",
    "solve/train": "share of all finished episodes that were resolved, in group order, trained or not",
    "solve/trained": "share of episodes that were resolved in the groups that were trained",
    "solve/eval/*": "share of held-out episodes that were resolved, mean over tasks, by decoding",
    "solve/eval_low/*": "lower end of the 95 % interval of solve/eval, bootstrapped over tasks",
    "solve/eval_high/*": "upper end of that interval",
    "solve/eval_any/*": "share of held-out tasks that at least one sample resolved",
    "solve/best": "highest solve/eval so far of the decoding that selects the best weights",
    "solve/best_step": "step of the evaluation with that solve rate; its weights are kept",
    "solve/eval_part/*": "solve/eval of one part of a mixture, by part and decoding",
    "infra/eval/*": "share of held-out episodes that failed on infrastructure; solve/eval counts 0 for them",
    "groups/signal_rate": "share of finished groups whose rewards alone give advantages that are not all 0",
    "groups/all_solved": "share of finished groups that all of their episodes resolved",
    "groups/no_signal": "groups without signal before the last group of the batch",
    "groups/dropped_few": "groups dropped because fewer than two members were usable",
    "groups/dropped_old": "groups dropped because a token was older than max_staleness allows",
    "groups/straggled": "groups closed because every unfinished member was worked on for too long",
    "groups/open": "groups dispatched and not yet consumed",
    "taskset/groups/*": "groups of one part of a mixture that the batch closed",
    "taskset/reward/*": "mean reward of the finished episodes of one part of a mixture",
    "taskset/solve/*": "share of the finished episodes of one part of a mixture that were resolved",
    "taskset/signal/*": "share of the finished groups of one part whose advantages are not all 0",
    "curriculum/passed_over": "visits at which a settled task was passed over since the last batch",
    "curriculum/settled": "share of the tasks with a group so far that all or no episodes resolve",
    "staleness/mean": "batch step minus version step, mean over sampled tokens",
    "staleness/max": "batch step minus version step, largest over sampled tokens",
    "episodes/samples": "token sequences per finished episode, trained or not; above 1 when prompts do not "
    "extend each other",
    "episodes/turns": "turns per episode",
    "episodes/finished": "finished episodes of the groups that the batch closes, trained or not",
    "episodes/tokens": "sampled tokens per episode",
    "episodes/trained_tokens": "sampled tokens per trained episode; fewer where long ones are left out",
    "episodes/dropped_tokens": "sampled tokens per episode of a dropped group",
    "episodes/prompt_tokens": "tokens of prompts per episode, those of earlier turns counted each time",
    "episodes/cached_tokens": "tokens of prompts per episode that an engine found in its prefix cache",
    "episodes/untrained_turns": "turns without a loss per trained episode: abandoned turns and side chains",
    "episodes/infra_rate": "infrastructure failures per result read",
    "episodes/infra": "infrastructure failures read, or found in dead/",
    "episodes/duplicates": "results of members that already had one, or of groups already consumed",
    "episodes/absent": "members found in no spool and requested again",
    "recorder/chains": "conversations started per finished episode; above 1 when histories are rewritten",
    "recorder/undelivered": "replies per finished episode that did not reach the agent",
    "recorder/continued": "completions per finished episode that were continued after an engine aborted them",
    "recorder/parse_errors": "replies per finished episode with a tool call that could not be parsed",
    "recorder/context_full": "requests per finished episode with no room left for a reply",
    "recorder/ignored_settings": "sampling settings per finished episode that a client sent and nobody used",
    "exit/*": "share of episodes by exit status",
    "outcome/*": "share of episodes by the grader's outcome",
    "infra/turns_*": "infrastructure failures per result read, by turns taken; each range ends at the next",
    "grader/self_checks": "reference patches and empty patches that were graded to check the grader",
    "grader/self_check_errors": "share of self-checks that were graded wrongly",
    "grader/broke": "share of results on which the grader itself failed; they count as unresolved",
    "grader/disagrees": "share of results that passed a test first and failed it in a second run",
    "grader/shared": "share of results that have the score of a sibling with an equal patch",
    "grader/silent": "share of results that were resolved first, but whose later test runs gave no result",
    "seconds/sandbox": "seconds per episode: starting and stopping sandboxes",
    "seconds/engine": "seconds per episode: waiting for completions",
    "seconds/engine_queue": "seconds per episode: requests in the queue of an engine",
    "seconds/prefill": "seconds per episode: requests whose prompt is computed",
    "seconds/decode": "seconds per episode: requests that sample, pauses for new weights included",
    "seconds/tools": "seconds per episode: running tools",
    "seconds/grading": "seconds per episode: grading, or waiting for that of an equal patch",
    "seconds/queue": "seconds per episode: waiting in spools",
    "engines/prefill": "share of the engines' time: forward passes that computed prompts, or parts of them",
    "engines/decode": "share of the engines' time: forward passes that only sampled",
    "engines/full": "share of the engines' time: passes that only sampled while requests waited for room",
    "engines/paused": "share of the engines' time: loading new weights, or asleep",
    "engines/idle": "share of the engines' time: no request",
    "batch/tokens": "tokens with a loss in the batch",
    "batch/samples": "samples in the batch",
    "batch/microbatches": "microbatches per data-parallel rank",
    "batch/fill": "share of the token budget of microbatches that is used",
    "batch/unrouted": "samples with a turn without routing, so routed freely; 0 if all have one",
    "policy/loss": "the loss that the step minimized",
    "policy/tokens": "tokens with a loss that the learner saw",
    "policy/nll": "-log pi per trained token",
    "policy/entropy": "entropy in nats per trained token",
    "policy/surprise_balance": "-log mu minus entropy: about 0 when tokens were sampled from mu",
    "policy/kl": "divergence from the reference, k3 times the importance ratio",
    "policy/sampler_square": "mean of (log pi - log mu)^2, whose weight is sampler_coefficient",
    "policy/grad_norm": "norm of the gradient before clipping, mean over the optimizer steps of the batch",
    "policy/skipped": "optimizer steps of the batch that were left out because a gradient was not finite",
    "policy/expert_load": "tokens of the busiest process in a layer of experts, in multiples of the mean",
    "policy/lr": "learning rate",
    "gap/mean": "mean of d = log pi - log mu, learner minus sampler; decoupled: pi before the batch",
    "gap/k3": "e^d - 1 - d: divergence of the learner from the sampler",
    "gap/far_share": "share of tokens with |d| > 1",
    "gap/p99": "99th percentile of |d|",
    "gap/max": "largest |d|",
    "ratio/mean": "mean of pi / mu",
    "ratio/effective_share": "effective sample size of pi / mu as a share of the tokens",
    "ratio/clipped_low": "share of tokens whose gradient the lower clip bound cuts off; gspo: by sequence",
    "ratio/clipped_high": "share of tokens whose gradient the upper clip bound cuts off; always 0 is suspect",
    "ratio/clipped_dual": "share of tokens with negative advantage whose gradient dual_clip cuts off",
    "ratio/capped_share": "decoupled, cispo: share of tokens over ratio_cap",
    "ratio/sequence_mean": "gspo: mean over tokens of the ratio of their sequence",
    "ratio/sequence_spread": "gspo: mean of |log| of that ratio; clip wider than rounding makes it",
    "ratio/shifted_share": "share of tokens that mask_shift leaves out",
    "ratio/diverged_share": "share of tokens whose sequence mask_sequence leaves out",
    "step_seconds/*": "seconds of the learner's step by part",
    "step_seconds/checkpoint": "seconds for the checkpoint, if there was one, of the step before",
    "turn/offload_s": "hybrid: seconds in which the learner moved its state to host memory",
    "turn/engines_s": "hybrid: seconds for which the engines had the GPUs",
    "turn/sleep_s": "hybrid: seconds in which the learner waited until the engines slept",
    "turn/load_s": "hybrid: seconds in which the learner moved its state back",
    "turn/left_by_learner_gib": "hybrid: GiB of the fullest GPU that all processes used after the learner "
    "had moved its state and before the engines took the GPUs",
    "turn/left_by_engines_gib": "hybrid: GiB of it that they used after the engines had gone to sleep and "
    "before the learner moved its state back: CUDA itself, CUDA graphs, buffers of communication",
    "rate/trained_tokens": "tokens with a loss per second of the learner's whole step, waiting included",
    "rate/sampled_tokens": "sampled tokens of consumed episodes per second since the last batch",
    "spool/*": "messages in a spool, by state, when the batch was published",
    "sft/cut": "conversations that were cut after a turn to fit; of demonstrations those so far",
    "sft/dropped": "conversations left out: their first turn is too long, or a row cannot be used",
    "validation/loss": "loss of the held-out conversations, under the weights after so many steps",
    "validation/nll": "-log pi per held-out token with a loss, under the same weights",
    "validation/entropy": "entropy in nats per held-out token with a loss",
    "validation/tokens": "held-out tokens with a loss",
}
"""Name or pattern of every curve -> its meaning."""
LAYOUT = {
    "Does it learn?": {
        "reward": ["reward/mean", "reward/trained_mean", "reward/shaped"],
        "solve rate": ["solve/train", "solve/eval/.*"],
        "held out, with its interval": ["solve/eval.*"],
        "best evaluation": ["solve/best"],
        "step of the best evaluation": ["solve/best_step"],
        "groups with signal, and those all solved": ["groups/signal_rate", "groups/all_solved"],
    },
    "Which tasks are trained?": {
        "solve rate of each part": ["taskset/solve/.*"],
        "reward of each part": ["taskset/reward/.*"],
        "groups of each part": ["taskset/groups/.*"],
        "groups with signal of each part": ["taskset/signal/.*"],
        "settled tasks": ["curriculum/settled"],
        "passed over": ["curriculum/passed_over"],
    },
    "Can it be trusted?": {
        "infrastructure failures": ["episodes/infra_rate", "grader/self_check_errors", "outcome/cheated"],
        "endings": ["exit/.*"],
        "staleness": ["staleness/mean", "staleness/max"],
        "groups dropped for their age": ["groups/dropped_old"],
        "learner against sampler": ["gap/mean", "gap/k3", "gap/p99", "policy/surprise_balance"],
        "clipped": ["ratio/clipped_.*", "ratio/.*_share"],
        "ratio of sequences": ["ratio/sequence_.*"],
        "samples without routing": ["batch/unrouted"],
    },
    "How does the policy change?": {
        "loss and divergence": ["policy/loss", "policy/kl", "policy/sampler_square", "validation/loss"],
        "entropy": ["policy/entropy", "policy/nll"],
        "gradient": ["policy/grad_norm"],
        "skipped, because not finite": ["policy/skipped"],
        "learning rate": ["policy/lr"],
        "busiest experts": ["policy/expert_load"],
        "length": ["episodes/tokens", "episodes/(trained|dropped)_tokens", "episodes/turns"],
    },
    "Where does the time go?": {
        "rates": ["rate/.*"],
        "seconds of an episode": ["seconds/.*"],
        "time of engines": ["engines/.*"],
        "seconds of a step": ["step_seconds/.*"],
        "seconds of turns on the GPUs": ["turn/.*_s"],
        "GPU memory between turns": ["turn/.*_gib"],
    },
}
"""Category -> chart -> regular expressions of its curves, for the tab "Custom Scalars"."""

log = logging.getLogger(__name__)


def meaning(name: str) -> str:
    """Return the meaning of a curve; empty when METRICS does not list it."""
    return METRICS.get(name) or next((m for p, m in METRICS.items() if fnmatchcase(name, p)), "")


def decode(data: bytes) -> tuple[list[MetricLine], int]:
    """Return the lines of a log, and the number of those that cannot be read, as after a full disk."""
    lines, broken = [], 0
    for text in filter(None, data.split(b"\n")):
        try:
            lines.append(msgspec.json.decode(text, type=MetricLine))
        except (msgspec.DecodeError, UnicodeDecodeError):
            broken += 1
    return lines, broken


class Tail:
    """Read what all processes of a run log, line by line, as it comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def new_lines(self) -> list[MetricLine]:
        """Return the whole lines that were logged since the last call."""
        lines: list[MetricLine] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + bool(whole)
            found, broken = decode(whole)
            lines += found
            if broken:
                log.warning("%s: skipped %d lines that cannot be read", path, broken)
        return lines


class Log:
    """A log is written by one process only, and no decision depends on it."""

    def __init__(self, path: Path) -> None:
        self.recent: dict[str, list[float]] = {}
        """Last values by curve, oldest first."""
        with atomic.storage(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, atomic.MODE)
        size = os.fstat(self._file).st_size
        self._is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        """Whether the file ends in the middle of a line, for example because the disk was full."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; leave out numbers that are not finite, with a warning."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            log.warning("not finite at step %d: %s", step, ", ".join(sorted(values.keys() - finite.keys())))
        for name, value in finite.items():
            self.recent[name] = [*self.recent.get(name, []), value][-RECENT:]
        line = MetricLine(step=step, time=time.time(), values=finite)
        data = b"\n" * self._is_torn + msgspec.json.encode(line) + b"\n"
        self._is_torn = True
        try:
            self._is_torn = os.write(self._file, data) < len(data)
            os.fsync(self._file)  # a node that is lost must not take the line of a step that it has saved
        except OSError as error:
            log.warning("not logged: step %d: %s", step, error)  # a lost metric must not end the process

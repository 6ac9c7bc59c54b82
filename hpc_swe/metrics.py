"""Numbers: one JSONL log per writer, and what every curve means. `drawing` shows them in TensorBoard."""

import logging
import math
import os
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from hpc_swe.records import MetricLine

RECENT = 20  # values of a curve that `status` shows
METRICS = {
    "reward/mean": "mean reward of all finished episodes, in group order, trained or not",
    "reward/std": "their standard deviation",
    "reward/trained_mean": "mean reward of the groups that were trained",
    "solve/train": "share resolved of all finished episodes, in group order, trained or not",
    "solve/trained": "share resolved in the groups that were trained",
    "solve/eval/*": "share resolved of held-out tasks, by decoding",
    "solve/eval_low/*": "lower end of its 95 % interval, bootstrapped over tasks",
    "solve/eval_high/*": "upper end",
    "solve/eval_any/*": "share of held-out tasks that at least one sample resolved",
    "infra/eval/*": "share of held-out episodes that infrastructure failed; solve/eval counts them as failed",
    "groups/signal_rate": "share of finished groups whose advantages are not all 0",
    "groups/no_signal": "groups without signal before the last group of the batch",
    "groups/dropped_few": "groups with fewer than two usable members",
    "groups/dropped_old": "groups over hard_max_staleness",
    "groups/straggled": "groups closed by straggler_s, since workers were at each open member for longer",
    "groups/open": "groups dispatched and not consumed",
    "staleness/mean": "batch step minus version step, mean over sampled tokens",
    "staleness/max": "the largest",
    "staleness/masked_share": "share of tokens masked for their age",
    "episodes/samples": "token sequences per finished episode, trained or not; above 1 when prompts do not "
    "extend each other",
    "episodes/turns": "turns per episode",
    "episodes/tokens": "sampled tokens per episode",
    "episodes/untrained_turns": "turns without a loss per trained episode: abandoned, or of a side chain",
    "episodes/infra_rate": "infrastructure failures per result read",
    "episodes/infra": "infrastructure failures read or buried",
    "episodes/duplicates": "results of members that had one, or of groups that were consumed",
    "episodes/absent": "members found in no spool and asked for again",
    "recorder/chains": "conversations begun per finished episode; above 1 when histories are rewritten",
    "recorder/undelivered": "replies per finished episode that did not reach the agent",
    "recorder/continued": "completions per finished episode continued after an engine broke them off",
    "recorder/parse_errors": "replies per finished episode with a tool call that could not be read",
    "recorder/context_full": "requests per finished episode that found no room to answer",
    "recorder/ignored_settings": "sampling settings per finished episode that a client sent in vain",
    "exit/*": "share of episodes by exit status",
    "outcome/*": "share of episodes by the grader's outcome",
    "infra/turns_*": "infrastructure failures per result read, by turns taken; each range ends at the next",
    "grader/sentinels": "references and empty patches that were graded to try the grader",
    "grader/sentinel_errors": "share of them that it misjudged",
    "grader/broke": "share of results on which the grader itself failed; they are unresolved",
    "grader/disagrees": "share of results that passed a test at first and failed it when it ran again",
    "grader/silent": "share of results that resolved at first, but whose later sittings told nothing",
    "seconds/sandbox": "per episode, starting and stopping sandboxes",
    "seconds/engine": "per episode, waiting for completions",
    "seconds/tools": "per episode, tools",
    "seconds/grading": "per episode, the grader",
    "seconds/queue": "per episode, lying in spools",
    "length/finished_d*": "finished episodes by decile of sampled tokens, d0 the shortest",
    "length/trained_d*": "those with a loss",
    "length/dropped_d*": "those in dropped groups",
    "batch/tokens": "tokens with a loss in the batch",
    "batch/samples": "samples in the batch",
    "batch/microbatches": "microbatches per data-parallel rank",
    "batch/fill": "share of the token budget that is used",
    "policy/loss": "what the step minimized",
    "policy/tokens": "tokens with a loss that the learner saw",
    "policy/nll": "-log pi per trained token",
    "policy/entropy": "entropy in nats per trained token",
    "policy/surprise_balance": "-log mu minus entropy: about 0 when tokens were drawn from what mu says",
    "policy/kl": "divergence from the reference, k3 times the importance ratio",
    "policy/grad_norm": "norm of the gradient before clipping",
    "policy/lr": "learning rate",
    "gap/mean": "log pi - log mu, learner minus sampler, per trained token",
    "gap/k3": "e^d - 1 - d of that difference d: divergence of the learner from the sampler",
    "gap/far_share": "share of tokens with |d| > 1",
    "gap/p99": "99th percentile of |d|",
    "gap/max": "largest |d|",
    "ratio/mean": "mean of pi / mu",
    "ratio/effective_share": "effective sample size of pi / mu as a share of the tokens",
    "ratio/clipped_low": "share of tokens whose gradient the lower clip stops",
    "ratio/clipped_high": "share of tokens whose gradient the upper clip stops; 0 for ever is suspect",
    "ratio/clipped_dual": "share of tokens of negative advantage whose gradient dual_clip stops",
    "ratio/capped_share": "decoupled: share of tokens over ratio_cap",
    "ratio/masked_share": "decoupled: share of tokens outside mask_low .. mask_high",
    "step_seconds/*": "seconds of the learner's step by part",
    "rate/trained_tokens": "tokens with a loss per second of the learner's whole step, waiting included",
    "rate/sampled_tokens": "sampled tokens of consumed episodes per second since the last batch",
    "spool/*": "messages in a spool, by state, when the batch was published",
    "sft/cut": "demonstrations cut at a turn to fit, so far, by the number of the demonstration",
    "sft/dropped": "demonstrations left out, too long in their first turn",
}
"""Every curve: its name, or a pattern, and what it means."""

log = logging.getLogger(__name__)


def meaning(name: str) -> str:
    """What a curve shows; empty when METRICS does not have it."""
    return METRICS.get(name) or next((m for p, m in METRICS.items() if fnmatchcase(name, p)), "")


class Log:
    """The writer's side. Nobody else writes this file, and nothing is decided by it."""

    def __init__(self, path: Path) -> None:
        self.recent: dict[str, list[float]] = {}
        """Last values by curve, oldest first."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(self._file).st_size
        self._is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        """Whether the file ends within a line, as a full disk leaves it."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; numbers that are not finite are left out, and said."""
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
        except OSError as error:
            log.warning("not logged: step %d: %s", step, error)  # no number is worth a process

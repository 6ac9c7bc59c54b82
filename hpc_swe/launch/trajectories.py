"""Take the conversations of an SFT run as token ids, once, before the run is made.

A start that refuses a row has changed nothing, and a run never reads the files or the tokenizer again. The
recorder's token builder makes the ids and the mask, so what is trained is what episodes will sample.
Demonstrations are endless, and are encoded by the coordinator; the start tries one.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from rich.table import Table

from hpc_swe.agents.chat import rows
from hpc_swe.agents.chat.rows import ChatRow
from hpc_swe.agents.chat.tokens import Tokens
from hpc_swe.base import records, tables
from hpc_swe.base.errors import AgentError, ConfigError
from hpc_swe.base.records import Message, RunManifest, Sample, Split
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import atomic
from hpc_swe.base.store.parquet import trajectories
from hpc_swe.base.store.parquet.trajectories import Trajectory
from hpc_swe.config.settings import RunConfig
from hpc_swe.config.tokenization import token_builder
from hpc_swe.launch import existing
from hpc_swe.roles.coordinator.dispatch import stable_hash
from hpc_swe.roles.coordinator.modes import sft

MOST_COMPLAINTS = 5
Encoded = tuple[Sequence[int] | records.IdArray, Sequence[int] | np.ndarray]

log = logging.getLogger(__name__)


def is_source(config: RunConfig) -> bool:
    """Return whether a run trains on files of trajectories."""
    return config.mode == "sft" and bool(config.sft.trajectories)


def take(config: RunConfig) -> list[Trajectory]:
    """Read, encode and divide all conversations; none for a run that has another source.

    Raise ConfigError if rows cannot be used, or if no conversation is left of a split.
    """
    if not is_source(config) or not (Path(config.model) / "tokenizer.json").is_file():
        return []  # the missing model is a complaint of its own
    encoder, complaints = _Encoder(config), list[str]()
    files: list[tuple[Split, str]] = [
        *(("train", name) for name in config.sft.trajectories),
        *(("eval", name) for name in config.sft.validation),
    ]
    found = [each for split, name in files for each in _of_file(encoder, Path(name), split, complaints)]
    if complaints and config.sft.bad_rows == "refuse":
        more = f"and {len(complaints) - MOST_COMPLAINTS} more" if len(complaints) > MOST_COMPLAINTS else ""
        remedy = f"{len(complaints)} of {len(found)} rows cannot be used; "
        remedy += 'correct them, or set sft.bad_rows = "drop" to leave them out'
        raise ConfigError("\n".join([*complaints[:MOST_COMPLAINTS], *filter(None, [more]), remedy]))
    found = _divided(found, config.sft.validation_share, config.seed)
    _require_use(config, found)
    return found


def resolved(run: RunDir, config: RunConfig, taken: Sequence[Trajectory]) -> RunConfig:
    """Return the configuration with the steps of its epochs over what is taken, or what the run has."""
    if not is_source(config) or not config.sft.epochs or not (taken or run.trajectories.exists()):
        return config
    known = taken or trajectories.read(run.trajectories)
    samples = config.sft.epochs * sum(each.is_used for each in known if each.split == "train")
    return replace(config, steps=math.ceil(samples / config.sft.samples_per_step))


def tokenizer_digest(run: RunDir) -> str:
    """Return the digest of the tokenizer whose ids a run's episodes have.

    Raise ConfigError if the folder is no run, or if its model is gone and it has exported no weights.
    """
    config, folder = existing.load(run), atomic.get(run.manifest, RunManifest).folder
    places = [Path(folder) / config.model, *(run.weights / name for name in atomic.names(run.weights))]
    for place in places:
        if (place / "tokenizer.json").is_file():
            return Tokens(place).digest
    raise ConfigError(f"{run.root}: its tokenizer is gone: {places[0]} has no tokenizer.json; put it back")


def overview(taken: Sequence[Trajectory]) -> Table:
    """Return a table of what was taken, by split."""
    title = "trajectories, encoded as episodes are recorded"
    columns = ["used", "of these cut", "left out", "tokens", "with a loss", "longest"]
    table = tables.table(["split"], columns, title=title)
    for split in sorted({each.split for each in taken}, reverse=True):
        own = [each for each in taken if each.split == split]
        lengths = [len(each.mask) for each in own if each.is_used]
        fates = Counter(each.fate for each in own)
        trained = sum(sum(each.mask) for each in own)
        numbers = [len(lengths), fates["cut"], fates["dropped"], sum(lengths), trained, max(lengths)]
        table.add_row("validation" if split == "eval" else split, *(f"{number:,}" for number in numbers))
    return table


def _of_file(encoder: "_Encoder", path: Path, split: Split, complaints: list[str]) -> Iterator[Trajectory]:
    """Yield a file's rows; one that cannot be used is dropped, and its complaint added."""
    for place, raw in rows.read(path):
        try:
            yield replace(encoder.encode(rows.parse(place, raw)), split=split)
        except ConfigError as error:
            complaints.append(str(error))
            yield Trajectory(name=place, split=split, fate="dropped", why=str(error))


class _Encoder:
    """Encode rows as the run's episodes will be recorded."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._builder = config, token_builder(config)
        self._preface = config.agent.preface if config.sft.shown == "agent" else None
        if self._preface is None and config.sft.shown == "agent":
            raise ConfigError(
                f"[agent] {type(config.agent).__name__} does not say what its policy is shown; set "
                'sft.shown = "row"'
            )

    def encode(self, row: ChatRow) -> Trajectory:
        """Return a row's tokens, cut to the context.

        Raise ConfigError, with what to change, if episodes of this run could not look so.
        """
        ids, mask = self._recorded(row) if row.recorded else self._rendered(row)
        marks = np.asarray(mask, dtype=np.uint8)
        limit = self._config.rollout.context
        end = sft.fitting_length(marks, limit)
        kept = Trajectory(name=row.place, task_id=row.task_id)
        if not 0 < end <= limit:
            return replace(
                kept, fate="dropped", why=f"{len(marks)} tokens do not fit rollout.context = {limit}"
            )
        fate = "whole" if end == len(marks) else "cut"
        return replace(kept, fate=fate, token_ids=records.ids(ids[:end]), mask=marks[:end].tobytes())

    def _recorded(self, row: ChatRow) -> Encoded:
        recorded = row.recorded
        assert recorded is not None
        if recorded.tokenizer != self._builder.tokens.digest:
            raise ConfigError(
                f"{row.place}: token_ids: of another tokenizer than model = {self._config.model!r} has; "
                "train the model that sampled them, or remove the column token_ids to encode the text again"
            )
        return recorded.token_ids, recorded.mask

    def _rendered(self, row: ChatRow) -> Encoded:
        if fault := next(self._faults(row), ""):
            raise ConfigError(f"{row.place}: {fault}")
        messages, thoughts, tools = row.messages, row.thoughts, row.tools
        if self._config.sft.thoughts == "drop":
            thoughts = [""] * len(messages)
        if self._preface is not None:
            kept = [index for index, message in enumerate(messages) if message.role != "system"]
            system = [Message(role="system", content=self._preface.system)] if self._preface.system else []
            messages = [*system, *(messages[index] for index in kept)]
            thoughts = [*([""] * len(system)), *(thoughts[index] for index in kept)]
            tools = self._preface.tools
        try:
            return self._builder.demonstration(messages, tools, thoughts)
        except AgentError as error:
            raise ConfigError(f"{row.place}: messages: {error}; leave the row out") from None

    def _faults(self, row: ChatRow) -> Iterator[str]:
        """Yield what no episode of this run could have."""
        thinking = self._config.rollout.template_arguments.get("enable_thinking")
        if row.enable_thinking not in (None, thinking):
            yield (
                f"enable_thinking: {row.enable_thinking}, but episodes of this run have {thinking}; set it "
                f"to {str(row.enable_thinking).lower()} in rollout.template_arguments, or remove the column"
            )
        prompt = self._builder.thoughts
        for index, message in enumerate(row.messages):
            thinks = bool(row.thoughts[index]) and self._config.sft.thoughts == "keep"
            if message.role == "assistant" and prompt == ("closed" if thinks else "opened"):
                yield (
                    f"messages[{index}]: an answer {'with' if thinks else 'without'} a thought, but every "
                    f"prompt of this model has a thought {prompt}; change enable_thinking in "
                    "rollout.template_arguments, or sft.thoughts"
                )
            if self._preface is not None:
                missing = {call.name[:50] for call in message.tool_calls}.difference(self._preface.names)
                yield from (
                    f"messages[{index}].tool_calls: no tool {name!r} in [agent], which has "
                    f'{", ".join(self._preface.names)}; give it the tool, or set sft.shown = "row"'
                    for name in sorted(missing)
                )


def _divided(found: list[Trajectory], share: float, seed: int) -> list[Trajectory]:
    """Move a share of the tasks to the split ``eval``, which the seed and their names alone decide."""
    if not share:
        return found
    keys = {each.task_id or each.name for each in found if each.is_used}
    ordered = sorted(keys, key=lambda key: (stable_hash(seed, "validation", key), key))
    held_out = set(ordered[: max(1, round(share * len(ordered)))])
    return [replace(e, split="eval") if (e.task_id or e.name) in held_out else e for e in found]


def _require_use(config: RunConfig, found: Iterable[Trajectory]) -> None:
    """Require samples of each split that is asked for, and none in both."""
    names: dict[Split, dict[bytes, str]] = {"train": {}, "eval": {}}
    for each in found:
        if each.is_used:
            names[each.split].setdefault(each.token_ids, each.name)
    for split, key in (("train", "trajectories"), ("eval", "validation")):
        if not names[split] and (split == "train" or config.sft.holds_out):  # type: ignore[index]
            why = "all are in the other split, too long for rollout.context, or dropped by sft.bad_rows"
            raise ConfigError(f"sft.{key}: no conversation is left: {why}")
    for tokens in names["train"].keys() & names["eval"].keys():
        raise ConfigError(
            f"{names['eval'][tokens]}: sft.validation: the same conversation as {names['train'][tokens]}, "
            "which is trained; remove one of them"
        )


def demonstrations(config: RunConfig, fates: Counter[str]) -> Iterator[Sample | None]:
    """Yield each demonstration as episodes will record it; None for one that is left out.

    Raise ConfigError when the task set has none, or when agent or chat template cannot show them.
    """
    preface, conversations = config.agent.preface, config.taskset.demonstrations(config.seed)
    if conversations is None:
        raise ConfigError(
            f"[taskset] {type(config.taskset).__name__} shows no demonstrations; set sft.trajectories"
        )
    if preface is None:
        raise ConfigError(
            f"[agent] {type(config.agent).__name__} does not say what its policy is shown; warm-start with "
            "files of sft.trajectories"
        )
    encode = partial(token_builder(config).demonstration, tools=preface.tools)
    shown = sft.with_system_prompt(conversations, preface)
    return sft.from_conversations(shown, encode, config.rollout.context, fates)


def check_demonstrations(config: RunConfig) -> None:
    """Raise ConfigError unless the first demonstration can be encoded."""
    next(demonstrations(config, Counter()), None)

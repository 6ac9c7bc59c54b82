"""The report says what the run did; what a policy wrote stays text; nothing is lost silently."""

import json
import re

import msgspec
import numpy as np
import pytest

from hpc_swe.base import records
from hpc_swe.base.errors import ConfigError, HpcSweError
from hpc_swe.base.metrics import meaning
from hpc_swe.base.records import Batch, BatchManifest, ExitStatus, ScoredEpisode
from hpc_swe.base.rundir import RunDir
from hpc_swe.base.store import folders
from hpc_swe.base.store.spool import Spool
from hpc_swe.config.settings import BatchesConfig, GroupsConfig
from hpc_swe.models.advantages.grpo import Grpo
from hpc_swe.roles.coordinator import archive
from hpc_swe.roles.coordinator.batching.batches import BatchSettings
from hpc_swe.view.report import curves, episodes, pages
from hpc_swe.view.report.__main__ import WholeEpisodes, write
from hpc_swe.view.report.index import EpisodeRow
from hpc_swe.view.report.spelling import Speller
from hpc_swe.view.report.training import BatchRule, Use
from tests.kit.checkout import ROOT, typed
from tests.kit.coordinator_kit import LIMITS, finish, rundir
from tests.kit.made_episodes import episode, scored, turn
from tests.kit.reported_run import GROUP, RunMaker, Words
from tests.kit.toy_model import HERMES, make_model

HOSTILE = [
    "</script><script>owned = 1</script>",
    '"]});owned = 1;report("run", {',
    "\u2028\u2029\x00\x1b[2J\u202e\ufeff",
    "<!--<img src=x onerror='owned = 1'>",
    "${owned = 1}`\\",
]
SETTINGS = BatchSettings(LIMITS, BatchesConfig(microbatch_tokens=64), Grpo(), 2)


def data(folder, name):
    """What a data file gives to the page."""
    text = (folder / pages.DATA / f"{name}.js").read_bytes().decode("ascii")
    found = re.fullmatch(r'report\(("[^"]*"),(.*)\);\n', text)
    assert found, text[:200]
    assert json.loads(found[1]) == name
    return json.loads(found[2])


def listed(folder):
    index = data(folder, "index")
    return [dict(zip(index["columns"], row, strict=True)) for row in index["rows"]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    made = RunMaker(tmp_path_factory.mktemp("report") / "grpo")
    for step in range(3):
        made.step(step)
    made.evaluation("step_000002")
    made.curves(3)
    return made


@pytest.fixture(scope="module")
def out(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "report"
    write(made.run, folder, WholeEpisodes(newest=None))
    return folder


@pytest.fixture(scope="module")
def speller(tmp_path_factory):
    return Speller(make_model(tmp_path_factory.mktemp("model"), HERMES))


# what a policy wrote


@pytest.mark.parametrize("text", [*HOSTILE, "\ud800 alone", "\U0001f40d"])
def test_no_text_ends_its_literal_or_its_script(text):
    script = pages.script("a/b", {"said": [text]})
    assert script.isascii()
    assert b"<" not in script
    assert script.count(b"\n") == 1
    literal = re.fullmatch(rb'report\("a/b",(.*)\);\n', script)
    assert literal is not None
    assert json.loads(literal[1]) == {"said": [text]}


def test_no_control_character_reaches_the_page(made, speller):
    hostile = "".join(HOSTILE)
    words = Words(hostile, hostile, json.dumps({hostile: [hostile]}), *[hostile] * 4)
    shown = json.dumps(episodes.whole(made.episode(0, 0, words=words), Use(), speller), ensure_ascii=False)
    assert shown.count("owned") > 20
    assert re.findall("[\x00-\x1f\u202a-\u202e\ud800-\udfff]", shown) == []


# what was trained


def trained_tokens(run, step, manifest):
    """Token and advantage of each position with a loss, from the batch that the learner reads."""
    found = []
    for name in (name for name in manifest.files if name.startswith("rank_")):
        batch = msgspec.msgpack.decode(folders.read(run.batch(step), name, manifest), type=Batch)
        for micro in batch.microbatches:
            at = np.flatnonzero(micro.mask_array * records.float_array(micro.weights))
            ids, advantages = records.id_array(micro.token_ids), records.float_array(micro.advantages)
            found += [(int(ids[n]), round(float(advantages[n]), 4)) for n in at]
    return sorted(found)


def test_each_curve_that_explains_what_is_trained_is_in_a_chart():
    named = set(re.findall(r"`([a-z]+/[a-z_/*<>]+)`", (ROOT / "docs/training.md").read_text()))
    names = sorted(name.replace("<decoding>", "greedy") for name in named if meaning(name))
    assert len(names) > 12
    charts = curves.charts({name: {0: 1.0} for name in names if "*" not in name})
    shown = {curve["name"] for chart in charts for curve in chart["curves"]}
    assert [name for name in names if name not in shown and "*" not in name] == []


def test_what_is_shown_as_trained_is_what_the_batches_hold(tmp_path):
    run, rule, compared = rundir(tmp_path), BatchRule(SETTINGS), 0
    finish(run, steps=8)
    for step in range(1, 8):
        manifest = folders.manifest(run.batch(step), BatchManifest)
        archived, shown = archive.read(run.archive(step)), []
        for group in sorted({s.episode.request.group_id for s in archived}):
            members = [s for s in archived if s.episode.request.group_id == group]
            uses = rule.uses(members, step, group in manifest.groups)
            for member, use in zip(members, uses, strict=True):
                for played, mask in zip(member.episode.turns, use.masks, strict=bool(use.masks)):
                    shown += [(int(i), round(use.advantage, 4)) for i in played.completion[mask]]
        assert sorted(shown) == trained_tokens(run, step, manifest)
        compared += len(shown)
    assert compared > 10


@pytest.mark.parametrize(
    ("rewards", "changes", "reasons"),
    [
        ((1.0, 0.0), {}, ["", ""]),
        ((1.0, 1.0), {}, ["all advantages of its group are 0"] * 2),
        ((1.0, None), {}, ["fewer than two episodes", "it is no result: infrastructure"]),
        ((1.0, 0.0), {"status": ExitStatus.CONTEXT}, ["it was cut off"] * 2),
    ],
)
def test_an_episode_that_was_not_trained_says_why(rewards, changes, reasons):
    rule = BatchRule(BatchSettings(GroupsConfig(), BatchesConfig(overlong="mask_loss"), Grpo(), 1))
    members = [scored(reward, index=index, **changes) for index, reward in enumerate(rewards)]
    found = [use.reason for use in rule.uses(members, 0, True)]
    assert all(
        why.startswith(reason) and bool(why) == bool(reason)
        for why, reason in zip(found, reasons, strict=True)
    )


def test_forks_and_side_chains_have_their_own_masks():
    """Turn 2 was abandoned, turn 3 is a side chain, and the reply of turn 4 did not arrive."""
    turns = [
        turn(None, [1], [10, 11]),
        turn(0, [2], [12]),
        turn(0, [3], [13]),
        turn(None, [4], [14]),
        turn(1, [5], [15], delivered=False),
        turn(1, [6], [16]),
    ]
    made = ScoredEpisode(episode=episode(turns), score=scored(1.0).score)
    masks = BatchRule(SETTINGS).uses([made, scored(0.0, index=1)], 0, True)[0].masks
    assert [mask.tolist() for mask in masks] == [[True] * 2, [True], [False], [False], [False], [True]]


# tokens


@pytest.mark.parametrize("text", ["a plain text", "\U0001f40d\u00f6\u20ac!", "a\u00f6" * 3, "\r\n\t\x00"])
def test_the_texts_of_tokens_join_to_what_was_said(speller, text):
    ids = speller._tokens.encode(text)
    words, odd = speller.words(ids)
    spelled = "".join(odd.get(n, words.get(each, "?")) for n, each in enumerate(ids))
    assert spelled == text.replace("\r", r"\x0d").replace("\x00", r"\x00")


# the pages of a run


def test_every_episode_is_listed_and_can_be_opened(made, out):
    rows = listed(out)
    assert [row["step"] for row in rows] == [2] * 12 + [1] * 8 + [0] * 8
    assert {row["split"] for row in rows if row["table"] == "eval-step_000002"} == {"eval"}
    whole = {rows[n]["table"] + f"/{rows[n]['number']:04d}" for n in data(out, "index")["whole"]}
    assert len(whole) == len(rows) - 1  # one of the evaluation never came back
    for name in whole:
        shown = data(out, name)
        assert [turn_["answer"] for turn_ in shown["turns"]] == [2, 4, 6]
        said = "".join(shown["words"].get(str(i), "") for i in shown["turns"][0]["ids"])
        assert said.startswith("I look at the file, d")
        assert all(len(turn_["ids"]) == len(turn_["logprobs"]) for turn_ in shown["turns"])
    first = data(out, "train-step_000002/0001")
    assert (first["outcome"], first["advantage"], first["untrained"]) == ("resolved", 0.75, "")
    assert first["turns"][1]["versions"][0][3] == "v000001-i00"
    assert data(out, "train-step_000002/0004")["untrained"] == "all advantages of its group are 0"
    assert data(out, "eval-step_000002/0000")["untrained"] == "an evaluation trains nothing"


def test_curves_are_those_of_tensorboard_and_evaluations_have_intervals(made, out):
    charts = {chart["title"]: chart for chart in data(out, "run")["charts"]}
    assert [curve["name"] for curve in charts["reward"]["curves"]] == ["reward/mean", "reward/trained_mean"]
    assert charts["loss and divergence"]["curves"][0]["meaning"] == "the loss that the step minimized"
    (rate, any_of) = charts["held out, with its interval"]["curves"]
    assert (rate["name"], any_of["name"]) == ("solve/eval/greedy", "solve/eval_any/greedy")
    [[step, low, high]] = rate["interval"]
    assert step == 0
    assert low < rate["points"][0][1] < high


def row(number, step, task="a"):
    return EpisodeRow(
        table=f"t{step}",
        number=number,
        split="train",
        step=step,
        group_id=0,
        index=0,
        task_id=task,
        outcome="resolved",
        exit_status="submitted",
        reward=1.0,
        turns=1,
        sampled_tokens=1,
    )


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        (WholeEpisodes(), {"t3/0000", "t3/0001", "t2/0000", "t1/0000"}),
        (WholeEpisodes(newest=2), {"t3/0000", "t3/0001"}),
        (WholeEpisodes(newest=0, steps=[(1, 2)]), {"t2/0000", "t1/0000"}),
        (WholeEpisodes(newest=1, steps=[(1, 1)]), {"t3/0000", "t1/0000"}),
        (WholeEpisodes(newest=1, task="b"), {"t3/0001"}),
        (WholeEpisodes(newest=0), set()),
    ],
)
def test_the_newest_episodes_and_those_of_the_named_steps_are_whole(choice, chosen):
    assert choice.ids([row(0, 3), row(1, 3, "b"), row(0, 2), row(0, 1)]) == chosen


# runs that are young, hurt or not there


def test_a_run_without_any_batch_shows_what_waits_for_one(tmp_path):
    made = RunMaker(tmp_path / "young")
    Spool(made.run.scored, ScoredEpisode).put("train-000000-01", made.episode(0, 1, 1.0))
    write(made.run, tmp_path / "out", WholeEpisodes())
    (only,) = listed(tmp_path / "out")
    assert (only["table"], only["step"], only["outcome"]) == ("open", None, "resolved")
    assert data(tmp_path / "out", "open/0000")["untrained"] == "no batch has consumed it yet"


def test_a_damaged_archive_is_named_and_the_others_are_shown(tmp_path):
    made = RunMaker(tmp_path / "hurt")
    for step in range(3):
        made.step(step)
    made.run.archive(0).write_bytes(made.run.archive(0).read_bytes()[:500])
    content = bytearray(made.run.archive(1).read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    made.run.archive(1).write_bytes(content)
    write(made.run, tmp_path / "out", WholeEpisodes())
    notes = data(tmp_path / "out", "run")["notes"]
    assert [name for name in ("step_000000", "step_000001", "step_000002") if name in "".join(notes)] == [
        "step_000000",
        "step_000001",
    ]
    assert {r["table"] for r in listed(tmp_path / "out")} >= {"train-step_000002"}


def test_without_configuration_or_tokenizer_the_rest_is_shown(tmp_path):
    made = RunMaker(tmp_path / "run")
    made.step(0)
    (tmp_path / "run-model/tokenizer.json").unlink()
    write(made.run, tmp_path / "out", WholeEpisodes())
    assert "tokens are shown as ids" in data(tmp_path / "out", "run")["notes"][0]
    assert data(tmp_path / "out", "train-step_000000/0001")["turns"][0]["trained"] != []
    made.run.config.write_text("{}")
    write(made.run, tmp_path / "out", WholeEpisodes())
    assert "run.json" in data(tmp_path / "out", "run")["notes"][0]
    assert data(tmp_path / "out", "train-step_000000/0001")["advantage"] is None


def test_only_a_report_is_replaced_and_an_interrupted_one_leaves_the_old(made, tmp_path):
    out = tmp_path / "out"
    write(made.run, out, WholeEpisodes(newest=0))
    write(made.run, out, WholeEpisodes(newest=1))
    assert data(out, "run")["whole"] == 1
    with pytest.raises(KeyboardInterrupt), pages.publishing(out):
        raise KeyboardInterrupt
    assert data(out, "run")["whole"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(ConfigError, match="no report"):
        write(made.run, made.run.root, WholeEpisodes())
    with pytest.raises(ConfigError, match="no run here"):
        write(RunDir(tmp_path), out, WholeEpisodes())
    (tmp_path / "file").write_text("")
    with pytest.raises(HpcSweError, match="file"):
        write(made.run, tmp_path / "file", WholeEpisodes())


@pytest.mark.slow
def test_the_command_says_where_the_page_is_and_what_is_missing(made, tmp_path):
    done = typed("hpc_swe.report", made.run.root, "--episodes", "3", "--steps", "0")
    assert done.returncode == 0, done.stderr
    assert (
        f"{made.run.report}/index.html: {3 * 2 * GROUP + 4} episodes, {3 + 2 * GROUP} of them whole"
        in done.stdout
    )
    assert typed("hpc_swe.report", tmp_path).returncode == 2
    assert "name some as in 12,20-25" in typed("hpc_swe.report", made.run.root, "--steps", "x").stderr

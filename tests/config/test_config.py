"""What a person sees who writes a TOML file wrongly."""

import json
import re
import sys
from pathlib import Path

import pytest

from hpc_swe.agents.loops.tool_agent import ToolAgent
from hpc_swe.base.errors import ConfigError
from hpc_swe.config import config as configuration
from hpc_swe.config import conflicts
from hpc_swe.config.removed import REMOVED
from hpc_swe.config.settings import WAIT_S

GOOD = """
model = "m"
[groups]
group_size = 4
[taskset]
type = "bugs"
[sandbox]
type = "process"
[agent]
type = "tool_agent"
[grader]
type = "pytest"
[advantage]
type = "grpo"
[engine]
type = "vllm"
[policy]
type = "megatron"
[executor]
type = "local"
"""


class OwnAgent(ToolAgent, frozen=True, kw_only=True):
    port: int = 1


OPERATE = [
    "retention.keep_every=5",
    "learner.checkpoint_every=7",
    "lease.ttl_s=4",
    "max_restarts=1",
    "eval.every=3",
    "batches.microbatch_tokens=8192",
    'policy.recompute="full"',
    "policy.offload_optimizer=0.5",
    "policy.tensor_parallel=2",
    'engine.extra=["--x"]',
    "rollout.episode_timeout_s=9999",
    "engine.load_timeout_s=77",
]


@pytest.fixture
def read(tmp_path):
    def write(text: str, *overrides: str):
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return configuration.read(path, overrides=list(overrides))

    return write


def test_plugin_is_built_from_its_table(read):
    run = read(GOOD, "advantage.scale_by_std=true", "groups.group_size=2")
    assert run.groups.group_size == 2
    assert run.advantage([1.0, -1.0]) == pytest.approx([1.0, -1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("groups.group_size=0", r"override groups.group_size=0: groups.group_size: Expected .* >= 1"),
        (
            "groups.grup_size=4",
            r"unknown key groups.grup_size; did you mean 'group_size'\?; known: group_size, groups_per_step",
        ),
        ("groups.group-size=4", r"unknown key groups.group-size; did you mean 'group_size'\?; known: group_"),
        ("learner.lr=4", r"unknown key learner.lr; did you mean learner.optimizer.lr\?; known: data_par"),
        ("steps=", r"^override 'steps=': the value is empty .is a shell variable unset\?.; an empty text is"),
        ('advantage.type="gropo"', r"\[advantage\] has no type 'gropo'; did you mean 'grpo'\?; known: grpo"),
        (
            "advantage.scale=true",
            r"\[advantage\] type = 'grpo': .*unknown field `scale`.*known: scale_by_std",
        ),
        (
            'executor={type="slurm", roles={rewrd={mem_gb=3}}}',
            r"^override .*'rewrd' .*; did you mean 'reward'\?; known: coordinator",
        ),
        ("eval.decodings.a.temp=1", r"unknown key eval.decodings\[...\].temp; known: temperature"),
        ('agent={type="tool_agent", tools=["vew"]}', r"^override agent.*no type 'vew'; did you mean 'view'"),
        ("learner.export_every=5", r"groups.max_staleness = 1 .* set it to export_every - 1"),
        ("groups.group_size=1", r"no baseline"),
        ('mode="eval"', r"\[eval.decodings\] is empty"),
        ('mode="sft"', r"objective"),
        ("rollout.context=100000", r"batches.microbatch_tokens"),
        ("rollout.episode_timeout_s=300", r"episode_timeout_s = 300.0 must exceed the agent's budget"),
        ("supervision.stuck_s=90", r"stuck_s = 90.0 must be 0, or at least lease.ttl_s = 120.0"),
        ('rollout.history="template"', r'set batches.train_chains = "all"'),
        ("steps=[", r"override 'steps=\[': write key=value|steps"),
    ],
)
def test_error_names_the_file_the_key_and_what_would_be_right(read, override, message):
    with pytest.raises(ConfigError, match=message):
        read(GOOD, override)


def test_cuda_graphs_under_which_an_engine_sampled_noise_are_refused(read):
    graphs = 'engine.extra=["--compilation-config", "{\\"cudagraph_mode\\":\\"%s\\"}"]'
    for mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        read(GOOD, graphs % mode)
    others = ('engine.extra=["-cc.cudagraph_mode=full"]', 'engine.extra=["-cc", "{\\"cudagraph_mode\\": 2}"]')
    for words in (graphs % "FULL", *others):
        with pytest.raises(ConfigError, match=r"override engine.extra=.* write FULL_DECODE_ONLY"):
            read(GOOD, words)


def test_a_decoding_that_vllm_refuses_with_speculation_is_refused_first(read):
    override = "eval.decodings.a.min_p=0.1"
    read(GOOD, override)
    with pytest.raises(ConfigError, match=r"eval.decodings.a.min_p = 0.1 .* engine.speculation = 'ngram'"):
        read(GOOD, override, 'engine.speculation="ngram"')


@pytest.mark.parametrize("key", ["kv_cache_dtype", "dtype"])
def test_coarse_numbers_need_an_objective_that_does_not_clip_all_of_them(read, key):
    coarse = (f'engine.{key}="fp8_e4m3"', 'learner.loss.objective="gspo"')
    with pytest.raises(ConfigError, match=rf"engine.{key} = 'fp8_e4m3' .* exceeds 0.0003; use"):
        read(GOOD, *coarse)
    read(GOOD, coarse[0])
    read(GOOD, *coarse, "learner.loss.sequence_clip_low=0.01", "learner.loss.sequence_clip_high=0.01")


@pytest.mark.parametrize(
    ("overrides", "doubt"),
    [
        ([], ""),
        (["learner.optimizer.epochs=2", "learner.optimizer.minibatches=2"], ""),
        (["learner.optimizer.epochs=3", "learner.optimizer.minibatches=3"], ""),
        (
            ["learner.optimizer.epochs=10"],
            r"epochs \* minibatches = 10 optimizer steps .* up to 1 steps older",
        ),
        (
            ["learner.optimizer.epochs=5", "learner.loss.sampler_coefficient=0"],
            r"minibatches = 5 .*sampler_coefficient = 0: .* take at most 4, at half the rate",
        ),
        (["learner.optimizer.epochs=10", "groups.max_staleness=0"], ""),
        (
            ['learner.loss.objective="gspo"'],
            r"'gspo' clips .* exceeds 0.0003: .* set groups.max_staleness = 0",
        ),
        (['learner.loss.objective="gspo"', "groups.max_staleness=0"], ""),
        (
            [
                'learner.loss.objective="gspo"',
                *(f"learner.loss.sequence_clip_{e}=0.02" for e in ("low", "high")),
            ],
            "",
        ),
    ],
)
def test_a_start_warns_of_what_old_samples_seldom_stand(read, overrides, doubt):
    found = [message for message in conflicts.doubts(read(GOOD, *overrides)) if "max_staleness" in message]
    assert len(found) == bool(doubt)
    assert all(re.search(doubt, message) for message in found)


def test_each_fault_is_a_line_that_names_the_file_which_says_it(tmp_path, read):
    base, more = tmp_path / "base.toml", tmp_path / "more.toml"
    base.write_text(GOOD.replace("group_size = 4", "grop_size = 4\nmax_staleness = -1"))
    more.write_text('stepz = 1\n[rollout]\nslots = "many"\n[policy]\ntype = "megatrn"\n')
    with pytest.raises(ConfigError) as raised:
        configuration.read(base, more, overrides=["engine.max_num_seq=3"])
    lines = str(raised.value).splitlines()
    sources = sorted(line.split(": ")[0] for line in lines)
    assert sources == [str(base)] * 2 + [str(more)] * 3 + ["override engine.max_num_seq=3"]
    for word in ("unknown key stepz", "did you mean 'max_num_seqs'", "[policy] has no type 'megatrn'"):
        assert sum(word in line for line in lines) == 1
    assert any("groups.max_staleness: Expected `int` >= 0" in line for line in lines)
    assert any("rollout.slots: Expected `int`, got `str`" in line for line in lines)


def test_a_table_that_is_missing_or_has_no_type_is_named_as_toml_does(tmp_path, read):
    with pytest.raises(ConfigError, match=r"\[policy\] must be a table with a type; known: megatron"):
        read("policy = 1\n" + GOOD.replace('[policy]\ntype = "megatron"', ""))
    with pytest.raises(ConfigError, match=r"\[sandbox\] is missing"):
        read(GOOD.replace('[sandbox]\ntype = "process"', ""))


def test_file_that_is_missing_or_no_toml_is_named(tmp_path):
    (tmp_path / "bad.toml").write_text("model = ")
    for name in ("absent.toml", "bad.toml"):
        with pytest.raises(ConfigError, match=name):
            configuration.read(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_what_an_editor_saves_is_read_or_refused_with_a_remedy(tmp_path, read, encoding):
    path, text = tmp_path / "saved.toml", GOOD.replace('model = "', 'model = "caf\xe9')
    assert "caf" in text
    path.write_text(text.replace("\n", "\r\n"), encoding=encoding)
    if encoding == "utf-8-sig":
        assert configuration.read(path) == read(text)
        return
    with pytest.raises(ConfigError, match=f"^{path}: .*; save it as UTF-8$"):
        configuration.read(path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"steps = {2**63}", "steps: the number does not fit in 64 bits"),
        ("[supervision]\nstuck_s = inf", "supervision.stuck_s: inf is not a finite number"),
        ("[agent]\ntools = [{type = 'x', timeout_s = -1e400}]", "agent.tools: -inf is not a finite number"),
        ("steps = " + "9" * 5000, "Exceeds the limit"),
        ("steps = " + "[" * 5000, "maximum recursion depth"),
        ("# as long as a table of rows\n" * 10_000, "longer than 131,072 characters"),
    ],
)
def test_what_is_no_configuration_is_one_line(tmp_path, text, fault):
    (tmp_path / "odd.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/odd.toml: {fault}"):
        configuration.read(tmp_path / "odd.toml")


def test_a_file_that_is_missing_in_the_working_folder_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"there is no such file in {tmp_path}; call the command"):
        configuration.read(Path("configs/mine.toml"))
    with pytest.raises(ConfigError, match=r"no such file; did you mean configs/recipes/8xh100.toml\?$"):
        configuration.read(Path("recipes/8xH100.toml"))


def test_later_files_win_tables_merge_and_another_plugin_type_is_fresh(tmp_path, read):
    base, more = tmp_path / "base.toml", tmp_path / "more.toml"
    base.write_text(GOOD + "scale = 1\n".replace("scale = 1\n", "") + "[rollout]\nslots = 3\n")
    more.write_text('[rollout]\ncontext = 64\n[advantage]\ntype = "rloo"\n')
    run = configuration.read(base, more, overrides=["advantage.type='rloo'"])
    assert (run.rollout.slots, run.rollout.context) == (3, 64)
    assert type(run.advantage).__name__ == "Rloo"


def test_dumped_tree_builds_the_same_configuration(read):
    run = read(GOOD, "learner.loss.clip_low=0.1", "seed=7")
    tree = json.loads(json.dumps(configuration.dump(run)))
    assert configuration.build(tree, "run.json") == run


def test_keys_that_only_operate_a_run_may_change_and_no_other(read):
    old, new = read(GOOD), read(GOOD, *OPERATE, "groups.group_size=6", "rollout.context=128")
    found = configuration.changes(old, new, Path())
    assert [key for key in found if not configuration.may_change(key)] == [
        "groups.group_size",
        "rollout.context",
    ]
    assert {word.partition("=")[0] for word in OPERATE} <= found.keys()


def test_another_spelling_of_a_path_is_no_change_and_jobs_keep_theirs(read, tmp_path, monkeypatch):
    for name in ("models/one", "models/two", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("models/one")
    old, folder = read(GOOD, "model=models/one"), tmp_path
    monkeypatch.chdir(tmp_path / "elsewhere")
    for spelled in ("../models/one", "../link", str(tmp_path / "models/one"), "../models/../models/one/"):
        new = read(GOOD, f"model={spelled}")
        assert configuration.changes(old, new, folder) == {}
        assert configuration.keep_paths(old, new, folder).model == "models/one"
    assert "model" in configuration.changes(old, read(GOOD, "model=../models/two"), folder)


@pytest.mark.parametrize(
    ("words", "least_s"),
    [
        ([], 7200 + 3600),
        (["rollout.episode_timeout_s=5400.0"], 10800 + 3600),
        (["rollout.episode_timeout_s=5400.0", "supervision.stuck_s=0"], 3600),
        (["supervision.stuck_s=9000"], 9000 + WAIT_S),
        (["rollout.episode_timeout_s=5400.0", 'mode="sft"', 'learner.loss.objective="sft"'], 7200 + 3600),
    ],
)
def test_a_learner_outwaits_the_coordinator_which_restarts_what_is_stuck(read, words, least_s):
    assert read(GOOD, *words).batch_wait_s > least_s


def test_a_run_whose_rate_decays_keeps_its_steps(read):
    old, decays = (read(GOOD, *words) for words in ([], ["learner.optimizer.decay_share=0.3"]))
    assert configuration.forbidden_changes(old, read(GOOD, "steps=200")) == []
    new = read(GOOD, "learner.optimizer.decay_share=0.3", "steps=200")
    assert configuration.forbidden_changes(decays, new) == ["steps: 100 -> 200"]
    by_hand = configuration.changed_by_hand(*map(configuration.dump, (decays, new)))
    assert by_hand == ["steps: 100 -> 200"]
    assert new.optimizer.steps == 200


def test_plugin_of_your_own(read, tmp_path, monkeypatch):
    (tmp_path / "my_lab.py").write_text(
        "from hpc_swe.base.loader import Plugin\n"
        "from hpc_swe.models.advantages.base import Advantage\n"
        "class Best(Plugin, Advantage, frozen=True, kw_only=True):\n"
        "    bonus: float = 0.0\n"
        "    def __call__(self, rewards):\n"
        "        return [r - max(rewards) + self.bonus for r in rewards]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = read(GOOD.replace('"grpo"', '"my_lab:Best"'), "advantage.bonus=0.5")
    assert run.advantage([1.0, 0.0]) == [0.5, -0.5]
    assert configuration.dump(run)["advantage"] == {"type": "my_lab:Best", "bonus": 0.5}


@pytest.mark.parametrize(
    ("bases", "says"),
    [
        ("Plugin", r"it must inherit .* Advantage of hpc_swe\.models\.advantages\.base: class Best\(P"),
        ("Plugin, Advantage", "it lacks what Advantage of hpc_swe.models.advantages.base demands: __call__"),
    ],
)
def test_a_plugin_that_is_not_of_its_family_is_told_what_to_inherit(read, tmp_path, monkeypatch, bases, says):
    (tmp_path / "their_lab.py").write_text(
        "from hpc_swe.base.loader import Plugin\n"
        "from hpc_swe.models.advantages.base import Advantage\n"
        f"class Best({bases}, frozen=True, kw_only=True):\n"
        "    def advantages(self, rewards):\n        return rewards\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_lab", raising=False)
    with pytest.raises(ConfigError, match=rf"\[advantage\] type = 'their_lab:Best': {says}"):
        read(GOOD.replace('"grpo"', '"their_lab:Best"'))


def test_a_plugin_of_your_own_whose_imports_fail_is_one_clear_error(read, tmp_path, monkeypatch):
    (tmp_path / "old_lab.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'surely_not_installed'"):
        read(GOOD.replace('"grpo"', '"old_lab:Best"'))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("https://host/v1", "https://host"),
        ("https://host:8443/v1/", "https://host:8443"),
        ("https://gateway/models/ours/v1", "https://gateway/models/ours"),
    ],
)
def test_the_address_of_an_engine_is_read_as_openai_clients_write_it(read, given, kept):
    assert read(GOOD, f'inference.url="{given}"').inference.url == kept


@pytest.mark.parametrize(
    "wrong", ["host:8000", "ftp://host", "http://me:secret@host", "http://host/?key=1", "https://"]
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused(read, wrong):
    with pytest.raises(ConfigError, match="inference.url"):
        read(GOOD, f'inference.url="{wrong}"')


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_answered_by_what_holds_instead(read, key):
    with pytest.raises(ConfigError) as raised:
        read(GOOD, f"{key}=1")
    says = f"override {key}=1: {key} was removed in 0.2: {REMOVED[key]}; leave the key out"
    assert str(raised.value).splitlines()[0] == says
    assert "unknown key" not in str(raised.value), "no table is left of removed keys alone"


def test_a_class_of_ones_own_may_have_a_key_that_others_have_lost(read):
    own = "agent={type='tests.config.test_config:OwnAgent', port=7}"
    assert read(GOOD, own).agent.port == 7

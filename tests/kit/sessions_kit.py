"""What a policy says in a session that solves the toy instance, and one step of training on such sessions.

All is real but the engine, which plays written replies: the agents, their sandboxes, the recorder, the
grader, the coordinator and the learner.
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpc_swe.agents.chat import TokenBuilder
from hpc_swe.config import config as configuration
from hpc_swe.config.settings import RunConfig
from hpc_swe.demo.model import TEMPLATE, make_tokenizer, save_model, save_tokenizer
from hpc_swe.models.engines.scripted import ScriptedReply
from tests.kit.checkout import ROOT, environment
from tests.kit.toy import RECIPES

CONTEXT = 32768
VOCABULARY = 4096
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # as GPT-2 has them
KITS = ROOT / ".cache" / "agents"
ENVIRONMENT = environment(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
"""Of a run's processes."""


@dataclass(frozen=True)
class World:
    folder: Path
    rows: Path
    images: Path
    model: Path


def make_long_model(folder: Path) -> Path:
    """Make a tiny random Qwen3 for whole sessions, and a tokenizer of this repository.

    Its weights are larger than the demo's, so that an early token of a long prompt changes every later
    probability.
    """
    pages = [
        path
        for where in ("docs/*.md", "hpc_swe/view/*.py", "hpc_swe/launch/*.py")
        for path in sorted(ROOT.glob(where))
    ]
    texts = [path.read_text() for path in pages]
    folder.mkdir(parents=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = make_tokenizer(texts, VOCABULARY, WORDS)
    save_tokenizer(tokenizer, folder)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": CONTEXT}
    save_model(tokenizer, folder, 0, initializer_range=0.2, **sizes)
    return folder


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def solving(agent: str, path: str, old: str, new: str) -> list[str]:
    """One reply a turn; `path` is relative to the repository."""
    if agent == "mini_swe_agent":
        program = (
            f"p = {path!r}\ntext = open(p).read()\nopen(p, 'w').write(text.replace({old!r}, {new!r}, 1))"
        )
        return [
            "THOUGHT: I look first.\n" + call("bash", command=f"cat {path} | head -n 50"),
            "I forgot to call the tool.",
            call(
                "bash", command=f"cat > /tmp/mend.py <<'END'\n{program}\nEND\npython3 /tmp/mend.py; git diff"
            ),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ]
    return [
        "I look first.\n" + call("read_file", file_path=f"/testbed/{path}"),
        call("edit", file_path=f"/testbed/{path}", old_string=old, new_string=new),
        call("run_shell_command", command="git status --short", is_background=False),
        "It is mended.",
    ]


def giving_up(agent: str) -> list[str]:
    return solving(agent, "", "", "")[-1:]


def script(builder: TokenBuilder, *sessions: list[str]) -> list[ScriptedReply]:
    """Replies in tokens that no tokenizer would choose; a random policy thinks all tokens equally likely."""
    dice, replies = random.Random(0), []
    for text in [text for session in sessions for text in session]:
        ids: list[int] = []
        rest = text
        while rest:
            cut = dice.randint(1, 6)
            ids, rest = [*ids, *builder.tokens.encode(rest[:cut])], rest[cut:]
        ids.append(builder.end_id)
        replies.append(ScriptedReply(token_ids=ids, logprobs=[-math.log(VOCABULARY)] * len(ids)))
    return replies


def overlay(world: World, replies: list[ScriptedReply], path: Path) -> Path:
    """What makes configs/swebench.toml a run of one step on this machine."""
    said = path.with_suffix(".json")
    said.write_bytes(msgspec.json.encode(replies))
    values = {
        "model": world.model,
        "rows": world.rows,
        "images": world.images,
        "context": CONTEXT,
        "recipes": "".join(
            f'[taskset.recipes."{name}"]\n'
            + "".join(f"{key} = {json.dumps(v)}\n" for key, v in recipe.items())
            for name, recipe in RECIPES.items()
        ),
    }
    path.write_text(OVERLAY.format(**values))
    return path


def configured(agent: str, *files: Path, engine: str = "tests.kit.by_heart:ByHeart") -> RunConfig:
    own = [ROOT / "configs" / "swebench.toml", ROOT / "configs" / "agents" / f"{agent}.toml"]
    mounts = f'sandbox.mounts=["{KITS / agent.replace("_", "-")}:/opt/agent"]'
    said = files[-1].with_suffix(".json")
    played = [] if engine == "vllm" else [f'engine = {{type = "{engine}", replies = "{said}"}}']
    return configuration.read(*own, *files, overrides=[mounts, *played])


OVERLAY = """
model = "{model}"
steps = 1
max_restarts = 0
poll_s = 0.2
counts = {{ inference = 1, rollout = 1, reward = 1 }}
tasks = {{ train = 1, eval = 0 }}
executor = {{ type = "local" }}
lease = {{ ttl_s = 20.0 }}
eval = {{ every = 0 }}
groups = {{ group_size = 2, groups_per_step = 1 }}
batches = {{ microbatch_tokens = {context} }}
rollout = {{ slots = 1, context = {context}, tool_parser = "hermes" }}
reward = {{ slots = 1 }}
learner = {{ optimizer = {{ lr = 1e-3 }} }}
sampling = {{ max_tokens = 2000 }}
sandbox = {{ images = "{images}" }}

[policy]
device = "cpu"
tensor_parallel = 1
recompute = "none"
dtype = "float32"

[engine]
tensor_parallel = 1
device = "cpu"

[taskset]
train = {{ rows = "{rows}", ids = "" }}
eval = {{ rows = "", ids = "" }}
timeout_s = 120.0

{recipes}
"""

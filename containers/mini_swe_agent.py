"""python3 -I mini.py PROMPT_FILE: mini-swe-agent in a sandbox, for the agent of type cli_agent.

Its agent, environment, templates and tool are its own; only the model is ours, since litellm is larger than
all the rest together. A call that cannot be read stays in the history with the answer that says so: histories
then only grow, and an episode is one conversation.
"""

import contextlib
import json
import os
import shlex
import sys
import types
import urllib.request
from pathlib import Path

KIT = Path(__file__).parent
sys.path.insert(0, str(KIT / "lib"))
os.environ["MSWEA_SILENT_STARTUP"] = "1"

import yaml  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.config import builtin_config_dir  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.exceptions import FormatError  # noqa: E402
from minisweagent.models.utils.actions_toolcall import (  # noqa: E402
    BASH_TOOL,
    format_toolcall_observation_messages,
    parse_toolcall_actions,
)

HOUR_S = 3600.0


class Policy:
    """The model: one request a step, nothing is tried again."""

    def __init__(self, observation_template: str, format_error_template: str) -> None:
        self._observation, self._format_error = observation_template, format_error_template

    def query(self, messages: list[dict], **_: object) -> dict:
        sent = [{key: value for key, value in message.items() if key != "extra"} for message in messages]
        choice = ask({"model": os.environ["OPENAI_MODEL"], "messages": sent, "tools": [BASH_TOOL]})[
            "choices"
        ][0]
        said = choice["message"] | {"extra": {}}
        calls = [json.loads(json.dumps(call), object_hook=_named) for call in said.get("tool_calls") or []]
        try:
            actions = parse_toolcall_actions(
                calls,
                format_error_template=self._format_error,
                template_kwargs={"finish_reason": choice["finish_reason"]},
            )
        except FormatError as error:
            answers = [
                {"role": "tool", "tool_call_id": call.id, "content": error.messages[0]["content"]}
                for call in calls
            ]
            raise FormatError(said, *(answers or error.messages)) from None
        return said | {"extra": {"actions": actions}}

    def format_message(self, **fields: object) -> dict:
        return fields

    def format_observation_messages(
        self, message: dict, outputs: list[dict], template_vars: dict
    ) -> list[dict]:
        return format_toolcall_observation_messages(
            actions=message["extra"]["actions"],
            outputs=outputs,
            observation_template=self._observation,
            template_vars=template_vars,
        )

    def get_template_vars(self, **_: object) -> dict:
        return {}

    def serialize(self) -> dict:
        return {}


class Bash(LocalEnvironment):
    """What the templates promise; Python's own shell is sh."""

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict:
        command = shlex.join(["bash", "-c", str(action["command"])])
        return super().execute(action | {"command": command}, cwd, timeout=timeout)


def ask(body: dict) -> dict:
    """The server's answer; an HTTP error ends the program."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=24 * HOUR_S) as answer:
        return json.load(answer)


def _named(fields: dict) -> types.SimpleNamespace:
    return types.SimpleNamespace(**fields)


def main() -> None:
    """Work in the current directory."""
    config = yaml.safe_load((builtin_config_dir / "benchmarks" / "swebench.yaml").read_text())
    environ = {name: value for name, value in config["environment"]["env"].items() if name != "BASH_ENV"}
    model = Policy(config["model"]["observation_template"], config["model"]["format_error_template"])
    environment = Bash(env=environ, timeout=config["environment"]["timeout"])
    templates = {key: value for key, value in config["agent"].items() if key.endswith("_template")}
    agent = DefaultAgent(model, environment, cost_limit=0.0, step_limit=0, **templates)
    patch, was_there = Path("patch.txt"), Path("patch.txt").exists()
    extra = agent.run(Path(sys.argv[1]).read_text())
    if not was_there:
        with contextlib.suppress(OSError):  # it may be gone, or a folder
            patch.unlink()  # the templates ask for it; what is handed in is the work tree
    print(extra["exit_status"])
    sys.exit(0 if extra["exit_status"] == "Submitted" else 4)


main()

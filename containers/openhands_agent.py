"""python3 -I openhands_agent.py PROMPT_FILE: OpenHands in a sandbox, for the agent of type cli_agent."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "lib"))
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet for prices

from openhands.sdk import LLM, Agent, Conversation, Tool  # noqa: E402
from openhands.tools.file_editor import FileEditorTool  # noqa: E402
from openhands.tools.terminal import TerminalTool  # noqa: E402
from pydantic import SecretStr  # noqa: E402

DAY_S = 86400


def main() -> int:
    """Work on a prompt: a request waits as long as the engines need, and is not repeated."""
    model = LLM(
        model=f"openai/{os.environ['OPENAI_MODEL']}",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
        usage_id="agent",
        num_retries=0,
        timeout=DAY_S,
        native_tool_calling=True,
    )
    agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
    talk = Conversation(agent=agent, workspace=str(Path.cwd()), max_iteration_per_run=10_000)
    talk.send_message(Path(sys.argv[1]).read_text(encoding="utf-8"))
    talk.run()
    return int(talk.state.execution_status.value != "finished")


if __name__ == "__main__":
    sys.exit(main())

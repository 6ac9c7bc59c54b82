"""Write the page of all commands from their --help: python -m tests.docs.reference > docs/commands.md."""

import os
from collections.abc import Iterator

from hpc_swe.__main__ import COMMANDS
from tests.docs.commands import said

VERBS = {"launch": ("start", "tick", "stop", "replay", "export", "serve", "clean", "compare", "keys")}
HEAD = """# Every command

Each command says the same when you ask it, for example:

    python -m hpc_swe.launch start --help

You will see its arguments, its options and examples. `hpc-swe COMMAND` is short for
`python -m hpc_swe.COMMAND`. `python -m tests.docs.reference > docs/commands.md` writes this page; a test
compares its options with those of the commands.
"""


def sections() -> Iterator[tuple[str, str]]:
    """Yield the name of each command, or of a verb of one, with its help without the examples."""
    for name in COMMANDS:
        for verb in VERBS.get(name, ("",)):
            text = said(f"hpc_swe.{name}", *filter(None, [verb]))
            yield f"{name} {verb}".strip(), text.partition("\nexamples:")[0].strip()


def main() -> None:
    os.environ["COLUMNS"] = "100"
    print(HEAD, end="")
    for name, text in sections():
        print(f"\n## {name}\n\n```\n{text}\n```")


if __name__ == "__main__":
    main()

"""A small repository with a commit of each kind that a search for tasks meets."""

from pathlib import Path

from tests.kit.toy import git

CORE = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
TESTS = "from calc.core import double\n\n\ndef test_double():\n    assert double(4) == 8\n"
ADDS = TESTS.replace("import", "import add,") + "\n\ndef test_add():\n    assert add(3, 2) == 5\n"
MESSAGE = """Add numbers instead of subtracting them

add(3, 2) gave 1, which fixes #12 and https://example.invalid/12.
    return a + b

Signed-off-by: Somebody <somebody@example.invalid>
Co-authored-by: Another <another@example.invalid>
"""


def write(folder: Path, files: dict[str, str | bytes | None]) -> None:
    """Write files; None removes one."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink()
        elif isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text(text)


def commit(folder: Path, message: str, files: dict[str, str | bytes | None]) -> str:
    """Commit files; returns the commit's id."""
    write(folder, files)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--cleanup=verbatim", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def make(folder: Path, looks: Path) -> dict[str, str]:
    """Make the history; returns the id of each kind of commit. The flaky test counts its runs in a file."""
    folder.mkdir()
    git(folder, "init", "-q")
    first = {
        "calc/__init__.py": "",
        "calc/core.py": CORE,
        "tests/test_core.py": TESTS,
        "setup.cfg": "[metadata]\n",
    }
    made = {"first": commit(folder, "Begin the project here", first)}
    mended = CORE.replace("a - b", "a + b")
    good = {"calc/core.py": mended, "tests/test_core.py": ADDS, "setup.cfg": "[metadata]\nname = calc\n"}
    made["good"] = commit(folder, MESSAGE, good | {"docs/logo.png": b"\x89PNG\0\0"})
    made["no_tests"] = commit(folder, "Give one its own name", {"calc/one.py": "ONE = 1\n"})
    made["no_code"] = commit(
        folder, "Test that one is one", {"tests/test_one.py": "def test_one():\n    pass\n"}
    )
    odd = f"""from calc.two import two


def test_two():
    with open({str(looks)!r}, "ab+") as file:
        file.write(b"x")
        assert file.tell() % 4 == two() - 1
"""
    made["flaky"] = commit(
        folder,
        "Add a number that is two",
        {"calc/two.py": "def two():\n    return 2\n", "tests/test_two.py": odd},
    )
    needy = "import surely_not_installed\nfrom calc.three import three\n"
    needy += "\n\ndef test_three():\n    assert three() == 3\n"
    made["does_not_run"] = commit(
        folder,
        "Add a number that is three",
        {"calc/three.py": "def three():\n    return 3\n", "tests/test_3.py": needy},
    )
    git(folder, "checkout", "-q", "-b", "side", "HEAD~1")
    made["nothing_fails"] = commit(
        folder,
        "Double by a sum instead of a product",
        {
            "calc/core.py": mended.replace("2 * a", "a + a"),
            "tests/test_core.py": ADDS + "\n\ndef test_more():\n    pass\n",
        },
    )
    git(folder, "checkout", "-q", "main")
    git(folder, "merge", "-q", "--no-ff", "-m", "Merge the other branch here", "side")
    made["merge"] = git(folder, "rev-parse", "HEAD")
    moved = (folder / "calc/core.py").read_text() + "\n\ndef half(a):\n    return a / 2\n"
    tests = "from calc.sums import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
    made["rename"] = commit(
        folder,
        "Move the functions to a module named sums",
        {
            "calc/core.py": None,
            "calc/sums.py": moved,
            "tests/test_core.py": None,
            "tests/test_sums.py": tests,
        },
    )
    made["binary"] = commit(
        folder,
        "Read the number from a file of bytes",
        {
            "calc/bytes.py": "SIZE = 4\n",
            "tests/test_bytes.py": "def test():\n    pass\n",
            "tests/four.bin": b"\0\1\2\3",
        },
    )
    made["says_nothing"] = commit(
        folder, "wip #7", {"calc/one.py": "ONE = 2\n", "tests/test_one.py": "from calc.one import ONE\n"}
    )
    return made

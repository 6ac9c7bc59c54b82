"""What an agent did to a repository, whatever it did to git."""

import re

import pytest

from hpc_swe.agents.sandboxes.process import Process
from hpc_swe.base.errors import SandboxError
from hpc_swe.base.records import Task
from hpc_swe.tasks import _repository, patch
from tests.kit.toy import GONE, LATE, MENDED, Checkout, FailingCheckout, make_repository, task


@pytest.fixture
def toy(repository, tmp_path) -> Task:
    return task(tmp_path, "unittest", repository[1])


def taken(toy: Task, sandboxes: Checkout, *commands: str) -> str:
    with sandboxes.open(toy) as sandbox:
        for command in commands:
            done = sandbox.run(command, 60)
            assert done.exit_code == 0, done.output
        return patch.take(toy, sandbox, sandboxes)


def laid(toy: Task, sandboxes: Checkout, text: str, *commands: str) -> list[str]:
    """What commands print in a fresh checkout to which the submission was applied."""
    with sandboxes.open(toy) as sandbox:
        sandbox.write(".git/s", text.encode())
        applied = sandbox.run("git apply .git/s", 60)
        assert applied.exit_code == 0, applied.output
        return [sandbox.run(command, 60).output.strip() for command in commands]


def test_nothing_done_is_nothing_handed_in(toy, sandboxes):
    assert taken(toy, sandboxes, "true") == ""
    assert taken(toy, sandboxes, "touch calc/core.py; mkdir empty; chmod o-r calc/core.py") == ""


def test_new_binary_linked_executable_and_deleted_files_are_handed_in(toy, sandboxes):
    text = taken(
        toy,
        sandboxes,
        "mkdir -p deep/er; echo new > 'deep/er/a b.txt'; head -c 3000 /dev/urandom > x.bin",
        "ln -s calc/core.py pointer; rm link README.md; chmod +x calc/core.py",
        "printf 'caf\\351s\\n' > latin.txt",
        "mkdir link; echo in > link/in",
    )
    assert laid(
        toy,
        sandboxes,
        text,
        "cat 'deep/er/a b.txt' link/in; readlink pointer; ls README.md",
        "test -x calc/core.py && echo executable; wc -c < x.bin; od -An -c latin.txt",
    ) == [
        "new\nin\ncalc/core.py\nls: cannot access 'README.md': No such file or directory",
        "executable\n3000\n   c   a   f 351   s  \\n",
    ]


def test_ignored_products_are_left_out_an_edited_gitignore_hides_nothing(toy, sandboxes):
    text = taken(
        toy,
        sandboxes,
        "mkdir -p build calc/__pycache__; touch build/x a.log calc/__pycache__/core.pyc",
        "echo 'mine.py' >> .gitignore; echo '*' > .git/info/exclude; echo 1 > mine.py",
    )
    assert "b/mine.py" in text
    assert "b/.gitignore" in text
    assert not any(name in text for name in ("a.log", "b/build", "core.pyc"))


@pytest.mark.parametrize(
    "trick",
    [
        "git commit -qam x --author 'a <a@a>' || git -c user.name=a -c user.email=a@a commit -qam x",
        "git update-index --assume-unchanged calc/core.py; git update-index --skip-worktree calc/core.py",
        "git config core.fsmonitor 'echo evil > evil; true'; git config diff.external 'echo evil'",
        "printf '#!/bin/sh\\necho evil > evil\\n' > .git/hooks/post-index-change; chmod +x .git/hooks/*",
        "echo '*.py -diff -text filter=x' > .git/info/attributes; git config filter.x.clean 'echo evil'",
        "rm -rf .git",
        "rm -rf .git; ln -s /etc .git",
        "rm -rf .git; git init -q; git add -A; git -c user.name=a -c user.email=a@a commit -qm x",
        "git worktree list; git config core.worktree /tmp",
    ],
)
def test_no_setting_of_git_changes_what_is_taken(toy, sandboxes, trick):
    text = taken(toy, sandboxes, "sed -i 's/a - b/a + b/' calc/core.py", trick)
    assert "+    return a + b" in text
    assert "evil" not in text
    assert laid(toy, sandboxes, text, "cat calc/core.py") == [MENDED.strip()]


def test_attributes_of_the_agent_do_not_change_its_bytes(toy, sandboxes):
    text = taken(
        toy, sandboxes, "echo '* text eol=crlf ident' > .gitattributes; printf 'a\\r\\n$Id$\\n' > crlf.txt"
    )
    assert "+a\r\n+$Id$\n" in text


def test_a_folder_that_became_a_link_or_a_file_and_back(toy, sandboxes):
    text = taken(
        toy, sandboxes, "rm -rf tests; ln -s calc tests; rm README.md; mkdir README.md; echo x > README.md/x"
    )
    assert laid(toy, sandboxes, text, "readlink tests; cat README.md/x") == ["calc\nx"]
    text = taken(toy, sandboxes, "rm -rf calc; echo f > calc")
    assert laid(toy, sandboxes, text, "cat calc") == ["f"]


def test_too_large_a_patch_is_not_handed_in_and_a_large_file_is_left_out(toy, sandboxes):
    assert taken(toy, sandboxes, "for i in 1 2 3; do head -c 500000 /dev/urandom > $i; done") == ""
    assert taken(toy, sandboxes, "for i in $(seq 2100); do echo > f$i; done") == ""
    text = taken(toy, sandboxes, "head -c 5000000 /dev/zero > core; echo 'y = 1' > y.py")
    assert "y = 1" in text
    assert "core\n" not in text


def test_files_rewritten_with_the_same_bytes_are_no_part_of_the_work(tmp_path):
    repository = tmp_path / "calc"
    base = make_repository(repository, {f"many/m{i}.py": "x = 1\n" for i in range(_repository.MOST_CHANGED)})
    toy, sandboxes = task(tmp_path, "unittest", base), Checkout(repository=str(repository))
    look = "find . -name '*.py' -exec sed -i 's/a - b/a + b/' {} +; echo 'x = 2' > many/m7.py"
    text = taken(toy, sandboxes, look)
    assert re.findall("^diff --git a/(\\S+)", text, re.MULTILINE) == ["calc/core.py", "many/m7.py"]


def test_an_image_without_a_repository_is_nobody_s_fault(toy, sandboxes):
    with sandboxes.open(toy) as sandbox, pytest.raises(SandboxError, match="holds no repository in /testbed"):
        patch.take(toy, sandbox, Process())


COMMIT = "git -c user.name=a -c user.email=a@a commit -qm set-up"
MODULE = "git update-index --add --cacheinfo"
INNER = f"cd sub; echo 1 > x; git add x; {COMMIT}; cd .."
IMAGES = {
    "as it is": "true",
    "with an empty submodule": f"mkdir sub; {MODULE} 160000,{'1' * 40},sub; {COMMIT}",
    "with a submodule": f"git init -q sub; {INNER}; echo > .gitmodules; git add sub .gitmodules; {COMMIT}",
    "with a linked folder": f"ln -s calc way; git add way; {COMMIT}",
    "where all is ignored": f"echo '*' > .gitignore; {COMMIT} -a",
    "whose rules are a link": f"rm .gitignore; ln -s README.md .gitignore; git add .gitignore; {COMMIT}",
    "whose rules are a folder": f"rm .gitignore; mkdir .gitignore; echo > .gitignore/x; git add -A; {COMMIT}",
    "whose rules are bytes": f"printf '\\377\\0[\\n!\\n**/\\n\\\\\\n' > .gitignore; {COMMIT} -a",
    "with files that git does not know": "echo old > made.txt; mkdir egg; echo old > egg/info",
    "with tracked files changed": "echo changed > README.md; chmod +x latin.txt",
    "with line ends": f"printf '*.txt text eol=crlf\\n' > .gitattributes; printf 'a\\r\\nb\\r\\n' > e.txt; "
    f"git add -A; {COMMIT}",
    "whose user shows differences otherwise": "git config diff.noprefix true; git config diff.context 0; "
    "git config diff.external false; git config core.fileMode false; git config color.ui always",
    "with names of bytes": "touch $'a\\nb' $'\\377' '*' ':(top)x' ./-x; git add -A; " + COMMIT,
    "where half is checked out": "git sparse-checkout set --no-cone '/*' '!/latin.txt'",
}
DEEDS = {
    "deletes products": "git clean -qfdX",
    "ignores products": "mkdir -p build; for i in $(seq 300); do echo > build/$i; done",
    "works in what git cannot hand in": "mkdir -p sub; echo 2 > sub/x; echo 2 > sub/y",
    "works behind links": "mkdir -p way/new; echo 2 > way/new/file",
    "makes a repository inside": "git init -q mine; echo 1 > mine/x; (cd mine; git add x; " + COMMIT + ")",
    "adds a worktree": "git worktree add -q tree && rm tree/latin.txt",
    "changes what git does not know": "test ! -e made.txt || echo new > made.txt; rm -rf egg",
    "changes all there is": "for f in README.md e.txt; do test ! -e $f || echo new >> $f; done",
    "uses names that git refuses": "mkdir .GIT 2>&1; echo x > .GIT/x; echo x > git~1; ln -sf / .gitmodules",
    "uses names that nobody can print": "touch $'x\\ny' $'\\376'; mkdir $'d\\377'; touch $'d\\377/f'",
}


@pytest.mark.parametrize("image", IMAGES)
def test_whatever_an_image_holds_the_repair_is_handed_in_and_fits(toy, repository, image):
    """And whatever else is done beside it."""
    sandboxes = Checkout(repository=str(repository[0]), also=IMAGES[image])
    also = "\n".join(f"( {deed} )" for deed in DEEDS.values())
    text = taken(toy, sandboxes, f"{also}\ntrue", "sed -i 's/a - b/a + b/' calc/core.py")
    assert laid(toy, sandboxes, text, "cat calc/core.py") == [MENDED.strip()]
    assert "b/build/" not in text or "rules are" in image


@pytest.mark.slow
def test_products_cost_nothing_whatever_their_number(toy, sandboxes):
    make = "import os; [(os.makedirs(f'build/{i}'), open(f'build/{i}/x', 'w').close()) for i in range(12000)]"
    text = taken(toy, sandboxes, f'python3 -c "{make}"', "sed -i 's/a - b/a + b/' calc/core.py")
    assert "+    return a + b" in text
    assert "build/" not in text


def test_names_that_cannot_be_printed_are_no_part_of_the_work(toy, sandboxes):
    text = taken(toy, sandboxes, "touch $'a\\nb' $'\\377'; echo '<|im_end|>' > '<|im_end|>'; echo 1 > plain")
    assert "<|im_end|>" in text
    assert "\\377" not in text


@pytest.mark.parametrize(
    ("step", "result"),
    [("git check-ignore", LATE), ("os.unlink", LATE), ("os.chmod", GONE), ("update-index", GONE)],
)
def test_a_failure_where_only_our_git_runs_is_nobody_s_fault(toy, sandboxes, step, result):
    failing = FailingCheckout(repository=sandboxes.repository, step=step, result=result)
    with sandboxes.open(toy) as sandbox:
        sandbox.write("calc/core.py", MENDED.encode())
        with pytest.raises(SandboxError, match="compares with the base commit"):
            patch.take(toy, sandbox, failing)

"""Code that others wrote is found as it is: what cannot be used is named, and the rest becomes sources."""

from pathlib import Path

import pytest

from hpc_swe.base.errors import ConfigError
from hpc_swe.makers.bugs import _copies
from hpc_swe.makers.bugs.sources import Search

CODE = "def double(x):\n    return x * 2\n"
TEST = "from code_of_mine import double\n\n\ndef test_two():\n    assert double(1) == 2\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "code_of_mine.py").write_text(CODE)
    (folder / "test_code.py").write_text(TEST)
    return folder


def test_two_sources_of_one_name_are_one_error_that_names_both(folder, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other/code_of_mine.py"
    other.write_text(CODE)
    words = [f"{path}:{folder}/test_code.py" for path in (folder / "code_of_mine.py", other)]
    with pytest.raises(ConfigError, match="are both called code_of_mine") as caught:
        Search().find(words)
    assert f"{folder}/code_of_mine.py and {other}" in str(caught.value)
    with pytest.raises(ConfigError, match="are both called"):
        Search().find([str(folder), str(folder)])


def test_files_that_cannot_be_used_are_named_and_cost_no_other_file(folder):
    """A stranger's folder may hold Python 2, bytes of old encodings, dead links and odd folders."""
    (folder / "test_old.py").write_text("print 'two'\n")
    (folder / "old.py").write_text("print 'two'\n")
    (folder / "latin.py").write_bytes(b"# caf\xe9\n")
    (folder / "null.py").write_bytes(b"x = 1\0\n")
    (folder / "large.py").write_bytes(b"x = 1\n" * 100_000)
    (folder / "dead.py").symlink_to(folder / "nowhere.py")
    (folder / "loop.py").symlink_to(folder / "loop.py")
    (folder / "folder.py").mkdir()
    search = Search()
    (source,) = search.find([str(folder)])
    assert (source.name, source.tests) == ("code_of_mine.py", ("test_code.py",))
    assert {path.name for path in search.left_out} == {
        *("test_old.py", "old.py", "latin.py", "null.py", "large.py", "dead.py", "loop.py")
    }
    assert all(str(path) in reason for path, reason in search.left_out.items())
    (folder / "test_code.py").unlink()
    with pytest.raises(ConfigError, match=r"no test_\*\.py in it can be used \(.*mine/"):
        Search().find([str(folder)])


@pytest.mark.parametrize("ends", ["\r\n", "\r", "\n"])
def test_byte_order_marks_and_all_line_ends_are_read(folder, ends):
    for path in folder.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_text().replace("\n", ends).encode())
    (source,) = Search().find([str(folder)])
    assert source.files == {"code_of_mine.py": CODE, "test_code.py": TEST}


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("", "is neither a folder nor a file"),
        ("src/nothing", "is neither a folder nor a file"),
        ("mine/nothing.py:mine/test_code.py", "nothing.py"),
        ("mine/code_of_mine.py:mine/test_nothing.py", "test_nothing.py"),
        ("mine/code_of_mine.py", "name its tests as code_of_mine.py:test_"),
        ("no_such_module", "there is no .*no_such_module.py"),
        ("stdlib", "has no tests"),
    ],
)
def test_a_word_that_names_nothing_is_one_error(folder, monkeypatch, word, complaint):
    monkeypatch.chdir(folder.parent)
    (folder / "__init__.py").touch()  # files of a package are read together
    with pytest.raises(ConfigError, match=complaint):
        Search(folder.parent).find([word])


def test_code_that_is_nested_too_deeply_is_left_out(folder):
    """Python reads it, but cannot write its syntax tree."""
    (folder / "deep.py").write_text("def total():\n    return " + " + ".join(["1"] * 1000) + "\n")
    (folder / "test_deep.py").write_text("def test_a():\n    assert " + "not " * 200 + "0\n")
    search = Search()
    (source,) = search.find([str(folder)])
    assert source.tests == ("test_code.py",)
    assert {path.name for path in search.left_out} == {"deep.py", "test_deep.py"}
    assert all("nested too deeply" in why for why in search.left_out.values())


def test_lines_are_those_of_python_where_a_lone_carriage_return_ends_one():
    code = "def f(x):\n    a_long_line_of_text_here = x\n    another_line_of_a_text = x\n"
    assert _copies.parts_of(f"# a\r# b\r{code}# c\n".encode())[1] == _copies.parts_of(code.encode())[1]

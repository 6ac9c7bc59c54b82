"""The walls, the bars, and the promises that documents make about the code."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from hpc_swe.base import loader
from hpc_swe.base.records import WeightVersion
from hpc_swe.base.rundir import SPOOLS, RunDir
from hpc_swe.config import conflicts
from hpc_swe.config.config import read
from hpc_swe.models.engines.base import FALLBACK

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("hpc_swe", "jobs")
TESTS = ("tests",)
FILE_LINES = 400
LONGER: dict[str, int] = {}
FUNCTION_LINES, USUAL_FUNCTION_LINES = 60, 28
TEST_NAME = 70
TEST_LINES = 54_028  # of all tests and what they share; it may only fall, towards 42,000
# Lines of each package: what it has, rounded up. Who adds much notices, and says why.
BUDGETS = {
    "hpc_swe": 85,
    "hpc_swe/agents": 114,  # shows failures with less parsing
    "hpc_swe/agents/chat": 1_303,  # four forms of tool calls
    "hpc_swe/agents/loops": 806,  # answers of models that call no tools
    "hpc_swe/agents/sandboxes": 2_918,  # says how busy a command was; runs a prelude once for all programs
    "hpc_swe/agents/tools": 1_795,
    "hpc_swe/base": 1_606,  # finds what a wheel brings; says which class to inherit; the interval of a share
    "hpc_swe/base/records": 657,
    "hpc_swe/base/store": 1_962,  # lets a group read a part of a run
    "hpc_swe/cluster": 685,
    "hpc_swe/cluster/executors": 936,  # jobs run from a file of their node
    "hpc_swe/config": 1_327,  # harbor and its grader; says what has become of removed keys
    "hpc_swe/demo": 933,  # builds its image; what a published model learns, with controls, in one command
    "hpc_swe/launch": 2_967,  # says at once why jobs fail or wait; gives weights away, and deletes the rest
    "hpc_swe/launch/doctor": 1_437,  # judges sizes of jobs, the C library and kernels
    "hpc_swe/makers": 2_245,  # statements with the function at fault, rows by pass rate, the share sealed
    "hpc_swe/makers/bugs": 1_406,  # mutants are tried by processes, which may be killed
    "hpc_swe/makers/images": 1_253,  # pulls wait together; the base is checked out in an older image
    "hpc_swe/models": 1_342,  # refuses what cannot be unpacked, by file and key
    "hpc_swe/models/advantages": 141,
    "hpc_swe/models/deltas": 946,
    "hpc_swe/models/engines": 3_305,  # keeps what is quantized anew for each version
    "hpc_swe/models/policies": 7_214,  # values of a checkpoint go straight into their files
    "hpc_swe/roles": 291,
    "hpc_swe/roles/coordinator": 3_302,  # penalties; ends a run of refused weights; batches of archives
    "hpc_swe/roles/inference": 744,  # tries refused weights again, and counts
    "hpc_swe/roles/learner": 1_320,  # deals batches that were cut for other ranks
    "hpc_swe/roles/reward": 440,
    "hpc_swe/roles/rollout": 1_959,  # four APIs of agent programs
    "hpc_swe/tasks": 2_114,  # reads sets of repositories in their own columns
    "hpc_swe/tasks/graders": 5_841,  # says whose file does what, of inherited tests, too; learns once
    "hpc_swe/tasks/sets": 2_068,  # reads published sets in their columns; refuses what Docker reads otherwise
    "hpc_swe/view": 719,
    "hpc_swe/view/benchmarks": 850,
    "hpc_swe/view/evaluation": 528,
    "hpc_swe/view/report": 841,
    "jobs": 1_154,
}
HEAVY = {"torch", "vllm", "megatron", "transformers", "submitit", "tensorboard", "datasets"}
HOSTS = (
    "pypi.org",
    "pythonhosted.org",
    "docker.io",
    "docker.com",
    "ghcr.io",
    "quay.io",
    "huggingface.co",
    "hf.co",
)
HOSTS += ("download.pytorch.org", "debian.org", "ubuntu.com", "anaconda.org", "modelscope.cn", "nvcr.io")
# What follows is wrong today: each list may only shrink.
CIRCLES: set[str] = set()
DOUBLED = {"Recorder", "Swebench"}
EXAMPLES = {  # an argument of each name that RunDir's methods take, as docs/protocol.md writes it
    "owner": "<owner>",
    "label": "<label>",
    "role": "<role>",
    "step": 12,
    "rank": 0,
    "incarnation": 1,
    "number": 7,
    "mark": "<mark>",
    "index": 3,
    "version": WeightVersion(step=12, incarnation=1),
    "name": "requests",
}


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository, without what lies about beside them."""
    if (REPOSITORY / ".git").exists():
        command = ["git", "ls-files", "-z", "--", *patterns]
        names = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
        found = [REPOSITORY / name for name in names.split("\0") if name]
    else:
        found = [path for pattern in patterns for path in REPOSITORY.glob(pattern)]
    return [path for path in found if path.is_file()]


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@cache
def modules(folders: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    paths = tracked(*(f"{folder}/{each}" for folder in folders for each in ("*.py", "**/*.py")))
    return {name(path): path.read_text(encoding="utf-8") for path in dict.fromkeys(paths)}


@cache
def nodes(folders: tuple[str, ...] = PACKAGES) -> dict[str, list[ast.AST]]:
    return {path: list(ast.walk(ast.parse(text))) for path, text in modules(folders).items()}


@pytest.fixture(scope="module", autouse=True)
def _free_the_nodes():
    """They take 200 MB."""
    yield
    nodes.cache_clear()


def function_lengths() -> dict[str, int]:
    return {
        f"{path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, found in nodes().items()
        for node in found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_imports_point_down_and_every_wall_stands():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_at_most_nine_floors_below_jobs():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    floors = next(each["layers"] for each in contracts if each["name"] == "Imports point down")
    assert len(floors) <= 9


def test_nobody_has_to_read_more_than_a_screen_of_names():
    """The package has at most 13 entries, and each folder in it at most 15."""
    entries = [path.relative_to(REPOSITORY).parts for path in tracked("hpc_swe/*", "hpc_swe/**/*")]
    package = {parts[1] for parts in entries}
    children = {parts[:depth] for parts in entries for depth in range(3, len(parts) + 1)}
    folders = Counter("/".join(parts[:-1]) for parts in children)
    assert len(package) <= 13
    assert {folder: entries for folder, entries in folders.items() if entries > 15} == {}
    assert {name for name in package if name.endswith(".py")} == {"__init__.py", "__main__.py"}


def imports() -> dict[str, set[str]]:
    """Module -> what it imports of ours, functions' own imports too, as module or as module.name."""
    return {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): {
            f"{node.module}.{alias.name}"
            for node in found
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES
            for alias in node.names
        }
        for path, found in nodes().items()
    }


def modules_imported() -> dict[str, set[str]]:
    """The same, modules only."""
    found = imports()
    return {
        module: {name if name in found else name.rpartition(".")[0] for name in names}
        for module, names in found.items()
    }


def short(module: str) -> str:
    return module.removeprefix("hpc_swe.")


def is_foreign(importer: str, name: str) -> bool:
    """Whether something private is taken from a package that the importer is not in."""
    parts = name.split(".")
    private = [n for n, part in enumerate(parts) if part.startswith("_") and not part.endswith("__")]
    return any(not f"{importer}.".startswith(".".join(parts[:n]) + ".") for n in private)


def test_no_imports_go_in_circles():
    """What is left when all modules are taken away that import nothing, or that nothing imports."""
    left = modules_imported()
    while True:
        used = set(chain.from_iterable(left.values()))
        kept = {module: names & left.keys() for module, names in left.items() if names and module in used}
        kept = {module: names & kept.keys() for module, names in kept.items()}
        if kept == left:
            break
        left = kept
    assert set(map(short, left)) == CIRCLES


def test_what_is_private_is_imported_in_its_package_alone():
    """A module may use the private names of its own package, and those of packages around it."""
    every = imports()
    found = {
        f"{short(module)} -> {short(name if name in every else name.rpartition('.')[0])}"
        for module, names in every.items()
        for name in names
        if is_foreign(module, name)
    }
    assert found == set()


def test_no_plugin_is_named_outside_its_family():
    found = {
        f"{short(module)} -> {short(name)}"
        for module, names in modules_imported().items()
        for name in names
        for package, _, kind in [name.rpartition(".")]
        if package in loader.PACKAGES.values() and kind != "base" and not kind.startswith("_")
        if not module.startswith(package)
    }
    assert found == set()


def test_one_name_is_one_class():
    names = [
        node.name
        for found in nodes().values()
        for node in found[0].body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == DOUBLED


def test_no_module_has_a_name_of_the_standard_library():
    """A plugin's file is named by its type, and may."""
    families = [package.replace(".", "/") for package in loader.PACKAGES.values()]
    found = {path for path in modules() if Path(path).stem in sys.stdlib_module_names}
    assert {path for path in found if path.rpartition("/")[0] not in families} == set()


def test_no_file_is_longer_than_one_reads_at_once():
    lengths = {path: len(text.splitlines()) for path, text in modules().items()}
    assert {path: n for path, n in lengths.items() if n > LONGER.get(path, FILE_LINES)} == {}


def test_no_function_is_longer_than_a_page_and_most_are_short():
    lengths = function_lengths()
    ordered = sorted(lengths.values())
    assert {where: n for where, n in lengths.items() if n > FUNCTION_LINES} == {}
    assert ordered[len(ordered) * 9 // 10] <= USUAL_FUNCTION_LINES


def room(path: str) -> str:
    """The folder that has a budget: a room, or a folder in one."""
    return "/".join(path.split("/")[:-1][:3])


def test_no_room_outgrows_its_budget():
    """Whoever needs more lines cuts some elsewhere in the room, or raises its budget and says why."""
    lengths: Counter[str] = Counter()
    for path, text in modules().items():
        lengths[room(path)] += len(text.splitlines())
    assert {where: lines for where, lines in lengths.items() if lines > BUDGETS.get(where, 0)} == {}


def test_no_test_is_added_without_another_one_that_goes():
    """A new test replaces those that it makes superfluous, or their lines are saved elsewhere."""
    assert sum(len(text.splitlines()) for text in modules(TESTS).values()) <= TEST_LINES


def test_attributes_are_seldom_asked_for_by_name():
    """Code that runs inside sandboxes is left out: it meets any release of unittest and pytest."""
    texts = [text for path, text in modules().items() if "tasks/graders/_" not in path]
    lines = sum(len(text.splitlines()) for text in texts)
    found = [ask for text in texts for ask in re.findall(r"\b(?:getattr|hasattr)\(", text)]
    assert len(found) <= lines / 1000


def test_a_login_node_starts_a_run_without_anything_heavy():
    imports = "import sys, hpc_swe.launch.__main__, hpc_swe.view.status, hpc_swe.view.show"
    code = f"{imports}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    assert HEAVY & set(loaded.stdout.split()) == set()


def test_tests_use_no_mocks():
    pattern = re.compile(r"unittest\.mock|MagicMock|\bmocker\b|monkeypatch\.(setattr|setitem)|@patch")
    tests = {path: text for path, text in modules(TESTS).items() if path != name(Path(__file__))}
    found = {path: pattern.findall(text) for path, text in tests.items()}
    assert {path: hits for path, hits in found.items() if hits} == {}


def test_no_signal_handler_sets_an_event_whose_lock_its_thread_may_hold():
    """`hpc_swe.cluster.processes.Flag` has none."""
    handled = {path for path, text in modules().items() if "signal.signal(" in text}
    assert [path for path in sorted(handled) if "threading.Event" in modules()[path]] == []


def imported(found: list[ast.AST]) -> set[str]:
    """Modules that a file imports by name."""
    names = {n.module or "" for n in found if isinstance(n, ast.ImportFrom)}
    return names | {a.name for n in found if isinstance(n, ast.Import) for a in n.names}


def named(found: list[ast.AST]) -> set[str]:
    """What a file takes of modules, as module.name, whether it imports the name or the module."""
    taken = {f"{n.module}.{a.name}" for n in found if isinstance(n, ast.ImportFrom) for a in n.names}
    return taken | {ast.unparse(n) for n in found if isinstance(n, ast.Attribute)}


def test_nothing_calls_run_and_its_like_of_subprocess():
    """`run`, `check_output` and their like of subprocess kill a late command, and then wait for ever."""
    endless = {"os.system", "os.popen"} | {
        f"subprocess.{each}"
        for each in ("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput")
    }
    found = {path: sorted(named(of_file) & endless) for path, of_file in nodes().items()}
    assert {path: names for path, names in found.items() if names} == {}, "use processes.completed"


def test_the_words_of_a_slow_load_stand_in_one_room_and_in_messages():
    """People look for them in an engine's log, and so does the benchmark of weights."""
    rooms = [path for path, text in modules().items() if FALLBACK in text]
    assert rooms == ["hpc_swe/models/engines/base.py"]
    assert f"`{FALLBACK}` in an engine's log" in (REPOSITORY / "docs/messages.md").read_text("utf-8")


def endless_waits(found: list[ast.AST]) -> list[str]:
    """Popen as a context, which waits for the end of its command, and reads of a command's pipe."""
    contexts = [ast.unparse(n.context_expr) for n in found if isinstance(n, ast.withitem)]
    attributes = [ast.unparse(n) for n in found if isinstance(n, ast.Attribute)]
    waits = [text for text in contexts if re.match(r"[\w.]*Popen\(", text)]
    return waits + [text for text in attributes if re.search(r"\.std(out|err)\.read\w*$", text)]


def test_children_of_jobs_import_nothing_from_the_working_folder():
    """A file there with the name json.py would take the place of Python's."""
    people = {"hpc_swe/demo", "hpc_swe/makers/images", "hpc_swe/view/benchmarks"}  # in no job, or beside pip
    texts = {name(path): path.read_text() for path in tracked("hpc_swe/**/*.py", "jobs/*.py")}
    found = {path for path, text in texts.items() if 'sys.executable, "-m"' in text}
    assert {path for path in found if str(Path(path).parent) not in people} == set()


def test_no_command_is_awaited_by_its_pipe():
    found = {path: endless_waits(of_file) for path, of_file in nodes().items()}
    assert {path: waits for path, waits in found.items() if waits} == {}, "use processes.printed"


def test_tests_import_one_another_as_one_package():
    """No module by its bare name, none from a conftest, and nothing changes where Python looks."""
    files = nodes(TESTS)
    bare = {Path(path).stem for path in files} - {"__init__", "__main__"}
    wrong = {
        path: [m for m in imported(of_file) if m in bare or "conftest" in m]
        for path, of_file in files.items()
    }
    patches = re.compile(r"sys\.path(\[.*\] =| \+?= |\.(append|insert|extend)\()")
    for path in (path for path, text in modules(TESTS).items() if "sys.path" in text):
        statements = (n for n in files[path] if isinstance(n, ast.Expr | ast.Assign | ast.AugAssign))
        wrong[path] += [text for n in statements if patches.match(text := ast.unparse(n))]
    assert {path: found for path, found in wrong.items() if found} == {}
    folders = {(REPOSITORY / path).parent for path in files}
    assert [name(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_folders_of_tests_are_named_as_packages():
    """Or are rooms for what belongs to no package."""
    rooms = {"bench", "cheats", "cluster", "docs", "golden", "gpu", "kernels", "kit", "pipeline"}
    found = {Path(path).relative_to("tests").parent for path in modules(TESTS)}
    mirrors = [folder for folder in found if folder.parts and folder.parts[0] not in rooms]
    homes = [Path(PACKAGES[0]), Path()]
    assert [str(f) for f in mirrors if not any((REPOSITORY / home / f).is_dir() for home in homes)] == []


def test_names_of_tests_fit_a_line():
    names = chain.from_iterable(re.findall(r"^ *def (test_\w+)", t, re.M) for t in modules(TESTS).values())
    assert [each for each in names if len(each) > TEST_NAME] == []


def test_every_plugin_family_says_what_its_plugins_are():
    paths = [f"{package.replace('.', '/')}/base.py" for package in loader.PACKAGES.values()]
    assert len(paths) >= 9
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_every_type_that_a_family_knows_is_a_plugin():
    for family, package in loader.PACKAGES.items():
        for kind in loader.known(family):
            module = importlib.import_module(f"{package}.{kind}")
            assert issubclass(getattr(module, kind.title().replace("_", "")), loader.Plugin), module


def test_code_and_documents_are_ascii():
    suffixes = {".py", ".md", ".toml", ".sh", ".sbatch", ".def", ""}
    paths = [path for path in tracked("*", "**/*") if path.suffix in suffixes]
    assert sorted({name(path) for path in paths if not path.read_bytes().isascii()}) == []


def test_nothing_tracked_names_a_developer_s_machine():
    pattern = re.compile(r"(?<![\w.<}])/(?:root|home|work|Users|scratch|mnt)/[\w.-]+/?")
    assert hits(pattern, {"tests/test_architecture.py"}) == {}


def test_nothing_tracked_names_a_registry():
    """Sites mirror them under other names; ordinary client configuration says where."""
    pattern = re.compile("|".join(rf"\b{re.escape(host)}\b" for host in HOSTS))
    assert hits(pattern, {"tests/test_architecture.py"}) == {}


def hits(pattern: re.Pattern[str], but: set[str]) -> dict[str, list[str]]:
    texts = {name(path): path.read_bytes().decode(errors="replace") for path in tracked("*", "**/*")}
    found = {path: pattern.findall(text) for path, text in texts.items() if path not in but}
    return {path: names for path, names in found.items() if names}


CONFIGS = sorted((REPOSITORY / "configs").rglob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_every_configuration_loads_and_keeps_the_rules_of_new_runs(path):
    """``demo_eval.toml`` is read over ``demo.toml``; ``slurm*.toml`` and folders over any base."""
    folder, parts = REPOSITORY / "configs", path.stem.split("_")
    bases = [folder / f"{'_'.join(parts[:count])}.toml" for count in range(1, len(parts))]
    if path.parent != folder or parts[0] == "slurm":
        bases = [folder / "demo.toml"]
    if "executor.roles" in path.read_text() and path.parent.name == "recipes":
        bases.append(folder / "slurm.toml")
    config = read(*dict.fromkeys([*filter(Path.exists, bases), path]))
    assert list(conflicts.of_new_runs(config)) == []


def paths_of_a_run() -> set[str]:
    """What RunDir's attributes and methods give for the examples, relative to the run."""
    run = RunDir(Path("run"))
    found = {f"batches/step_000012/{name}" for name in (run.rank_file(0), run.validation_file(0))}
    for attribute, member in inspect.getmembers(RunDir):
        if attribute.startswith("_") or attribute in (
            "folders",
            "make",
            "make_folders",
            "rank_file",
            "root",
            "spool",
            "validation_file",
        ):
            continue
        if isinstance(member, Path):
            path = getattr(run, attribute)
        else:
            arguments = list(inspect.signature(member).parameters)[1:]
            path = member(run, *(EXAMPLES[argument] for argument in arguments))
        found.add(str(path.relative_to(run.root)))
    return found | {str(run.spool(spool).relative_to(run.root)) for spool in SPOOLS}


def documented_paths() -> list[str]:
    text = (REPOSITORY / "docs/protocol.md").read_text(encoding="utf-8")
    layout = text.partition("## Layout")[2].partition("\n## ")[0]
    lines = [line for line in layout.splitlines() if line.startswith(" " * 6)]
    return [line.split()[0].rstrip("/") for line in lines]


def test_every_path_of_a_run_is_documented():
    documented = documented_paths()
    parents = {str(parent) for path in documented for parent in Path(path).parents}
    assert sorted(paths_of_a_run() - set(documented) - parents) == []


def test_every_documented_path_is_one_of_a_run_s():
    known = paths_of_a_run()
    known |= {f"{spool}/{state}" for spool in SPOOLS for state in ("ready", "claimed", "dead")}
    assert sorted(set(documented_paths()) - known) == []


def test_every_file_that_documents_and_docstrings_name_is_there():
    texts = [path.read_text(encoding="utf-8") for path in tracked("*.md", "docs/*.md")]
    named = set(
        chain.from_iterable(re.findall(r"\b(?:hpc_swe|jobs|configs|tests)/[\w/]+\.\w+", t) for t in texts)
    )
    assert sorted(path for path in named if not (REPOSITORY / path).exists()) == []


def test_every_script_is_executable():
    scripts = [path for path in tracked("**/*.sh", "*.sh") if path.read_bytes().startswith(b"#!")]
    assert [name(path) for path in scripts if not os.access(path, os.X_OK)] == []


def test_every_python_example_of_the_documents_runs():
    for path in tracked("*.md", "docs/*.md"):
        for example in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            exec(compile(example, name(path), "exec"), {"__name__": "example"})

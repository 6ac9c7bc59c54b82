"""Images of others, as archives: unpacked, staged anew, tried and packed by the command that people run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from hpc_swe.agents.sandboxes.apptainer import Apptainer
from hpc_swe.base.errors import ConfigError, HpcSweError
from hpc_swe.makers.images.sources import Pulled
from hpc_swe.makers.images.store import ImageManifest, ImageStore, Problem
from hpc_swe.tasks.graders.swebench import Swebench
from hpc_swe.tasks.patch import take
from tests.kit import archives
from tests.kit.checkout import ROOT
from tests.kit.images import UNPACKED, require_apptainer
from tests.kit.published_rows import ROWS
from tests.kit.toy import BROKEN, RECIPES, git, gold, patch, row, task, write_rows

ACTIVATE = 'conda() { PATH="/opt/miniconda3/envs/testbed/bin:$PATH"; }\n'
SOLVED = BROKEN + "".join(f"\n\ndef f_{n}(number):\n    return number * {n}00_000\n" for n in range(3))
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def layer(repository, tmp_path_factory):
    """A maker's image: the whole history, a commit upon the base, what a build left, an environment."""
    require_apptainer(UNPACKED)
    folder = tmp_path_factory.mktemp("layer")
    more = folder / "more"
    shutil.copytree(repository[0], more / "testbed", symlinks=True)
    git(more / "testbed", "reset", "-q", "--hard", repository[1])
    (more / "testbed/README.md").write_text("Calc, set up\n")
    git(more / "testbed", "commit", "-qam", "Set up")
    (more / "testbed/build").mkdir()
    (more / "testbed/build/core.so").write_text("built")
    binaries = more / "opt/miniconda3/envs/testbed/bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to("/usr/bin/python3")
    (more / "opt/miniconda3/bin").mkdir()
    (more / "opt/miniconda3/bin/activate").write_text(ACTIVATE)
    yield archives.layer(UNPACKED, more, folder / "layer.tar")
    shutil.rmtree(folder)


def command(folder: Path, source: str, *rows: dict[str, object]) -> list[str]:
    write_rows(folder / "rows.jsonl", *rows)
    (folder / "recipes.toml").write_text(
        "\n".join(
            f'[taskset.recipes."{name}"]\n'
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in one.items())
            for name, one in RECIPES.items()
        )
    )
    words = ["configs/swebench.toml", str(folder / "recipes.toml")]
    words += [f"taskset.train.rows={folder}/rows.jsonl", 'taskset.train.ids=""', 'taskset.eval.rows=""']
    words += [
        'taskset.eval.ids=""',
        f"sandbox.images={os.path.relpath(folder, ROOT)}/images",
        "--from",
        source,
    ]
    return [sys.executable, "-m", "hpc_swe.build_images", *words]


def run(words: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)


@slow
def test_a_killed_build_of_archives_goes_on_and_one_that_fails_fails_alone(layer, repository, tmp_path):
    base = repository[1]
    archives.docker_archive(layer, tmp_path / "sweb.eval.x86_64.toy_1776_unittest-1.tar")
    words = command(
        tmp_path, f"docker-archive:{tmp_path}/{{image}}.tar", row("unittest", base), row("pytest", base)
    )
    images = tmp_path / "images"
    killed = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(images.glob(".work.*/*")):
        assert time.monotonic() < deadline, "nothing was begun"
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = run(words)
    assert done.returncode == 1
    told = "toy_1776_pytest-1.tar: No such file or directory"
    assert told in done.stdout.replace("\n", "")
    assert "toy__pytest-1" in done.stdout
    assert "1 of 2 images are in" in done.stdout
    (image,) = (path.stem for path in images.glob("*.json"))
    assert {path.name for path in images.iterdir()} == {".builder", f"{image}.json", f"{image}.sif"}
    built = (images / f"{image}.sif").stat().st_mtime_ns
    assert "1 of 2 images are in" in run(words).stdout
    assert (images / f"{image}.sif").stat().st_mtime_ns == built, "what is there is not built again"
    examine(tmp_path, images, base)


def examine(folder: Path, images: Path, base: str) -> None:
    """What an agent finds, and what becomes of its work."""
    toy = task(folder, "unittest", base)
    sandboxes = Apptainer(images=str(images))
    with sandboxes.open(toy) as sandbox:
        look = "git log --all --format=%s; git tag; git remote; git reflog; git status --short"
        shown = sandbox.run(f"{look}; cat build/core.so", 60).output
        assert shown == "What the image's maker changed\nbase\nbuilt"
        assert sandbox.run("echo $MADE_BY", 60).output == "somebody\n", "the image's environment"
        sandbox.run("sed -i 's/a - b/a + b/' calc/core.py; echo more >> README.md", 60)
        handed_in = take(toy, sandbox, sandboxes)
    assert "-Calc, set up" not in handed_in, "the maker's change is not the agent's"
    for text, outcome in ((gold(), "resolved"), (handed_in, "resolved"), ("", "unresolved")):
        score = Swebench().examine(toy, text, sandboxes)
        assert score.outcome == outcome, score


@slow
@pytest.mark.parametrize("form", ["oci", "oci-archive", "docker"])
def test_an_oci_image_becomes_one(layer, repository, tmp_path, form, monkeypatch):
    place = tmp_path / "made"
    (archives.oci_archive if form == "oci-archive" else archives.oci_folder)(layer, place)
    monkeypatch.setenv("APPTAINER_NOHTTPS", "true")
    monkeypatch.setenv("APPTAINER_CACHEDIR", str(tmp_path / "cache"))
    toy = task(tmp_path, "unittest", repository[1])
    shelf = ImageStore(tmp_path / "images")
    with archives.registry(place) if form == "docker" else nullcontext() as address, shelf.locked():
        name = f"docker://{address}/me/{{image}}:v1" if address else f"{form}:{place}"
        source = Pulled(name, Apptainer())
        assert shelf.build(source, Problem(toy, gold())) is True
        assert shelf.build(source, Problem(toy, gold())) is False
    made = (tmp_path / "images" / f"{toy.image}.json").read_bytes()
    manifest = json.loads(made)
    assert manifest.keys() == set(ImageManifest.__struct_fields__)
    assert (manifest["set_up"], manifest["source"]) == (["README.md"], source.origin(toy))
    sif = tmp_path / "images" / f"{toy.image}.sif"
    assert manifest["sif_sha256"] == archives.sha256(sif)
    if form == "oci":  # a .sif is a source like any other, for root too
        again = ImageStore(tmp_path / "again")
        with again.locked():
            assert again.build(Pulled(str(sif), Apptainer()), Problem(toy, gold())) is True
        examine(tmp_path, again.images, repository[1])


@slow
def test_an_image_that_shows_the_solution_or_opens_no_sandbox_is_refused(layer, repository, tmp_path):
    more = tmp_path / "more/usr/lib/python3/dist-packages/calc"
    more.mkdir(parents=True)
    (more / "core.py").write_text(SOLVED)
    fixed = tmp_path / "fixed.tar"
    shutil.copy(layer, fixed)
    subprocess.run(["tar", "-rf", fixed, "-C", tmp_path / "more", "."], check=True)
    archives.oci_folder(fixed, tmp_path / "made")
    toy = task(tmp_path, "unittest", repository[1])
    reference = patch("calc/core.py", BROKEN, SOLVED)
    shelf = ImageStore(tmp_path / "images")
    for python, complaint in (
        ("python3", "dist-packages/calc/core.py: leave the instance"),
        ("python9", "does not open as a sandbox"),
    ):
        source = Pulled(f"oci:{tmp_path}/made", Apptainer(python=python))
        with shelf.locked(), pytest.raises(HpcSweError, match=complaint):
            shelf.build(source, Problem(toy, reference))
        assert {path.name for path in shelf.images.iterdir()} == {".builder"}
    source = Pulled(f"oci:{tmp_path}/made", Apptainer())
    assert ImageStore(shelf.images, keep_leaks=True).build(source, Problem(toy, reference))
    manifest = json.loads((shelf.images / f"{toy.image}.json").read_bytes())
    assert manifest["leaks"] == ["usr/lib/python3/dist-packages/calc/core.py"], "people can ask for it"


def test_what_is_filled_in_and_what_is_not_there_is_said(repository, tmp_path):
    with pytest.raises(ConfigError, match=r"only \{image\} and \{reference\} are filled in, not \['tag'\]"):
        Pulled("docker://host/{image}:{tag}", Apptainer())
    toy = task(tmp_path, "unittest", repository[1])
    source = Pulled("docker://host/me/{image}:v1", Apptainer())
    assert source.origin(toy) == "docker://host/me/sweb.eval.x86_64.toy_1776_unittest-1:v1"
    with pytest.raises(HpcSweError, match=r"nowhere\.tar: No such file"):
        ImageStore(tmp_path).build(Pulled("docker-archive:nowhere.tar", Apptainer()), Problem(toy, gold()))


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """The program that pulls is one of ours: it is refused twice, and then makes the folder."""
    tried = tmp_path / "tried"
    program = tmp_path / "bin/apptainer"
    program.parent.mkdir()
    program.write_text(f"""#!/bin/sh
echo once >> {tried}
if [ "$(wc -l < {tried})" -le 2 ]; then echo "FATAL: $REFUSAL" >&2; exit 255; fi
while [ "$1" != --sandbox ]; do shift; done
mkdir "$2"
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv(
        "REFUSAL", "429 Too Many Requests: toomanyrequests: You have reached your pull rate limit"
    )
    return tried


def test_a_pull_that_a_registry_limits_is_tried_again_and_no_other(tried, tmp_path, monkeypatch, capsys):
    toy = task(tmp_path, "unittest", "0" * 40)
    source = Pulled("docker://host/{reference}", Apptainer(), wait_s=0.1)
    with pytest.raises(HpcSweError, match="has no git repository in /testbed"):
        source.lay_out(toy, (), tmp_path)
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("the registry limits pulls; the next one is in 0 s; a login raises the limit") == 2
    tried.unlink()
    (tmp_path / "tree").rmdir()
    monkeypatch.setenv("REFUSAL", "reading manifest latest in host/tool-429: manifest unknown")
    with pytest.raises(HpcSweError, match="manifest unknown"):
        source.lay_out(msgspec.structs.replace(toy, image="tool-429"), (), tmp_path)
    assert tried.read_text() == "once\n"


def test_no_pull_waits_beyond_the_deadline_or_the_end_of_its_command(tried, tmp_path):
    toy = task(tmp_path, "unittest", "0" * 40)
    source = Pulled("docker://host/{reference}", Apptainer(), wait_s=600.0)
    source.limit.ended.set()
    with pytest.raises(HpcSweError, match="not pulled, since the command ends"):
        source.lay_out(toy, (), tmp_path)
    source.limit.until = 0.0
    with pytest.raises(HpcSweError, match="the registry still limits pulls"):
        source.lay_out(toy, (), tmp_path)
    assert tried.read_text() == "once\n" * 2


@pytest.mark.parametrize("lines", ['ln -s {} "$2/testbed"', 'mkdir "$2/testbed"; ln -s {}/.git "$2/testbed"'])
def test_a_link_of_an_image_does_not_lead_to_a_repository_of_the_host(tried, repository, tmp_path, lines):
    """Its repository would be replaced by one of the base commit alone."""
    tried.write_text("once\n" * 2)
    mine = tmp_path / "mine"
    shutil.copytree(repository[0], mine)
    program = tmp_path / "bin/apptainer"
    program.write_text(program.read_text() + lines.format(mine) + "\n")
    before = git(mine, "log", "--all", "--format=%H")
    toy = task(tmp_path, "unittest", repository[1])
    with pytest.raises(HpcSweError, match="its workdir '/testbed' leads out of the image"):
        Pulled("docker://host/{reference}", Apptainer()).lay_out(toy, (), tmp_path)
    assert git(mine, "log", "--all", "--format=%H") == before


def test_a_name_that_is_no_files_removes_no_other_image(repository, tmp_path):
    toy = task(tmp_path, "unittest", repository[1])
    shelf = ImageStore(tmp_path / "images")
    kept = [shelf.images / "other", shelf.images / "python-pytest"]
    for folder in kept:
        folder.mkdir(parents=True)
    source = Pulled("docker://host/{reference}", Apptainer())
    why = {"": "is no name of an image", "..": "is no name of an image", "python-pytest": "take another name"}
    for name, message in why.items():
        bad = msgspec.structs.replace(toy, image=name)
        with pytest.raises(HpcSweError, match=message):
            shelf.discard(bad)
        with pytest.raises(HpcSweError, match=message):
            shelf.build(source, Problem(bad, gold()))
    assert all(folder.exists() for folder in kept)


def bare_image(folder: Path) -> Path:
    """An image with a shell and a few programs of this machine, and with no Python."""
    programs = [shutil.which(name) or name for name in ("sh", "bash", "cat", "env", "mkdir", "rm", "git")]
    linked = "".join(subprocess.check_output(["ldd", name], text=True) for name in programs)
    for path in [*programs, *set(re.findall(r"/\S+", linked))]:
        to = folder / path.lstrip("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    for name in ("tmp", "proc", "sys", "dev", "etc", "root", "home", "opt", "mnt", "usr/bin", "var/tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not (folder / "bin").exists():
        (folder / "bin").symlink_to("usr/bin")
    return folder


SUM = "echo $(($1 - $2))\n"
PRINTED = '[ $(sh sum.sh 4 {0}) = {1} ] && how=PASS || how=FAIL\necho "--- $how: Test{0} (0.00s)"\n'
OLD, NEW = PRINTED.format(0, 4), PRINTED.format(0, 4) + PRINTED.format(2, 6)


@slow
def test_a_task_whose_image_has_no_python_is_usable_by_a_command(tmp_path):
    """Its tests print what those of Go do."""
    if shutil.which("apptainer") is None:
        pytest.skip("Apptainer is missing: make setup")
    kit, tree = tmp_path / "kit", bare_image(tmp_path / "bare")
    done = run([str(ROOT / "containers/build_python.sh"), f"{kit}/"])
    assert done.returncode == 0, done.stdout + done.stderr
    (tree / "tool").mkdir()
    (tree / "tool/sum.sh").write_text(SUM)
    (tree / "tool/test.sh").write_text(OLD)
    for words in ("init -q", "add -A", "commit -qm base"):
        git(tree / "tool", *words.split())
    published = ROWS["SWE-rebench V2"].row | {
        "base_commit": git(tree / "tool", "rev-parse", "HEAD"),
        "patch": patch("sum.sh", SUM, SUM.replace("-", "+")),
        "test_patch": patch("test.sh", OLD, NEW),
        "install_config": {"test_cmd": "sh test.sh", "log_parser": "parse_log_gotest"},
        "FAIL_TO_PASS": ["Test2"],
        "PASS_TO_PASS": ["Test0"],
    }
    build = command(tmp_path, str(tree), published)
    refused = " ".join(run(build).stdout.split())
    assert "run containers/build_python.sh and add configs/sandboxes/host_python.toml" in refused
    more = ["configs/sandboxes/host_python.toml", f'sandbox.mounts=["{kit}:/opt/host-python"]']
    done = run([*build, *more])
    assert "1 of 1 images are in" in done.stdout, done.stdout + done.stderr
    check = [*build[: build.index("--from")], *more, "--runs", "1", "--out", str(tmp_path / "checked.jsonl")]
    done = run([word.replace("build_images", "check") for word in check])
    assert "1 tasks: 1 usable" in done.stdout, done.stdout + done.stderr

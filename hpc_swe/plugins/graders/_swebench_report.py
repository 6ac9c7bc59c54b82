"""What swebench's own tools would have left behind, and its own aggregate of it.

Below `folder` lies the tree of its harness, `logs/run_evaluation/<label>/<model>/<instance>/report.json`;
`report.<label>.json` is what its `make_run_report` makes of that. Both come of functions of swebench, which
see no Docker here: they would only ask it for containers that were left.
"""

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hpc_swe.plugins.graders._judge import official
from hpc_swe.plugins.graders.base import GradedPatch
from hpc_swe.records import Task

LOGS = Path("logs", "run_evaluation")


def write(folder: Path, label: str, model: str, verdicts: Sequence[GradedPatch]) -> None:
    """Of one attempt at every task. Where there is no prediction at all, swebench has nothing to say."""
    predictions = {}
    for verdict in verdicts:
        task_id = verdict.task.task_id
        if not verdict.is_prediction:
            continue
        prediction = {"instance_id": task_id, "model_name_or_path": model, "model_patch": verdict.submission}
        predictions[task_id] = prediction
        if verdict.submission and verdict.score.outcome != "infra_error":
            place = folder / LOGS / label / model / task_id
            place.mkdir(parents=True, exist_ok=True)
            (place / "patch.diff").write_text(verdict.submission, encoding="utf-8")
            report = {task_id: _report(verdict)}
            (place / "report.json").write_text(json.dumps(report, indent=4), encoding="utf-8")
    dataset = [{"instance_id": verdict.task.task_id} for verdict in verdicts]
    if predictions:
        _aggregate(folder, label, predictions, dataset)


def _report(verdict: GradedPatch) -> dict[str, Any]:
    """In the words of swebench's get_eval_report, from tests that are known to have passed or not."""
    score = verdict.score
    return {
        "patch_is_None": False,
        "patch_exists": True,
        "patch_successfully_applied": bool(score.passed),
        "resolved": score.outcome == "resolved",
        "infra_failure": False,
        "tests_status": _tests(verdict.task, set(score.passed)),
    }


def _tests(task: Task, passed: set[str]) -> dict[str, Any]:
    listed = {"FAIL_TO_PASS": task.tests.fail_to_pass, "PASS_TO_PASS": task.tests.pass_to_pass}
    ended = {name: "PASSED" if name in passed else "FAILED" for names in listed.values() for name in names}
    status: dict[str, Any] = official("harness.grading").get_eval_tests_report(ended, listed)
    return status


def _aggregate(folder: Path, label: str, predictions: dict[str, Any], dataset: list[dict[str, str]]) -> None:
    with _reporting() as reporting, contextlib.redirect_stdout(io.StringIO()):
        reporting.RUN_EVALUATION_LOG_DIR = folder / LOGS
        made: Path = reporting.make_run_report(predictions, dataset, label, None, str(folder))
    made.rename(folder / f"report.{label}.json")


@contextlib.contextmanager
def _reporting() -> Iterator[Any]:
    """swebench's module, loaded while stand-ins are there for what knows Docker."""
    docker, package = ModuleType("docker"), ModuleType("swebench.image_builder")
    tools = ModuleType("swebench.image_builder.docker_utils")
    docker.DockerClient = tools.list_images = package.docker_utils = None  # type: ignore[attr-defined]
    stand_ins = {module.__name__: module for module in (docker, package, tools)}
    known = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield official("harness.reporting")
    finally:
        for name, module in known.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module

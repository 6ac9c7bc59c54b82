"""Write the files that swebench's own tools would write for an evaluation.

Below `folder` lies the tree of its harness, `logs/run_evaluation/<label>/<model>/<instance>/report.json`, and
`report.<label>.json`, which swebench's `make_run_report` makes of that. Functions of swebench make both. They
get a stand-in for Docker, which they would only ask for containers that were left over.
"""

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hpc_swe.tasks.graders.base import GradedPatch
from hpc_swe.tasks.swebench_package import official

LOGS = Path("logs", "run_evaluation")


def write(folder: Path, label: str, model: str, verdicts: Sequence[GradedPatch]) -> None:
    """Write the files of one attempt at every task; the aggregate needs at least one prediction."""
    predictions = {}
    for verdict in verdicts:
        task_id = verdict.task.task_id
        if not verdict.is_prediction:
            continue
        prediction = {"instance_id": task_id, "model_name_or_path": model, "model_patch": verdict.patch}
        predictions[task_id] = prediction
        if verdict.patch and verdict.score.outcome != "infra_error":
            place = folder / LOGS / label / model / task_id
            place.mkdir(parents=True, exist_ok=True)
            (place / "patch.diff").write_text(verdict.patch, encoding="utf-8")
            report = {task_id: _report(verdict)}
            (place / "report.json").write_text(json.dumps(report, indent=4), encoding="utf-8")
    dataset = [{"instance_id": verdict.task.task_id} for verdict in verdicts]
    if predictions:
        with _reporting() as reporting, contextlib.redirect_stdout(io.StringIO()):
            reporting.RUN_EVALUATION_LOG_DIR = folder / LOGS
            made: Path = reporting.make_run_report(predictions, dataset, label, None, str(folder))
        made.rename(folder / f"report.{label}.json")


def _report(verdict: GradedPatch) -> dict[str, Any]:
    """Return what swebench's get_eval_report would, from tests that are known to have passed or not."""
    score, plan, passed = verdict.score, verdict.task.tests, set(verdict.score.passed)
    listed = {"FAIL_TO_PASS": plan.fail_to_pass, "PASS_TO_PASS": plan.pass_to_pass}
    ended = {name: "PASSED" if name in passed else "FAILED" for names in listed.values() for name in names}
    return {
        "patch_is_None": False,
        "patch_exists": True,
        "patch_successfully_applied": bool(score.passed),
        "resolved": score.outcome == "resolved",
        "infra_failure": False,
        "tests_status": official("harness.grading").get_eval_tests_report(ended, listed),
    }


@contextlib.contextmanager
def _reporting() -> Iterator[Any]:
    """Load swebench's module for reports while stand-ins replace the modules that need Docker."""
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

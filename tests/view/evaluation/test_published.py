"""A published set is evaluated as it is: an agent without tools, replies as written, one command."""

import json

import pytest

from hpc_swe.base.store.parquet import evals
from tests.kit.checkout import typed
from tests.kit.published import ROWS, SUM
from tests.kit.small_evaluation import Small


@pytest.mark.slow
def test_a_published_file_is_evaluated_without_any_conversion(small: Small) -> None:
    names = ("TACO", "KodCode-V1", "code_contests")
    rows = small.folder / "rows.json"
    rows.write_text(json.dumps([ROWS[name][0] for name in names]))
    small.replies([f"```python\n{SUM}```"])
    replaced = ("taskset", "sandbox", "grader", "agent", "eval.samples")
    words = [word for word in small.words[1:] if not word.startswith(replaced)]
    words += [f'taskset={{type="programs", eval="{rows}"}}', 'sandbox={type="process"}']
    words += ['grader={type="pytest"}', 'agent={type="answer_agent"}']
    out = small.out
    line = ["configs/demo.toml", *words, "--samples", 1, "--tasks", 3, "--out", out.root]
    done = typed("hpc_swe.evaluate", *line, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    outcomes = {one.task_id: one.outcome for one in evals.read(out.eval_table("eval"))}
    assert sorted(outcomes.values()) == ["resolved", "resolved", "unresolved"]
    assert outcomes["Prefill_7_I"] == "unresolved"

"""What a person sees in TensorBoard, by TensorBoard's own readers."""

import re

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.data.provider import RunTagFilter
from tensorboard.plugins.custom_scalar import layout_pb2

from hpc_swe.base.drawing import FIRST, Drawing
from hpc_swe.base.metrics import METRICS, Log, meaning
from hpc_swe.base.rundir import RunDir


class Board:
    """The data that TensorBoard's server has of one run."""

    def __init__(self, run: RunDir) -> None:
        multiplexer = EventMultiplexer().AddRun(str(run.tensorboard), "run")
        multiplexer.Reload()
        self._data = MultiplexerDataProvider(multiplexer, str(run.tensorboard))
        self._where = {"ctx": RequestContext(), "experiment_id": "run"}

    def scalars(self):
        return self._data.list_scalars(**self._where, plugin_name="scalars").get("run", {})

    def tensors(self, plugin):
        """Tag -> (step, value) of each point."""
        names = {"plugin_name": plugin, "run_tag_filter": RunTagFilter(runs=["run"])}
        found = self._data.read_tensors(**self._where, **names, downsample=100).get("run", {})
        return {tag: [(point.step, point.numpy) for point in points] for tag, points in found.items()}

    def told(self, tag):
        return [(step, value.item().decode()) for step, value in self.tensors("text").get(tag, [])]


@pytest.fixture
def run(run):
    run.config.write_text('{"steps":7,"groups":{"group_size":4}}')
    return run


def test_reward_solve_rates_and_signal_come_first(run):
    numbers = {"reward/mean": 0.5, "solve/eval/greedy": 0.4, "solve/train": 0.3, "groups/signal_rate": 0.9}
    Log(run.metric_log("a")).write(0, numbers | {"batch/fill": 1.0, "episodes/turns": 2.0})
    Drawing(run).update()
    tags = sorted(Board(run).scalars())
    assert tags[:4] == [
        f"{FIRST}/{name}"
        for name in ("groups_signal_rate", "reward_mean", "solve_eval_greedy", "solve_train")
    ]
    assert set(tags[4:]) == {*numbers, "batch/fill", "episodes/turns"}


def test_the_charts_have_an_order_and_know_only_curves_that_there_are(run):
    Log(run.metric_log("a")).write(0, {"reward/mean": 0.5})
    Drawing(run).update()
    ((_, text),) = Board(run).tensors("custom_scalars")["custom_scalars__config__"]
    layout = layout_pb2.Layout.FromString(text.item())
    assert [chart.title for chart in layout.category[0].chart][:2] == ["reward", "solve rate"]
    (best,) = [chart for chart in layout.category[0].chart if chart.title == "best evaluation"]
    drawn = [name for name in METRICS if any(re.search(tag, name) for tag in best.multiline.tag)]
    assert drawn == ["solve/best"], "TensorBoard searches for the pattern anywhere in a name"
    names = [name.replace("*", "x") for name in METRICS]
    tags = [tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag]
    assert [
        tag for tag in tags if not meaning(tag[1:-1]) and not any(re.fullmatch(tag, n) for n in names)
    ] == []


def test_the_configuration_can_be_read_as_it_stands(run):
    Drawing(run).update()
    ((_, told),) = Board(run).told("run/configuration")
    assert '      "steps": 7' in told
    assert all(line.startswith("    ") for line in told.splitlines()), "or Markdown would change it"

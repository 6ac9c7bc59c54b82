"""What all stand-ins for a learner on one rank have in common: they take steps, and train nothing."""

import msgspec

from hpc_swe.base.records import Batch, BatchManifest, CoordinatorState
from hpc_swe.base.store import folders


def publish_batch(run, step):
    """Publish a batch without samples, as the coordinator does."""

    def write(stage):
        data = msgspec.msgpack.encode(Batch(step=step, rank=0, microbatches=[]))
        files = {run.rank_file(0): folders.write(stage, run.rank_file(0), data)}
        after = CoordinatorState()
        return BatchManifest(writer="c", files=files, step=step, groups=[], closed=[], after=after, stats={})

    folders.publish(run.batch(step), write)


class Batches:
    """Answer with the batch of each step, but with the orders first that are listed for it."""

    def __init__(self, run, orders=None):
        self.run, self.orders = run, orders or {}

    def wait(self, step):
        if self.orders.get(step):
            return self.orders[step].pop(0)
        return folders.manifest(self.run.batch(step), BatchManifest)


class OneRank:
    rank, size, data_rank, data_size, step, tensor_parallel, vocabulary, tolerance = 0, 1, 0, 1, 0, 1, 2, 1.0
    deltas_of_model = False

    @property
    def ranks(self):
        return self

    def broadcast(self, value, source=0):
        return value

    def gather(self, value):
        return [value]

    def train(self, batch, objective):
        self.step += 1
        return {"policy/skipped": 0.0, "policy/tokens": 1.0}

    def export(self, folder, carrier):
        return {}

    def logprobs(self, token_ids):
        return [0.0]

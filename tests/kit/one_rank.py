"""What all stand-ins for a learner on one rank have in common: they take steps, and train nothing."""


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

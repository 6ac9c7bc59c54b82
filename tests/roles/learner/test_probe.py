"""The text that learner and engines compare after each swap."""

from hpc_swe.agents.chat.tokens import Tokens
from hpc_swe.roles.learner.probe import LENGTH, probe_ids
from tests.kit.toy_model import HERMES, make_model


def test_a_probe_is_words_where_control_tokens_come_first(tmp_path):
    model = make_model(tmp_path, HERMES)
    spec = Tokens(model)
    ids = probe_ids(model, 100_000)
    assert spec.decode(list(ids)).startswith("The sun rises in the east")
    assert 24 <= len(ids) <= LENGTH
    assert not set(ids) & set(spec.control.values())


def test_a_probe_has_only_ids_that_the_model_has(tmp_path):
    model = make_model(tmp_path, HERMES)
    assert max(probe_ids(model, 100)) < 100
    (model / "tokenizer.json").unlink()
    assert probe_ids(model, 20) == tuple(range(20))

"""A model whose weights fit its shape, for starts that check them."""

import json

import pytest

from tests.kit.toy_model import HERMES, SHAPE, make_model, write_weights


@pytest.fixture
def model(tmp_path):
    folder = make_model(tmp_path / "model", HERMES)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "generation_config.json").write_text('{"eos_token_id": 322}')
    write_weights(folder)
    return folder

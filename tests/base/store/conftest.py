"""Folders with names that people choose."""

import pytest

WEIRD = {
    "spaces": "my run (final) ",
    "unicode": "r\u00fcn-\u5b9f\u884c-\U0001f40d",
    "long": "n" * 200,
    "shell": "a;b$(c)'d\"e*[f]~1",
}


@pytest.fixture(params=WEIRD.values(), ids=WEIRD.keys())
def weird_tmp_path(tmp_path, request):
    folder = tmp_path / request.param
    folder.mkdir()
    return folder

import pytest

from hpc_swe.rundir import RunDir

WEIRD = {
    "spaces": "my run (final) ",
    "unicode": "r\u00fcn-\u5b9f\u884c-\U0001f40d",
    "long": "n" * 200,
    "shell": "a;b$(c)'d\"e*[f]~1",
}


@pytest.fixture
def run(tmp_path):
    made = RunDir(tmp_path / "run")
    made.make()
    return made


@pytest.fixture(params=WEIRD.values(), ids=WEIRD.keys())
def weird_tmp_path(tmp_path, request):
    folder = tmp_path / request.param
    folder.mkdir()
    return folder

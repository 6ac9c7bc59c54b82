"""What a coordinator reads of a run of many workers."""

from tests.bench.look import measure


def test_a_look_opens_each_lease_once_and_lists_as_few_folders_for_many(tmp_path):
    few, many = (measure(tmp_path / str(workers), workers)[0] for workers in (16, 128))
    assert few == {"open": 16, "os.listdir": 13}
    assert many == {"open": 128, "os.listdir": 13}

"""What a coordinator reads of a run of many workers."""

from tests.bench.look import measure


def test_a_look_opens_each_lease_once_and_lists_as_few_folders_for_many(tmp_path):
    """One more open is that of the record of stop signs, which ends a run early."""
    few, many = (measure(tmp_path / str(workers), workers)[0] for workers in (16, 128))
    assert few == {"open": 17, "os.listdir": 13}
    assert many == {"open": 129, "os.listdir": 13}

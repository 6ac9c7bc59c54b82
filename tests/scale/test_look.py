"""What a coordinator reads of a run of many workers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from look import measure


def test_a_look_opens_each_lease_once_and_lists_no_more_folders_for_more_workers(tmp_path):
    few, many = (measure(tmp_path / str(workers), workers)[0] for workers in (16, 128))
    assert few == {"open": 16, "os.listdir": 13}
    assert many == {"open": 128, "os.listdir": 13}

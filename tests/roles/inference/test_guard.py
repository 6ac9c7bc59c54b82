"""What an engine's guard sees of other processes."""

import subprocess
import sys

from hpc_swe.roles.inference import guard

NAMED = "import ctypes; ctypes.CDLL(None).prctl(15, b'() \\xff R 1)'); print(1, flush=True); input()"


def test_a_process_whose_name_is_no_text_ends_no_guard():
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in guard._others()
        child.communicate()

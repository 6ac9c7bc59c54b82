"""How long requests wait while a version is verified: python -m tests.bench.pause [GIGABYTES].

Started by hand; CI has no room for it. The version holds a small model and one large file that the engine
need not load, so that what is measured is the verifying, without the swap. Prints the longest time between
two answers of one-token requests, before the version comes and until it is served.
"""

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from hpc_swe.records import Sampling, WeightVersion
from hpc_swe.rundir import RunDir
from tests.kit.engine_kit import CPU, TOKEN, await_node, is_serving, make_model, make_run, publish, supervise


class Asking(threading.Thread):
    """Requests one after the other."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.longest, self._from = url, 0.0, time.monotonic()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            CPU.generate(self.url, TOKEN, np.arange(5, 9, dtype="<i4"), Sampling(max_tokens=1), 900.0)
            now = time.monotonic()
            self.longest, self._from = max(self.longest, now - self._from), now

    def lap(self) -> float:
        """Seconds of the longest gap since the last lap, an open one included."""
        found, self.longest = max(self.longest, time.monotonic() - self._from), 0.0
        return found


def add_large_file(folder: Path, gigabytes: float) -> None:
    """One tensor of zeros in a file that takes no room on the disk."""
    count = int(gigabytes * 1e9) // 4
    name = "rotary_emb.inv_freq"
    header = json.dumps({name: {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}).encode()
    with (folder / "zeros.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * count)


def measure(run: RunDir, folder: Path, gigabytes: float) -> None:
    first = await_node(run, is_serving(WeightVersion()), 600.0)
    asking = Asking(first.url)
    asking.start()
    time.sleep(10.0)
    asking.lap()
    time.sleep(10.0)
    print(f"nothing verified: longest gap {asking.lap():.2f} s", flush=True)
    began = time.monotonic()
    version = WeightVersion(step=1)
    publish(run, folder, version, listed=folder)
    print(f"published {gigabytes:g} GB in {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    asking.lap()
    await_node(run, is_serving(version), 600.0)
    seconds = time.monotonic() - began
    print(f"served after {seconds:.1f} s; longest gap between answers {asking.lap():.2f} s", flush=True)
    asking.over.set()


def main() -> None:
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 8.0
    with tempfile.TemporaryDirectory(prefix="p") as name:
        run, model = make_run(Path(name) / "run"), make_model(Path(name) / "model", 0)
        large = make_model(Path(name) / "large", 1)
        for folder in (model, large):  # a version has the tensors of the model that the engine began with
            add_large_file(folder, gigabytes)
        process = supervise(run, CPU, model, scratch=name)
        try:
            measure(run, large, gigabytes)
        finally:
            run.stop.touch()
            _, log = process.communicate(timeout=120)
            print(
                *[line for line in log.splitlines() if "v000001" in line or "restart" in line][:6], sep="\n"
            )


if __name__ == "__main__":
    main()

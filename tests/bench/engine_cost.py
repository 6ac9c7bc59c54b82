"""Measure what an engine's processes compute for each sampled token: python -m tests.bench.engine_cost.

    python -m tests.bench.engine_cost --clients 64 --tokens 600

starts a vLLM with a tiny model on the CPU and asks for answers of one length, as many at a time as there are
clients. A line for each round has the tokens a second and, for each process, its microseconds of processor
time for one token. The process `vllm` makes answers of what the engine's core has sampled, on one thread, so
that 1,000,000 by its number is the most tokens that an engine samples in a second, on whatever GPU.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from hpc_swe import cli
from hpc_swe.records import Sampling
from tests.kit import engine_kit as kit

ROUNDS = 2
PROMPT = 250
TIMEOUT_S = 600.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
LEAST_S = 0.2
"""Processes that computed for less than this in a round are left out."""


def processor_seconds() -> Mapping[str, float]:
    """Return name and id -> seconds of all processes that descend from this one."""
    found: dict[int, tuple[int, str, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(") ")
        except OSError:  # it has ended
            continue
        fields = tail.split()
        seconds = TICK_S * (int(fields[11]) + int(fields[12]))
        found[int(path.parent.name)] = (int(fields[1]), head.partition("(")[2], seconds)
    mine, own = {os.getpid()}, -1
    while len(mine) != own:
        own = len(mine)
        mine |= {number for number, (parent, _, _) in found.items() if parent in mine}
    return {f"{name}-{number}": s for number, (_, name, s) in found.items() if number in mine}


@cli.command
def main() -> None:
    """Start an engine, and print a line for each round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600, help="of an answer")
    arguments = cli.parse(parser)
    engine = replace(kit.CPU, max_num_seqs=arguments.clients, kv_cache_bytes=1 << 29)
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, 2000, (ROUNDS * arguments.clients, PROMPT)).astype(np.int32)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.clients) as pool:
        folder = Path(name)
        with kit.serving(engine, kit.make_model(folder / "model", 0), folder / "log") as url:

            def ask(prompt: np.ndarray) -> int:
                wanted = Sampling(max_tokens=arguments.tokens)
                return len(engine.generate(url, kit.TOKEN, prompt, wanted, TIMEOUT_S).token_ids)

            for part in np.split(prompts, ROUNDS):
                before, began = processor_seconds(), time.monotonic()
                count = sum(pool.map(ask, part))
                seconds, after = time.monotonic() - began, processor_seconds()
                took = {name: after[name] - before[name] for name in before.keys() & after.keys()}
                costs = [f"{name} {1e6 * s / count:.0f}" for name, s in sorted(took.items()) if s > LEAST_S]
                print(
                    f"{count / seconds:.0f} tokens/s; us of a core for each: {', '.join(costs)}", flush=True
                )


if __name__ == "__main__":
    main()

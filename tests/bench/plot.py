"""Draws docs/scale.png and prints its tables: python -m tests.bench.plot --out docs/scale.png.

The simulation with more requests than slots and with fewer, each as it is and without `Backoff` slowing down.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot

from tests.bench.simulate import MAX_SLOWDOWN, Settings, simulate, table

LOADS = {1.1: "requests wait", 0.5: "workers wait"}
PACES = {1.0: "without slowing down", MAX_SLOWDOWN: "as it is"}
STYLES = {1.1: "o", 0.5: "s"}
FOLDERS = ("requests/claimed", "scored/ready", "requests/ready", "episodes/claimed", "episodes/ready")

Runs = dict[tuple[float, float], list[dict[str, float]]]


def runs(workers: list[int], lasts_s: float, warm_s: float) -> Runs:
    """(load, slowest) -> figures by number of workers."""
    cases = list(product(LOADS, PACES))
    settings = [
        Settings(workers=count, load=load, slowest=slowest, lasts_s=lasts_s, warm_s=warm_s)
        for load, slowest in cases
        for count in workers
    ]
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(simulate, settings))
    return {case: found[i * len(workers) : (i + 1) * len(workers)] for i, case in enumerate(cases)}


def draw(found: Runs, out: Path) -> None:
    figure, (calls, races, folders) = pyplot.subplots(1, 3, figsize=(12, 3.6), dpi=80)
    for axes, name in ((calls, "calls/s"), (races, "lost races/claim")):
        for (load, slowest), rows in found.items():
            now = slowest != 1.0
            axes.plot(
                [row["workers"] for row in rows],
                [row[name] for row in rows],
                ("-" if now else ":") + STYLES[load],
                color="C0" if now else "C1",
                markersize=4,
                label=f"{LOADS[load]}, {PACES[slowest]}",
            )
    races.axhline(1.0, color="grey", linewidth=0.5)
    for name in FOLDERS:
        rows = found[1.1, MAX_SLOWDOWN]
        most = [max(1.0, row[f"most in {name}"]) for row in rows]
        folders.plot([row["workers"] for row in rows], most, "-o", markersize=4, label=name)
    calls.set_title("metadata calls a second, whole run")
    races.set_title("races lost for each claim")
    folders.set_title("most entries in a folder, requests wait")
    for axes in (calls, races, folders):
        axes.set(xscale="log", yscale="log", xlabel="workers")
        axes.set_xticks(
            ticks := [row["workers"] for row in found[1.1, MAX_SLOWDOWN]], map("{:.0f}".format, ticks)
        )
        axes.minorticks_off()
    calls.legend(fontsize=7, loc="lower right")
    folders.set_ylim(top=1e6)
    folders.legend(fontsize=7, loc="upper left", ncols=2)
    figure.tight_layout()
    figure.savefig(out, metadata={"Software": None})


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    words.add_argument("--out", type=Path, default=Path("docs/scale.png"))
    words.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024, 4096])
    words.add_argument(
        "--lasts-s", type=float, default=1200.0, help="virtual seconds of a run (default 1200)"
    )
    words.add_argument("--warm-s", type=float, default=800.0, help="of these not counted (default 800)")
    given = words.parse_args()
    found = runs(given.workers, given.lasts_s, given.warm_s)
    for (load, slowest), rows in found.items():
        print(f"\n{LOADS[load]}, {PACES[slowest]}\n")
        print(*table(rows), sep="\n")
    draw(found, given.out)


if __name__ == "__main__":
    main()

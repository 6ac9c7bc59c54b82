"""The test cluster by hand, a shell for as long as it lasts: python -m tests.kit.cluster."""

import os
import sys

from tests.kit.checkout import ROOT
from tests.kit.cluster.cluster import Cluster

TRY = """\
You are alice on the login node of a Slurm cluster. Try:
  sinfo; squeue; sacct                    what there is, what runs, what ran
  srun -N2 hostname                       two nodes; -p gpu --gres=gpu:1 for a GPU without a driver
  sbatch -p preemptible --wrap 'sleep 99' a job that others push aside
  cd {root}     the checkout; {shared} is shared by all nodes
"""


def main() -> int:
    with Cluster.start() as cluster:
        print(TRY.format(root=ROOT, shared=cluster.shared))
        terminal = {"TERM": os.environ.get("TERM", "dumb")}
        with cluster.popen("bash", "--login", env=terminal, stdin=None) as shell:
            return shell.wait()


if __name__ == "__main__":
    sys.exit(main())

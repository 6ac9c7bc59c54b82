"""python -m jobs.evaluate: the command line of hpc_swe.evaluate, beside the other jobs."""

from hpc_swe.evaluate import main

if __name__ == "__main__":
    main()

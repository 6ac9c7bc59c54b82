"""python -m jobs.engine: python -m hpc_swe.engine under its old name, for one release."""

from hpc_swe.engine import main

if __name__ == "__main__":
    main()

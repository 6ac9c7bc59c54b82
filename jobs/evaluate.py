"""python -m jobs.evaluate: python -m hpc_swe.evaluate under its old name, for one release."""

from hpc_swe.evaluate import main

if __name__ == "__main__":
    main()

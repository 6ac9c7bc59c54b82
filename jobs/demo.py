"""python -m jobs.demo: python -m hpc_swe.demo under its old name, for one release."""

from hpc_swe.demo.__main__ import main

if __name__ == "__main__":
    main()

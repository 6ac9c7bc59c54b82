"""Forward `python -m jobs.engine` to `python -m hpc_swe.engine`, for one release."""

from hpc_swe.engine import main

if __name__ == "__main__":
    main()

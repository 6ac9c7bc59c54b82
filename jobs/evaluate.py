"""Forward `python -m jobs.evaluate` to `python -m hpc_swe.evaluate`, for one release."""

from hpc_swe.evaluate import main

if __name__ == "__main__":
    main()

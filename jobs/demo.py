"""Forward `python -m jobs.demo` to `python -m hpc_swe.demo`, for one release."""

from hpc_swe.demo.__main__ import main

if __name__ == "__main__":
    main()

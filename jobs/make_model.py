"""Forward `python -m jobs.make_model` to `python -m hpc_swe.demo.model`, for one release."""

from hpc_swe.demo.model import main

if __name__ == "__main__":
    main()

"""python -m jobs.make_model: python -m hpc_swe.demo.model under its old name, for one release."""

from hpc_swe.demo.model import main

if __name__ == "__main__":
    main()

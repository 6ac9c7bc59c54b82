"""python -m jobs.build_images: python -m hpc_swe.tasks.build_images under its old name, for one release."""

from hpc_swe.tasks.build_images import main

if __name__ == "__main__":
    main()

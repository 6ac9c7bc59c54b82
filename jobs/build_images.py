"""Forward `python -m jobs.build_images` to `python -m hpc_swe.tasks.build_images`, for one release."""

from hpc_swe.tasks.build_images import main

if __name__ == "__main__":
    main()

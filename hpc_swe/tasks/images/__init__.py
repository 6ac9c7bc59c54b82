"""What hpc_swe/tasks/build_images.py builds with: sources, repositories, leaks, and the folder of images."""

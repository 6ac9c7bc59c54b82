"""Build images for hpc_swe/tasks/build_images.py: sources, repositories, leaks, and the folder of images."""

"""Build images for hpc_swe/makers/build_images.py: sources, repositories, leaks, and the folder of images."""

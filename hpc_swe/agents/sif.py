"""Read the image files of Apptainer."""

import re


def squashfs_offset(listing: str) -> int | None:
    """Return the offset of a .sif's files in bytes, by `apptainer sif list`; None for no plain squashfs."""
    found = re.search(r"\|(\d+)-\d+ *\|FS \(Squashfs/\*System", listing)
    return int(found[1]) if found else None

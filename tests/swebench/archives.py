"""Images of others, made by hand: a docker archive, an OCI folder and an OCI archive, each of one layer."""

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

CONFIG = {
    "architecture": "amd64",
    "os": "linux",
    "config": {
        "Env": ["PATH=/opt/miniconda3/bin:/usr/local/bin:/usr/sbin:/usr/bin:/bin", "MADE_BY=somebody"],
        "WorkingDir": "/testbed",
    },
}
OCI = "application/vnd.oci.image"
HEAVY = ("share", "lib/x86_64-linux-gnu/perl", "lib/x86_64-linux-gnu/gconv", "games", "sbin")


def layer(base: Path, more: Path, file: Path) -> Path:
    """The base image without what is heavy, and a folder's files over it."""
    left_out = [f"--exclude=./usr/{name}" for name in HEAVY]
    tar = ["tar", "--owner=0", "--group=0"]
    subprocess.run([*tar, "-cf", file, "-C", base, *left_out, "."], check=True)
    subprocess.run([*tar, "-rf", file, "-C", more, "."], check=True)
    return file


def docker_archive(layer: Path, file: Path) -> None:
    """As ``docker save`` writes it."""
    digest = sha256(layer)
    config = as_json(CONFIG | {"rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}})
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = as_json([{"Config": name, "RepoTags": ["x/y:latest"], "Layers": [f"{digest}/layer.tar"]}])
    with tarfile.open(file, "w") as archive:
        for path, data in ((name, config), ("manifest.json", manifest)):
            about = tarfile.TarInfo(path)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
        archive.add(layer, f"{digest}/layer.tar")


def oci_folder(layer: Path, folder: Path) -> None:
    """As ``skopeo copy`` writes it."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    digest = sha256(layer)
    (blobs / digest).hardlink_to(layer)

    def put(data: bytes, kind: str) -> dict[str, object]:
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"mediaType": f"{OCI}.{kind}+json", "digest": f"sha256:{name}", "size": len(data)}

    root = {"rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}
    config = put(as_json(CONFIG | root), "config.v1")
    one = {"mediaType": f"{OCI}.layer.v1.tar", "digest": f"sha256:{digest}", "size": layer.stat().st_size}
    manifest = put(as_json({"schemaVersion": 2, "config": config, "layers": [one]}), "manifest.v1")
    (folder / "index.json").write_bytes(as_json({"schemaVersion": 2, "manifests": [manifest]}))
    (folder / "oci-layout").write_bytes(as_json({"imageLayoutVersion": "1.0.0"}))


def oci_archive(layer: Path, file: Path) -> None:
    """The same in one file."""
    folder = file.with_suffix(".folder")
    oci_folder(layer, folder)
    subprocess.run(["tar", "-cf", file, "-C", folder, "blobs", "index.json", "oci-layout"], check=True)


def sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()

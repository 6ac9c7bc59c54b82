"""Images of others, made by hand: a docker archive; an OCI folder, archive and registry. One layer each."""

import hashlib
import io
import json
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    folder = file.with_suffix(".folder")
    oci_folder(layer, folder)
    subprocess.run(["tar", "-cf", file, "-C", folder, "blobs", "index.json", "oci-layout"], check=True)


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Serves an OCI folder as the image of any name; yields its address."""
    (listed,) = json.loads((folder / "index.json").read_bytes())["manifests"]
    blobs = folder / "blobs/sha256"

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.path.rpartition("/")[2]
            is_manifest = "/manifests/" in self.path
            digest = listed["digest"] if is_manifest else wanted
            data = b"{}" if not wanted else (blobs / digest.removeprefix("sha256:")).read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", listed["mediaType"] if is_manifest else "application/json")
            self.send_header("Content-Length", str(len(data)))
            if wanted:
                self.send_header("Docker-Content-Digest", digest)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()

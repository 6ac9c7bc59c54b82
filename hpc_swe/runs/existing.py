"""Open a run that exists, after checking its owner, its mode and its protocol."""

import json
import os
from pathlib import Path

from hpc_swe import config as configuration
from hpc_swe.errors import ConfigError, CorruptRecord, StaleRun
from hpc_swe.records import RunManifest
from hpc_swe.rundir import PROTOCOL, RunDir
from hpc_swe.settings import RunConfig
from hpc_swe.store import atomic


def load(run: RunDir) -> RunConfig:
    """Return the configuration of a run that exists.

    Raises:
        ConfigError: The folder holds no run, or it belongs to another user.
        CorruptRecord: Its configuration cannot be read.
        StaleRun: It was made under another protocol version.
    """
    try:
        owner = run.config.stat().st_uid
        manifest = atomic.get(run.manifest, RunManifest)
        tree = json.loads(run.config.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{run.root}: no run here ({error.filename} is missing); `launch start` makes one"
        ) from None
    except (IsADirectoryError, ValueError) as error:
        raise _damaged(run, str(error)) from None
    if not isinstance(tree, dict):
        raise _damaged(run, "not a table")
    if owner != os.getuid():
        raise ConfigError(f"{run.root}: belongs to user {owner}; a run is acted on by its owner only")
    require_private(run.root)
    if manifest.protocol != PROTOCOL:
        raise StaleRun(
            f"{run.root}: protocol {manifest.protocol}, this code reads {PROTOCOL}; use {manifest.commit}"
        )
    return configuration.build(tree, str(run.config))


def _damaged(run: RunDir, why: str) -> CorruptRecord:
    return CorruptRecord(
        f"{run.config}: not the configuration of a run: {why}; restore the file, or start another run"
    )


def require_private(root: Path) -> None:
    """Require that nobody else may read or write a run: it holds keys, and jobs trust what it says.

    Raises:
        ConfigError: Its folder belongs to another user, or is open to group or others.
    """
    found = root.stat()
    if found.st_uid != os.getuid():
        raise ConfigError(f"{root}: belongs to user {found.st_uid}; a run is acted on by its owner only")
    if found.st_mode & 0o077:
        raise ConfigError(f"{root}: mode {found.st_mode & 0o777:o} lets others in; run chmod 700 {root}")

"""Define every record that crosses a process boundary; nothing else crosses one.

Every record is frozen and names its units. Each module holds what crosses one kind of place in a run's
folder; all names are imported from here.
"""

from hpc_swe.base.records.base import *  # noqa: F403
from hpc_swe.base.records.cells import *  # noqa: F403
from hpc_swe.base.records.folders import *  # noqa: F403
from hpc_swe.base.records.messages import *  # noqa: F403

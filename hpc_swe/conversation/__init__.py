"""From messages to token ids and back; the same for the recorder and for demonstrations.

The one idea: ids are only ever appended. A conversation keeps what the engine saw and sampled, and
the template renders nothing but the messages that are new.
"""

from hpc_swe.conversation.builder import TokenBuilder
from hpc_swe.conversation.replies import ToolFormat

__all__ = ["TokenBuilder", "ToolFormat"]

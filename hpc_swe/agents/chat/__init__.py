"""Turn messages into token ids and back, in the same way for the recorder and for demonstrations.

Ids are only ever appended: a conversation keeps the ids that the engine saw and sampled, and the template
renders only the messages that are new.
"""

from hpc_swe.agents.chat.builder import TokenBuilder
from hpc_swe.agents.chat.replies import ToolFormat

__all__ = ["TokenBuilder", "ToolFormat"]

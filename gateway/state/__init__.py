"""State that outlives a process and is shared between processes: statistics, and documents such as pinned rules.

None of it is on the request path. A `Store` (an SQLite file or Redis) is called from one thread that may block; a
`State` synchronises with it once a second, and is all that the rest of the gateway uses.
"""

from __future__ import annotations

from gateway.state.documents import Conflict, Document, Documents
from gateway.state.store import StateError, Store
from gateway.state.sync import State

__all__ = ["Conflict", "Document", "Documents", "State", "StateError", "Store"]

"""What outlives a gateway process, and is shared between several: experience, and documents such as pinned rules.

Everything here runs beside the request path. A `Store` (an SQLite file or Redis) is called from one thread that may
wait; a `State` drives it once a second, and is all that the rest of the gateway sees.
"""

from __future__ import annotations

from gateway.state.documents import Documents
from gateway.state.store import Conflict, Document, StateError, Store
from gateway.state.sync import State

__all__ = ["Conflict", "Document", "Documents", "State", "StateError", "Store"]

"""Stores documents that an operator changes; errors of the store become HTTP errors."""

from __future__ import annotations

from gateway.dialects.errors import GatewayError
from gateway.state.documents import Conflict, Document, Documents
from gateway.state.store import StateError


async def put_next(documents: Documents, name: str, text: str) -> Document:
    """Store the next version of a document; raise 409 if another process changed it, 503 if the store fails."""
    stored = documents.get(name)
    try:
        return await documents.put(name, text, after=0 if stored is None else stored.version)
    except Conflict as conflict:
        raise GatewayError(409, f"Changed by another process: {conflict}. Check it and try again.") from None
    except StateError as error:
        raise GatewayError(503, f"Not done, because it cannot be stored: {error}.") from None

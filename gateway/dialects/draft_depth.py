"""How deep an engine drafts for one request: `vllm_xargs` of its body, where `deploy/vllm_draft_depth` reads it."""

from __future__ import annotations

import re
from typing import Final

from gateway.dialects.json_body import ESCAPE, decoded_body, insert_field, set_field

_XARGS: Final = "vllm_xargs"
_HAS_FIELDS: Final = re.compile(rb'\s*\{\s*"')


def with_draft_tokens(body: bytes, k: int) -> bytes:
    """Return the JSON object of a request, limited to k draft tokens per step, whatever it asks for itself.

    Other fields of its `vllm_xargs` stay. If that is no object, the body is unchanged: the engine reports the error.

    Examples
    --------
    >>> with_draft_tokens(b'{"model": "m"}', 0)
    b'{"vllm_xargs":{"draft_tokens":0},"model": "m"}'
    >>> with_draft_tokens(b'{"model": "m", "vllm_xargs": {"session": "a", "draft_tokens": 5}}', 2)
    b'{"model":"m","vllm_xargs":{"session":"a","draft_tokens":2}}'
    """
    if b"vllm_xargs" not in body and ESCAPE not in body and _HAS_FIELDS.match(body) is not None:
        return insert_field(body, b'"vllm_xargs":{"draft_tokens":%d}' % k)
    given = decoded_body(body).get(_XARGS)
    if given is not None and not isinstance(given, dict):
        return body
    return set_field(body, _XARGS, {**(given or {}), "draft_tokens": k})

"""Anonymizes records."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from gateway.rooms.recorder.hashes import HASH_BITS, TextHasher
from gateway.rooms.recorder.schema import Hashing
from lab.trace.record import TraceRecord
from policies.features.prompt import read_prompt

_WORD = re.compile(r"[a-z][a-z0-9_]{0,39}")


class Anonymizer:
    """Removes what identifies people from records, consistently over a whole trace.

    Examples
    --------
    >>> anonymizer = Anonymizer("secret", 100.0, with_hashes=False)
    >>> first = anonymizer.anonymized(TraceRecord(arrived_at=101.5, session="alice", prompt="hello"))
    >>> second = anonymizer.anonymized(TraceRecord(arrived_at=102.5, session="alice"))
    >>> first.arrived_at, first.prompt, first.session == second.session != "alice"
    (1.5, '', True)
    """

    def __init__(self, salt: str | None, begun_at: float | None, *, with_hashes: bool) -> None:
        secret = salt.encode() if salt else secrets.token_bytes(32)
        self._key = blake2b(secret, digest_size=32).digest()
        self._begun_at = begun_at  # arrival time that becomes 0
        self._hasher = TextHasher(secret) if with_hashes else None

    def anonymized(self, record: TraceRecord) -> TraceRecord:
        """Return a record without anything that identifies people.

        Ids, key names, sessions, templates and prefix blocks become hashes, so that equal values stay equal.
        """
        prompt_hashes, output_hashes, hashing = self._texts(record)
        arrived_at = record.arrived_at
        if arrived_at is not None and self._begun_at is not None:
            arrived_at = round(arrived_at - self._begun_at, 6)
        return replace(
            record,
            id=self._name(record.id, 16),
            arrived_at=arrived_at,
            key=self._name(record.key, 8),
            session=self._name(record.session, 16),
            template=self._name(record.template, 8),
            error=record.error if _WORD.fullmatch(record.error) else "error" if record.error else "",
            prompt="",
            messages=(),
            output="",
            prompt_token_ids=(),
            output_token_ids=(),
            prompt_hashes=prompt_hashes,
            output_hashes=output_hashes,
            hashing=hashing,
            prefix_blocks=[self._number(block) for block in record.prefix_blocks],
        )

    def _texts(self, record: TraceRecord) -> tuple[Sequence[int], Sequence[int], Hashing | None]:
        if self._hasher is None:
            return (), (), None
        if record.output_token_ids and record.prompt_token_ids:
            return self._hasher.hash_ids(record.prompt_token_ids, record.output_token_ids)
        if record.output_hashes:
            prompts, outputs, _ = self._hasher.hash_ids(record.prompt_hashes, record.output_hashes)
            return prompts, outputs, record.hashing
        if record.prompt or record.messages or record.output:
            pieces = [record.prompt] if record.prompt else read_prompt({"messages": list(record.messages)}).pieces
            return self._hasher.hash_text("\n".join(pieces), record.output)
        return (), (), None

    def _name(self, name: str, digits: int) -> str:
        return blake2b(name.encode("utf-8", "surrogatepass"), key=self._key).hexdigest()[:digits] if name else ""

    def _number(self, number: int) -> int:
        digest = blake2b(str(number).encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> (64 - HASH_BITS)

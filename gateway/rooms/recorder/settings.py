"""The section `recorder`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from gateway.config.settings.base import Count, Seconds, Secret, Section


class RecorderSettings(Section):
    """Recording of requests, one JSON line each, in files that `gateway trace` reads.

    Parameters
    ----------
    path
        Folder of the files; created if missing.
    text
        How prompts and answers are recorded: docs/replay.md. Not at all (`none`), as hashes on which n-gram and suffix
        drafting can be replayed (`hashes`), or as text (`full`).
    sample
        Share of requests to record, chosen at random.
    compression
        Compression of the files.
    flush_s
        Seconds between two writes; a killed process loses at most this much.
    rotate_mib
        Size in MiB at which the next file is started.
    rotate_s
        Age in seconds at which the next file is started.
    keep_s
        Seconds after its last write at which a file is deleted.
    keep_mib
        Total size in MiB beyond which the oldest files are deleted.
    queue
        Most requests waiting to be written; further ones are dropped and counted.
    queue_mib
        Most MiB waiting to be written.
    max_text_kib
        Longest text to record, in KiB: a longer request body or raw response is left out of the record.
    hash_salt
        Secret salt of the hashes. Null generates one at each start; hashes of different runs then cannot be compared.
    tokenizer
        The model's `tokenizer.json`, or its folder, to hash the model's tokens. Null hashes words, numbers and
        punctuation instead.
    """

    key = "recorder"

    path: Path
    text: Literal["none", "hashes", "full"] = "none"
    sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    compression: Literal["zstd", "none"] = "zstd"
    flush_s: Seconds = 1.0
    rotate_mib: Annotated[float, Field(gt=0)] = 256.0
    rotate_s: Seconds = 3600.0
    keep_s: Seconds | None = None
    keep_mib: Annotated[float, Field(gt=0)] | None = None
    queue: Count = 10000
    queue_mib: Annotated[float, Field(gt=0)] = 64.0
    max_text_kib: Annotated[float, Field(gt=0)] = 1024.0
    hash_salt: Secret = None
    tokenizer: Path | None = None

    def salted(self) -> RecorderSettings:
        """Return the settings with a random salt if hashes need one and none is set; a gateway's workers share it."""
        if self.text != "hashes" or self.hash_salt is not None:
            return self
        return self.model_copy(update={"hash_salt": SecretStr(secrets.token_hex(32))})

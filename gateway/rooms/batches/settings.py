"""The section `batches`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from gateway.config.settings.base import Count, Section


class BatchesSettings(Section):
    """Files and batches of OpenAI's batch API. Changes need a restart.

    Parameters
    ----------
    folder
        Where they are kept. Of several gateways with one folder, the one that holds its lock (`flock`) runs the
        batches.
    max_file_mib
        Largest file that may be uploaded, in MiB; `server.max_body_mib` has to allow it.
    max_lines
        Most lines of a batch.
    max_files_per_key
        Most files that a key may have, including those of its answers; further ones are refused.
    max_batches_per_key
        Most batches of a key that have not ended; further ones are refused.
    max_total_mib
        Most MiB of all keys together; beyond it, uploads are refused and no line begins.
    max_in_flight
        Most lines in flight at once for each replica of a model, from each process.
    """

    key = "batches"

    folder: Path
    max_file_mib: Annotated[float, Field(gt=0)] = 32.0
    max_lines: Count = 50_000
    max_files_per_key: Count = 1000
    max_batches_per_key: Count = 100
    max_total_mib: Annotated[float, Field(gt=0)] = 10_240.0
    max_in_flight: Count = 128

"""The section `picker`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from gateway.config.settings.base import Settings
from gateway.config.settings.keys import checked_address


class PickerTlsSettings(Settings):
    """Files in PEM, read again when they change.

    Parameters
    ----------
    certificate
        The certificate that the picker shows, with what leads to its authority.
    key
        Its private key.
    """

    certificate: Path
    key: Path


class PickerSettings(Settings):
    """What `gateway picker` serves to a proxy such as Envoy.

    Parameters
    ----------
    listen
        Host and port for gRPC.
    fallbacks
        How many further endpoints a proxy is told, for the case that it cannot reach the chosen one.
    answers
        Share of the answers that a policy which learns is to see, from 0 to 1. What records or counts requests sees all
        of them.
    tls
        The certificate for gRPC; null for clear text.

    Examples
    --------
    >>> PickerSettings().listen
    '127.0.0.1:9002'
    """

    listen: Annotated[str, AfterValidator(checked_address)] = "127.0.0.1:9002"
    fallbacks: Annotated[int, Field(ge=0, le=16)] = 2
    answers: Annotated[float, Field(ge=0, le=1)] = 1.0
    tls: PickerTlsSettings | None = None

"""The section `picker`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from gateway.config.settings.base import Section
from gateway.config.settings.keys import checked_address
from gateway.config.settings.server import TlsSettings


class PickerSettings(Section):
    """What `gateway picker` serves to a proxy such as Envoy.

    Parameters
    ----------
    listen
        Host and port for gRPC.
    tls
        TLS, which some gateways of Kubernetes expect. Replaced files are read again.
    fallbacks
        How many more endpoints a proxy gets, in case it cannot reach the chosen one.
    answers
        Share of the answers, from 0 to 1, that a learning policy sees. Whatever records or counts requests sees all of
        them.

    Examples
    --------
    >>> PickerSettings().listen
    '127.0.0.1:9002'
    """

    key = "picker"

    listen: Annotated[str, AfterValidator(checked_address)] = "127.0.0.1:9002"
    tls: TlsSettings | None = None
    fallbacks: Annotated[int, Field(ge=0, le=16)] = 2
    answers: Annotated[float, Field(ge=0, le=1)] = 1.0

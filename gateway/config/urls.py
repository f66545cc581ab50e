"""Addresses of replicas in the pool file."""

from __future__ import annotations

from urllib.parse import urlsplit

_EXPECTED = "expected http://host:port, https://host:port or unix:/path/to.sock"


def address(url: str) -> str:
    """Return `url` in canonical form: lower case, without a trailing slash or the scheme's default port.

    Examples
    --------
    >>> address("HTTP://Host:80/")
    'http://host'
    >>> address("unix:///run/vllm.sock")
    'unix:/run/vllm.sock'
    """
    if url.startswith("unix:"):
        path = url.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise ValueError("a Unix socket needs an absolute path: unix:/path/to.sock")
        return f"unix:{path}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(_EXPECTED) from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0 or any(c.isspace() for c in url):
        raise ValueError(_EXPECTED)
    if parts.username is not None:
        raise ValueError("must have no user or password: set api_key instead")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError("must have no path, not even /v1: the gateway adds it; " + _EXPECTED)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    default = {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{host}" + (f":{port}" if port not in {None, default} else "")

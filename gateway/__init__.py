"""The service: an OpenAI-compatible endpoint in front of a pool of unlike vLLM replicas."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("speculation-gateway")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0"

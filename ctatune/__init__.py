"""ctatune: the fastest way to run a two-layer MLP on several NVIDIA GPUs of one machine."""

from importlib.metadata import PackageNotFoundError, version

from ctatune.choice import Choice, best
from ctatune.errors import NoAnswer

try:
    __version__ = version("ctatune")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+checkout"

__all__ = ["Choice", "NoAnswer", "__version__", "best"]

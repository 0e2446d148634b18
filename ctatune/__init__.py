"""ctatune: the fastest way to run a two-layer MLP on several NVIDIA GPUs of one machine."""

from typing import TYPE_CHECKING, Any

from ctatune.answers import best, refresh
from ctatune.errors import CtatuneError, DeviceError, NoAnswer, UsageError

if TYPE_CHECKING:
    from ctatune.choice import Choice
    from ctatune.mlp import Mlp

    __version__: str

__all__ = [
    "Choice",
    "CtatuneError",
    "DeviceError",
    "Mlp",
    "NoAnswer",
    "UsageError",
    "__version__",
    "best",
    "refresh",
]


def __getattr__(name: str) -> Any:
    """What costs time to import comes when it is asked for."""
    if name == "Choice":
        from ctatune.choice import Choice

        return Choice
    if name == "Mlp":
        from ctatune.mlp import Mlp

        return Mlp
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("ctatune")
        except PackageNotFoundError:  # a checkout that is not installed
            return "0+checkout"
    raise AttributeError(f"module 'ctatune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

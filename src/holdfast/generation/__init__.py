"""Text from a trained model: loading it, a static key/value cache, sampling."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.generation.engine import Completion as Completion
    from holdfast.generation.engine import generate as generate

__all__ = ["Completion", "generate"]


def __getattr__(name: str) -> Any:
    """The engine needs torch; `holdfast generate --help` does not wait for it."""
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.generation' has no attribute '{name}'")
    from holdfast.generation import engine

    return getattr(engine, name)

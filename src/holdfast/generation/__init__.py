"""Text from a trained model: loading it, a static key/value cache, sampling."""

from typing import TYPE_CHECKING

from holdfast.system.lazy_names import lazy_names

if TYPE_CHECKING:
    from holdfast.generation.engine import Completion as Completion
    from holdfast.generation.engine import generate as generate

__all__ = ["Completion", "generate"]
# The engine needs torch; `holdfast generate --help` does not wait for it.
__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "holdfast.generation.engine"))

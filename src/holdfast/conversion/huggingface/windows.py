"""sliding_window and layer_types of a config.json ↔ window_size and window_attn_skip_freq of Architecture.

sliding_window counts the token itself, window_size the tokens before it.
"""

from collections.abc import Mapping
from typing import Any

from holdfast.conversion.huggingface.families import ModelClass
from holdfast.conversion.model import Architecture, read_size
from holdfast.system.errors import HoldfastError

SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT_WINDOW = 4096
"""sliding_window where the key is absent."""
DEFAULT_FIRST = 28
"""max_window_layers, the number of layers before the first one with a window, where the key is absent."""


def window_fields(config: Mapping[str, Any], family: ModelClass, layers: int, origin: str) -> dict[str, Any]:
    """The fields of Architecture that the keys describe."""
    size = config.get("sliding_window", DEFAULT_WINDOW)
    if family.window is None or (family.window == "switched" and config.get("use_sliding_window") is not True):
        size = None
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [FULL] * layers if size is None and family.window != "alternating" else _usual(config, family, layers)
    allowed = [FULL] if size is None else [SLIDING] if family.window == "all" else [FULL, SLIDING]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in allowed for kind in kinds):
        usual = " or ".join(allowed)
        raise HoldfastError(f"{origin}: layer_types other than {usual} in all {layers} layers cannot be converted")
    if SLIDING not in kinds:
        return {}
    size = read_size({"sliding_window": size}, "sliding_window", f"{origin}: ")
    return {"window_size": (size - 1, 0), "window_attn_skip_freq": _skip([kind == SLIDING for kind in kinds])}


def _usual(config: Mapping[str, Any], family: ModelClass, layers: int) -> list[str]:
    """layer_types where the key is absent."""
    if family.window == "alternating":
        return [FULL if number % 2 else SLIDING for number in range(layers)]
    first = config.get("max_window_layers", DEFAULT_FIRST) if family.window == "switched" else 0
    return [SLIDING if type(first) is int and number >= first else FULL for number in range(layers)]


def _skip(windowed: list[bool]) -> tuple[int, ...]:
    """window_attn_skip_freq in its shortest form."""
    if all(windowed):
        return ()
    for every in range(1, len(windowed) + 1):
        if windowed == [(number + 1) % every != 0 for number in range(len(windowed))]:
            return (every,)
    return tuple(map(int, windowed))


def window_keys(arch: Architecture, family: ModelClass) -> dict[str, Any]:
    """The keys of config.json for the windows of an architecture, as far as the class has them."""
    kinds = [SLIDING if arch.layer_window(number) else FULL for number in range(arch.num_layers)]
    size = arch.window_size[0] + 1 if SLIDING in kinds else None
    if family.window is None:
        return {}
    if family.window == "all":
        return {"sliding_window": size}
    if family.window == "alternating":
        return {"sliding_window": size or DEFAULT_WINDOW, "layer_types": kinds}
    if size is None:
        return {"use_sliding_window": False}
    first = kinds.index(SLIDING)
    return {"use_sliding_window": True, "sliding_window": size, "max_window_layers": first, "layer_types": kinds}

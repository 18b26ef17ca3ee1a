"""Opens a page in the user's browser, where there is a desktop."""

import os
import sys

from holdfast.system.progress import log


def open_in_browser(address: str) -> bool:
    """Opens the address, or says that there is no desktop. A browser of the terminal is not started: it shows no curves."""
    import webbrowser

    desktop = sys.platform == "darwin" or any(os.environ.get(key) for key in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    if desktop and webbrowser.open(address):
        return True
    log(f"found no desktop browser on this machine; open the page yourself: {address}")
    return False

"""For the whole suite."""

import signal

# A suite that was started in the background may have inherited that Ctrl-C is ignored, and so would every program it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""`holdfast generate --interactive` on a terminal: Ctrl-C ends a text, Ctrl-D the program."""

import os
import pty
import signal
import subprocess
import sys
import time


class Terminal:
    """The program on a pseudo-terminal."""

    def __init__(self, *arguments):
        self._master, side = pty.openpty()
        command = [sys.executable, "-m", "holdfast.cli", *arguments]
        self.process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, start_new_session=True)
        os.close(side)
        os.set_blocking(self._master, False)

    def type(self, text):
        os.write(self._master, text)

    def read_until(self, wanted, seconds=120):
        found, deadline = b"", time.monotonic() + seconds
        while not wanted(found):
            assert time.monotonic() < deadline, f"not seen; the terminal shows {found[-300:]!r}"
            try:
                found += os.read(self._master, 65536)
            except BlockingIOError:
                time.sleep(0.02)
        return found


def test_ctrl_c_ends_a_text_and_not_the_program_and_ctrl_d_ends_it(gpt2):
    long = ["--max-new-tokens", "1000000", "--sliding-window", "--temperature", "0"]
    terminal = Terminal("generate", str(gpt2.run), "--interactive", *long)
    try:
        for prompt in (b"fox\n", b"the lazy\n"):
            terminal.read_until(lambda shown: shown.endswith(b"> "))
            terminal.type(prompt)
            terminal.read_until(lambda shown: len(shown) > 200)  # the text appears while it is written
            os.kill(terminal.process.pid, signal.SIGINT)
        terminal.read_until(lambda shown: shown.endswith(b"> "))
        os.kill(terminal.process.pid, signal.SIGINT)  # at the prompt
        terminal.read_until(lambda shown: shown.endswith(b"> "))
        terminal.type(b"\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()

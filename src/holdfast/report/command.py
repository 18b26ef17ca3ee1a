"""`holdfast report RUN`."""

from pathlib import Path
from typing import Annotated

import tyro


def report_command(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    output: Path | None = None,
    open: bool = False,
) -> None:
    """Draws a run as one HTML page: loss, learning rate, throughput, snapshots, failures and resumes, checkpoints.

    The page needs nothing but itself, so it can be mailed or attached. A run that is still going on may be drawn at any time.

    Examples:

      holdfast report runs/first
      holdfast report runs/first --output first.html --open

    Args:
        run: Run folder (what --save named).
        output: File to write. Unset: report.html in the run folder.
        open: Show the page in the browser.
    """
    from holdfast.publish import publish_text
    from holdfast.report.page import render
    from holdfast.report.reading import read_run

    page = render(read_run(run))
    path = output or run / "report.html"
    publish_text(path, page)
    print(path)
    if open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())

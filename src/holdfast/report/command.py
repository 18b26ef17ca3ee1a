"""The verb `report`."""

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.command_line.flags import positional
from holdfast.command_line.results import print_result
from holdfast.system.errors import HoldfastError, UsageError


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Draw runs as one HTML page: curves, goodput, snapshots, failures and resumes, checkpoints, configuration.

    Several runs are drawn over each other, with the differences of their configurations. The page is one file that loads nothing
    else, so it can be mailed or attached. The runs may still be running; with --watch the page follows them.

    Examples:

      holdfast report runs/first
      holdfast report runs/first runs/second --output both.html --open
      holdfast report runs/first --watch --port 8765
      ssh -L 8765:127.0.0.1:8765 HOST    # on the laptop; then open the address
      holdfast report runs/first --png --output first.png
    """

    runs: tuple[Path, ...] = field(default=(), metadata=positional("RUN"))
    """Run folders (--save of train)."""
    output: Path | None = None
    """File to write. Unset: report.html, or report.png, in the folder of the first run."""
    png: bool = False
    """Draw a picture of the main curves instead of the page. Needs matplotlib: pip install 'holdfast[png]'."""
    watch: bool = False
    """Serve the page on 127.0.0.1 and update it while the runs train, until Ctrl-C."""
    port: int = 0
    """Port of --watch. 0: a free one."""
    open: bool = False
    """Open the page in the browser of this desktop."""
    json: bool = False
    """Print the path, or the address of --watch, as JSON."""


def report_command(options: ReportOptions) -> None:
    if not options.runs:
        raise UsageError("give one or several run folders, such as: holdfast report runs/first")
    if options.watch and (options.output or options.png):
        raise UsageError("--watch writes no file: leave out --output and --png")
    if options.port and not options.watch:
        raise UsageError("--port is the port of --watch: add --watch, or leave it out")
    from holdfast.report.run_record import read_run

    runs = [read_run(path) for path in options.runs]
    if options.watch:
        from holdfast.report.live_server import serve

        serve(options.runs, options.port, options.open, options.json)
        return
    path = options.output or options.runs[0] / ("report.png" if options.png else "report.html")
    try:
        if options.png:
            from holdfast.report.picture import draw_picture

            draw_picture(runs, path)
        else:
            from holdfast.report.page import render
            from holdfast.system.atomic_files import publish_text

            publish_text(path, render(runs))
    except HoldfastError as error:  # the folder of another user's run may not be written
        raise error if options.output else HoldfastError(f"{error}, with --output FILE") from None
    print_result({"path": str(path)}, str(path), options.json, indent=False)
    if options.open:
        from holdfast.system.desktop import open_in_browser

        open_in_browser(path.resolve().as_uri())

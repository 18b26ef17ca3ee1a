"""The verb `report`."""

from dataclasses import dataclass, field
from pathlib import Path

from holdfast.command_line.flags import positional
from holdfast.command_line.results import print_result


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Draw a run as one HTML page: loss, learning rate, throughput, snapshots, failures and resumes, checkpoints.

    The page is one file that loads nothing else, so it can be mailed or attached. The run may still be running.

    Examples:

      holdfast report runs/first
      holdfast report runs/first --output first.html --open
    """

    run: Path = field(metadata=positional())
    """The run folder (--save of train)."""
    output: Path | None = None
    """File to write. Unset: report.html in the run folder."""
    open: bool = False
    """Open the page in the browser."""
    json: bool = False
    """Print the path of the page as JSON."""


def report_command(options: ReportOptions) -> None:
    from holdfast.report.page import render
    from holdfast.report.run_record import read_run
    from holdfast.system.atomic_files import publish_text

    page = render(read_run(options.run))
    path = options.output or options.run / "report.html"
    publish_text(path, page)
    print_result({"path": str(path)}, str(path), options.json, indent=False)
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())

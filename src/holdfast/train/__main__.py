"""`python -m holdfast.train`: one rank, started by the supervisor or by torchrun."""

import gc
import os
import signal
import sys

from holdfast.system.errors import REFUSED, HoldfastError, UsageError
from holdfast.system.progress import log
from holdfast.train.timeline import StartTimeline


def main() -> None:
    """Runs the rank; errors end the process with a message and the exit code of the CLI."""
    timeline = StartTimeline()
    supervised = "HOLDFAST_SUPERVISED" in os.environ
    if supervised:
        from holdfast.train.rank_log import redirect_output

        redirect_output()  # before torch is imported
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the supervisor starts ranks with its signals blocked
    try:
        _run_supervised(timeline) if supervised else _run_under_torchrun(timeline)
    except HoldfastError as error:
        log(f"holdfast: error: {error}")
        os._exit(2 if isinstance(error, UsageError) else 1)
    except RuntimeError as error:
        if not str(error).startswith(REFUSED):
            _fail()
        if not supervised:  # the supervisor reports it once for all ranks
            log(f"holdfast: error: {str(error).removeprefix(REFUSED)}")
        os._exit(1)
    except Exception:
        _fail()


def _fail() -> None:
    sys.excepthook(*sys.exc_info())
    # At once: torch's communication threads may abort an interpreter that ends in the middle of a collective.
    os._exit(1)


def _run_supervised(timeline: StartTimeline) -> None:
    """The supervisor has checked the configuration, chosen vocab_size and opened the run folder."""
    gc.disable()  # full collections are a sixth of the time that the imports take
    from holdfast.train.checks.preflight import resolve
    from holdfast.train.command import parse
    from holdfast.train.worker import run_worker

    gc.freeze()
    gc.enable()
    timeline.mark("imports")
    config, _ = resolve(parse(sys.argv[1:]).config, int(os.environ["WORLD_SIZE"]), vocab_size_given=True)
    timeline.mark("configuration")
    run_worker(config, timeline)


def _run_under_torchrun(timeline: StartTimeline) -> None:
    """Rank 0 checks the data and opens the run folder."""
    from holdfast.train.checks.host import check_memory
    from holdfast.train.checks.preflight import check_data, resolve
    from holdfast.train.command import parse, refuse_other_format
    from holdfast.train.run_folder.opening import open_run_folder
    from holdfast.train.worker import run_worker

    options = parse(sys.argv[1:])
    config, _ = resolve(options.config, int(os.environ.get("WORLD_SIZE", "1")), options.vocab_size_given)
    if config.train.save and os.environ.get("LOCAL_RANK", "0") == "0":
        for warning in check_memory(config.snapshot.snapshot_dir):
            log(warning)
    if os.environ.get("RANK", "0") != "0":
        run_worker(config, timeline)
        return
    if config.parallel.standby:
        log("warning: --standby has no effect under torchrun, which starts the ranks itself; use holdfast train")
    check_data(config, options.force)
    refuse_other_format(config)
    with open_run_folder(config) as config:
        run_worker(config, timeline)


if __name__ == "__main__":
    main()

"""The verb `convert`."""

from holdfast.conversion.options import ConvertOptions


def convert(options: ConvertOptions) -> None:
    from holdfast.conversion.converting import run_conversion
    from holdfast.system.progress import log

    report = run_conversion(options.source, options.destination, options.to, options)
    log(f"{options.source}: {report.source}")
    for note in report.notes:
        log(f"note: {note}")
    if report.verification is not None:
        log(f"verified: {report.verification['summary']}")
    if options.json:
        import orjson

        print(orjson.dumps(vars(report) | {"destination": str(report.destination)}).decode())
    else:
        print(report.destination)

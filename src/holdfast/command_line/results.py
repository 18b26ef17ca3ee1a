"""How verbs print their results: text, or JSON with --json."""


def print_result(value: object, text: str, as_json: bool, indent: bool = True) -> None:
    """Prints the result of a verb on stdout: `value` as JSON, or `text`."""
    if as_json:
        print_json(value, indent)
    else:
        print(text.removesuffix("\n"))


def print_json(value: object, indent: bool = True) -> None:
    import orjson

    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    print(orjson.dumps(value, option=option).decode(), flush=True)

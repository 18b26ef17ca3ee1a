"""How verbs print results for programs (--json)."""


def print_json(value: object, indent: bool = True) -> None:
    """Prints a value as JSON on stdout."""
    import orjson

    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | (orjson.OPT_INDENT_2 if indent else 0)
    print(orjson.dumps(value, option=option).decode(), flush=True)

"""`capplan schema`: the JSON Schema of scenario files."""

from capplan.cli.output import write


def schema() -> int:
    """The JSON Schema of scenario files, for editors: they complete keys and mark errors by it.

    Example: capplan schema > scenarios/scenario.schema.json
    """
    from capplan.schema import schema_text

    write(schema_text())
    return 0

"""Bodies of the command-line verbs; `core/cli.py` parses and dispatches."""

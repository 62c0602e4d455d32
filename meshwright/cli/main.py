"""The `meshwright` command: runs a verb, and turns user errors into one line and exit code 2.

Verbs are imported inside `main`, so that Ctrl-C during these imports ends with one line too.
"""

from __future__ import annotations

import gc
import sys

from meshwright.errors import MeshwrightError

EXTRA = frozenset({"torch", "transformers", "safetensors", "numpy"})
"""Packages that come with the extra `hf`: inspect, verify, train and measure need them."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells."""


def main() -> None:
    """Runs a verb."""
    gc.disable()  # a verb is short and makes no cycles: the collector would only scan its objects, and once more at exit
    try:
        from meshwright.cli._verbs import command_line

        command_line(sys.argv[1] if len(sys.argv) > 1 else "")()
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRA:
            raise
        sys.stderr.write(f"error: this needs {missing}, which is not installed\n  try: pip install 'meshwright[hf]'\n")
        sys.exit(2)
    except KeyboardInterrupt:
        _say_interrupted()
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer turns Ctrl-C into this
            _say_interrupted()
        raise
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    finally:
        gc.freeze()


def _say_interrupted() -> None:
    """Ends the line of a user who pressed Ctrl-C.

    If it came inside an `exec`, which dataclasses use, CPython remembers it and ends the process by the signal instead of with
    the exit code. The next `exec` makes it forget.
    """
    exec("")
    sys.stderr.write("interrupted\n")


if __name__ == "__main__":
    main()

"""The `meshwright` command: collects the verbs, and turns what users can mend into one line and exit code 2."""

from __future__ import annotations

import gc
import sys

import typer

from meshwright.cli import check, compare, inspect, show, simulate, train, verify
from meshwright.errors import MeshwrightError

app = typer.Typer(
    help="Plan, prove, simulate and run multi-dimensional parallel training of ordinary PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("show")(show.show)
app.command("check")(check.check)
app.command("simulate")(simulate.simulate)
app.command("compare")(compare.compare)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("train", context_settings=train.CONTEXT)(train.train)

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""


def main() -> None:
    """Run a verb; what it prints is its answer, its exit code the short form."""
    gc.disable()  # a verb is short and what it makes has no cycles: the collector would only walk it, and at exit once more
    try:
        app()
    except MeshwrightError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # what typer makes of Ctrl-C
            sys.stderr.write("interrupted\n")
        raise
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    finally:
        gc.freeze()


if __name__ == "__main__":
    main()

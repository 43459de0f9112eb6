"""`halfbyte finish`: close a conversion whose ranks have all done their share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.checkpoint.execute.pool import Event
from halfbyte.checkpoint.execute.ranked import finish_ranks
from halfbyte.cli.app import app, err, out, quoted, sentence
from halfbyte.errors import HalfbyteError


@app.command(short_help="Close a conversion that ranks have written.")
def finish(
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The DST of `halfbyte convert --rank`.")],
) -> None:
    """Give the files of `halfbyte convert --rank` their final names, if the last rank did not.

    The last rank that ends does this itself, unless it was killed in between, or its file system shows the files of
    others late. Exit code 0: DST is complete. 1: an error stopped the work; the same command continues. 2: a rank is
    still running, or shards are missing; the message says whose.
    """
    began: list[Event] = []
    try:
        outcome = finish_ranks(destination, report=began.append)
    except (HalfbyteError, OSError) as error:
        err().print(f"halfbyte finish: {sentence(error)}", markup=False, soft_wrap=True)
        raise typer.Exit(1 if began else 2) from error
    if outcome.finished_before:
        out().print(f"{destination} is whole already: nothing to do", markup=False, soft_wrap=True)
        return
    line = f"{destination}: {outcome.shards_found} shards of all ranks. Next: halfbyte verify"
    out().print(f"{line} {quoted(destination)}", markup=False, soft_wrap=True)

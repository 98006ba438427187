"""Lines on stdout that never end a run: the console may have gone, or know fewer characters."""

import sys


def say(line: str) -> None:
    """Print a line at once; what the terminal cannot show is escaped.

    A closed terminal, a reader that has enough (`| head`) or a full disk behind `>` loses the line
    and nothing else.
    """
    if sys.stdout is None:  # closed before the start
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError:
        return

"""The ``forebay`` command: ``python -m forebay`` and the script that the wheel installs."""

from __future__ import annotations

import signal
import sys

from forebay import _core


def main() -> int:
    """Run the command with the arguments of this process, and return its exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["check"]:
        # The one command that needs torch.
        from forebay.check import main as check

        return check(arguments[1:])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python would notice Ctrl-C only when the command has ended. Where a shell ignores it, it stays ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    built_by = _wheel() if {"--version", "-V"} & set(arguments) else ""
    # One name in all messages, however it was started.
    return _core.command(["forebay", *arguments], built_by)


def _wheel() -> str:
    """Return the tag of the wheel that is installed, and the Python that runs it."""
    from importlib import metadata

    text = metadata.distribution("forebay").read_text("WHEEL") or ""
    tags = [line.removeprefix("Tag: ") for line in text.splitlines() if line.startswith("Tag: ")]
    return f"wheel {', '.join(tags) or 'without a tag'}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    sys.exit(main())

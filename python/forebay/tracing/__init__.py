"""``forebay.trace``: what forebay and torch do in a training run, as a file for Perfetto and chrome://tracing."""

from forebay.tracing.recording import trace

__all__ = ["trace"]

"""Steps whose updates run under backward and under the next forward; see ``overlap_step``."""

from forebay.optim.overlap.handle import OverlappedStep, overlap_step

__all__ = ["OverlappedStep", "overlap_step"]

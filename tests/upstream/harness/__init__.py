"""Runs test files of other projects against forebay. No file of those projects is in this repository."""

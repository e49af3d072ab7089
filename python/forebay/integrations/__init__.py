"""One file for each training framework. A file imports its framework when the file is imported, never before.

``import forebay`` imports none of these files, and each of them imports one framework. ``docs/integrations`` has a page
for each with the lines that a user writes.
"""

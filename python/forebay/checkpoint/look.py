"""What is in a folder of checkpoints, without a model: the last one, its contents, its checksums, its weights."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay import _core
from forebay._progress import bar
from forebay.checkpoint.arguments import check_path
from forebay.checkpoint.files import absolute
from forebay.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from forebay.checkpoint.files import StrPath


def latest(path: StrPath) -> Path | None:
    """Return the folder of the last complete checkpoint of a path; None if there is none.

    Parameters
    ----------
    path
        The path that was given to ``save``, or one numbered subfolder of it.
    """
    check_path(path)
    try:
        return Path(_core.latest_checkpoint(absolute(path)))
    except CheckpointError:
        return None
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def exists(path: StrPath) -> bool:
    """Whether a path has a complete checkpoint, so that ``load`` has something to load.

    Parameters
    ----------
    path
        The path that was given to ``save``, or one numbered subfolder of it.
    """
    return latest(path) is not None


def inspect(path: StrPath) -> dict[str, Any]:
    """Return what is in a checkpoint, without reading its tensors.

    The dict has ``path``, ``step`` (the optimizer's), ``tensor_bytes``, ``file_bytes``, ``files``, ``tensors`` (a list
    of dicts with ``name``, ``dtype``, ``shape``, ``shards``, ``bytes`` in the files, and ``format`` if it is kept in
    fewer bits), ``groups`` (of the optimizer), ``objects`` (other values, as JSON) and ``made_by``.

    Parameters
    ----------
    path
        The path that was given to ``save``, or one numbered subfolder of it.
    """
    check_path(path)
    found: dict[str, Any] = json.loads(_core.checkpoint_summary(absolute(path)))
    return found


def verify(path: StrPath, *, progress: bool | None = None) -> int:
    """Compare every checksum of a checkpoint and return how many bytes were checked.

    A damaged checkpoint raises a ``CheckpointError``, whose ``problems`` are pairs of file and reason.

    Parameters
    ----------
    path
        The path that was given to ``save``, or one numbered subfolder of it.
    progress
        Whether to draw a progress bar; by default as ``forebay.progress`` has set.
    """
    check_path(path)
    where = absolute(path)
    with bar("verifying", _bytes(where), shown=progress) as moved:
        checked, problems = _core.verify_checkpoint(where, moved)
    if problems:
        listed = "; ".join(f"{file}: {reason}" for file, reason in problems[:3])
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{where}: damaged: {listed}{more}; load an earlier checkpoint of the path", problems)
    return checked


def export_weights(path: StrPath, target: StrPath, *, progress: bool | None = None) -> Path:
    """Write a checkpoint's weights into one safetensors file, and return the file's path.

    The file has the model's parameters and buffers under the model's own names and nothing else, so ``from_pretrained``
    of transformers and other tools load it. Every checksum of the checkpoint is compared before. One process calls it.
    With ``trained_only`` checkpoints the file has what was trained.

    Parameters
    ----------
    path
        The path that was given to ``save``, or one numbered subfolder of it.
    target
        The file to write; or a folder, in which ``model.safetensors`` is written.
    progress
        Whether to draw a progress bar; by default as ``forebay.progress`` has set.
    """
    check_path(path)
    check_path(target)
    where, file = absolute(path), absolute(target)
    if file.is_dir():
        file = file / "model.safetensors"
    # Everything is read once for the checksums, and the weights once more to be copied.
    with bar("exporting", 2 * _bytes(where), shown=progress) as moved:
        _core.export_weights(where, file, moved)
    return file


def _bytes(path: Path) -> int:
    # From the manifest alone: damaged files must not end this.
    manifest = json.loads(_core.Checkpoint(path).manifest())
    return sum(int(file["bytes"]) for file in manifest["files"])

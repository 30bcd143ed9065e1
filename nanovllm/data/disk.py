"""Errors of the file system that a user can fix, and the remedy that a message names for each."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

# The first bytes of a file that gzip has compressed.
GZIP_MAGIC = b"\x1f\x8b"
# Remedies for a file that the user has named.
REMEDIES = {
    errno.ENOENT: "does the folder exist?",
    errno.ENOTDIR: "name a folder",
    errno.EACCES: "change its permissions, or name another place",
    errno.EPERM: "change its permissions, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENOSPC: "free space on the disk, or name another one",
    errno.EDQUOT: "free space on the disk, or name another one",
}
# The remedy for the files that nanovllm keeps for itself.
HOME_REMEDY = (
    "set NANOVLLM_HOME to a folder with enough space that you may write to, or free space on the "
    "disk"
)


def is_full(text: str) -> bool:
    """Return True if the message of a program or library says that the disk is full."""
    return os.strerror(errno.ENOSPC) in text


def full_disk(path: str | Path) -> OSError:
    """Return the error of a full disk for a path."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Remove a file that was written in part only, and name it in errors that name no file.

    Args:
        path: the file, or the folder of several files, which is not removed.

    Raises:
        OSError: as raised inside, with a file name.
    """
    try:
        yield
    except BaseException as error:  # Ctrl-C, too
        if path.is_file():  # not a device or a pipe
            path.unlink()
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise

"""One job at a time in a run's directory.

A POSIX record lock: the kernel (on NFS the server) drops it when its process ends,
however it ends, and children that outlive a killed rank do not keep it.  The file's text
says who holds it, for the message, and for telling a clean end from a crash.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from pdmpi.errors import InputError

__all__ = ["RunLock"]


class RunLock:
    """Holds a run's directory until `release`, or the end of the process.

    Parameters
    ----------
    run_dir
        The run's directory; made if it is missing.
    job
        Batch job's id, empty outside of one.
    wait_s
        How long to wait for another holder to go: a killed client's lock lives on an NFS
        server for as long as its lease.
    notice
        Called with one line when a lock is recovered.

    Raises
    ------
    InputError
        Another job holds it (the message says which), or the directory cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        job: str = "",
        wait_s: float = 0.0,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path = run_dir / "lock"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(
                f"run directory {run_dir} cannot be written ({error.strerror}); choose another --run-dir"
            ) from None
        try:
            locked = self._acquire(time.monotonic() + wait_s)
            previous = self._holder()
            if not locked:
                self._refuse_unless_gone(previous)
        except BaseException:
            os.close(self._file)
            raise
        if previous:
            notice(f"recovered the lock of {_who(previous)}, which ended without releasing it")
        me = {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since_unix_s": time.time()}
        try:
            self._write(json.dumps(me).encode() + b"\n")
        except OSError as error:
            os.close(self._file)
            raise InputError(f"run directory {run_dir} cannot be written ({error.strerror})") from None

    def release(self) -> None:
        """Let the next job in."""
        if self._file >= 0:
            self._write(b"")
            os.close(self._file)
            self._file = -1

    def _acquire(self, deadline: float) -> bool:
        """Take the lock; False where the file system has no locks."""
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    return False
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise InputError(f"{self._path} cannot be locked: {error.strerror}") from None
                if time.monotonic() >= deadline:
                    holder = self._holder()
                    raise InputError(
                        f"run directory {self._path.parent} is in use by {_who(holder)};"
                        " wait for it to end, or choose another --run-dir"
                    ) from None
            time.sleep(0.2)

    def _refuse_unless_gone(self, holder: dict[str, str]) -> None:
        """Without locks of the file system, only a process of this host can be known to have ended."""
        if not holder:
            return
        if holder.get("host") == socket.gethostname() and not Path(f"/proc/{holder.get('pid')}").exists():
            return
        raise InputError(
            f"run directory {self._path.parent} may be in use by {_who(holder)}, and its file system has no"
            f" locks to tell; if that job has ended, remove {self._path}"
        )

    def _holder(self) -> dict[str, str]:
        try:
            found = json.loads(os.pread(self._file, 4096, 0))
        except ValueError:
            return {}
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    def _write(self, text: bytes) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text, 0)
        os.fsync(self._file)


def _who(holder: dict[str, str]) -> str:
    job = f"job {holder['job']}, " if holder.get("job") else ""
    return f"{job}process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"

"""Follow files that other processes append to."""

from __future__ import annotations

from pathlib import Path


class LineFollower:
    """Lines appended to a file since the last call, the first of them behind `offset` bytes. A line is given once it is
    complete; the file may not exist yet."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._partial = b""

    def read_lines(self, *, final: bool = False) -> list[str]:
        """New complete lines; with `final`, an unfinished last line as well."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                added = stream.read()
        except FileNotFoundError:
            return []
        self._offset += len(added)
        *complete, self._partial = (self._partial + added).split(b"\n")
        if final and self._partial:
            complete.append(self._partial)
            self._partial = b""
        return [line.decode(errors="replace").rstrip("\r") for line in complete]

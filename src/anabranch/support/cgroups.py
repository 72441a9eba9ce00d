"""Control groups (cgroups) of this process, version 1 or 2: the folders in which Linux shows their limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["control_groups", "lines_of"]


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """The version and the folder of each control group that may limit this process, parents included.

    controller  "memory" or "cpu"
    root        the folder of proc and sys
    """
    paths = {}
    for line in lines_of(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controller in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for line in lines_of(root / "proc/self/mountinfo"):
        here, _, mounted = line.partition(" - ")
        top, place = (field.replace("\\040", " ") for field in here.split()[3:5])
        kind, *_, options = mounted.split()
        if kind not in paths or (kind == "cgroup" and controller not in options.split(",")):
            continue
        mount, own = root / place.lstrip("/"), Path(paths[kind])
        # in a container a path may be that of the host, of which only the part below ``top`` is mounted
        inside = own.relative_to(top) if own.is_relative_to(top) else Path(*(p for p in own.parts[1:] if p != ".."))
        folder = mount / inside
        for each in (folder, *folder.parents):
            yield 2 if kind == "cgroup2" else 1, each
            if each == mount:
                break


def lines_of(path: Path) -> list[str]:
    """The lines of a file of the system; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

"""Tar archives for tests."""

import io
import tarfile


def write_tar(path, members, form=tarfile.PAX_FORMAT):
    """An archive of pairs (name, content), or of TarInfos."""
    with tarfile.open(path, "w", format=form) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            name, content = member
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path

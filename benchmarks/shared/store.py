"""An object store in a process of its own: serves files after a planted latency, at a limited rate."""

import contextlib
import subprocess
import sys
from pathlib import Path


@contextlib.contextmanager
def served(folder, latency_ms, connection_mb_s, prefix=""):
    """Yield the address of a server whose objects are the files of a folder."""
    command = [sys.executable, __file__, folder, prefix, str(latency_ms / 1e3), str(connection_mb_s * 1e6)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def main(folder, prefix, latency_s, bytes_s):
    """Serve until the standard input ends."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from store_server import etag, serving

    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    objects = {str(Path("/", prefix, path.relative_to(folder))): path.read_bytes() for path in files}
    with serving(objects) as store:
        for data in store.objects.values():
            etag(data)  # computed once
        store.latency_s, store.bytes_s = float(latency_s), float(bytes_s) or None
        print(store.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

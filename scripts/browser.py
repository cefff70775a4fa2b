"""A Chromium without a window, driven over its DevTools protocol."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-prefers-reduced-motion",
)


def find():
    """Return the path of an installed Chromium, or stop with what to install."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        sys.exit(
            "`make look` opens every page in Chromium, which was not found. Install it (on Debian: apt install "
            f"chromium), or put one of these on the PATH: {', '.join(NAMES)}."
        )
    return found


class Page:
    """One page of a browser: `open` an address, `width` it, ask it by `run`.

    Messages are JSON, each ended by a zero byte. Chromium reads them from file descriptor 3 and answers on 4.
    """

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self._send = os.pipe()
        self._receive, answers = os.pipe()
        command = [find(), *OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"]
        # A shell puts the ends of the pipes where Chromium looks for them.
        script = f'exec "$@" 3<&{theirs} 4>&{answers}'
        self._process = subprocess.Popen(
            ["sh", "-c", script, "sh", *command], pass_fds=(theirs, answers), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(answers)
        self._numbers, self._unread, self._session = itertools.count(1), b"", None
        target = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")
        return self

    def __exit__(self, *_):
        os.close(self._send)
        os.close(self._receive)
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    def open(self, address, scheme="light"):
        """Load a page and everything in it."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self._call("Page.navigate", address=None, url=address)
        self._until(lambda message: message.get("method") == "Page.loadEventFired")

    def size(self, width, height=900):
        """Give the window a size in pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script):
        """Return what a JavaScript expression gives, after the page was laid out."""
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        found = self._call(
            "Runtime.evaluate", expression=f"{frames}.then(() => ({script}))", awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def _call(self, method, **values):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": {k: v for k, v in values.items() if v is not None}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda message: message.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _until(self, wanted):
        while True:
            while b"\0" not in self._unread:
                if not (more := os.read(self._receive, 1 << 20)):
                    raise RuntimeError(f"Chromium ended with exit status {self._process.wait()}")
                self._unread += more
            first, self._unread = self._unread.split(b"\0", 1)
            if wanted(message := json.loads(first)):
                return message

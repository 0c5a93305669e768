"""What the Python tests of a running daemon share: a folder, tests with a daemon of their own and with a common one, figures."""
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback

BUILD = os.environ.get("top_builddir", os.getcwd())
SANITIZED = os.environ.get("SKVD_SANITIZED", "") != "" or os.environ.get("SKVD_VALGRIND", "") != ""

tmp = tempfile.mkdtemp(prefix="skvd-test-")
counter = 0
alone = set()


def own(f):
    """This test starts its own daemon."""
    alone.add(f.__name__)
    return f


def number():
    global counter
    counter += 1
    return counter


def rss_kb(d):
    with open("/proc/%d/status" % d.p.pid) as f:
        return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))


def http_get(where, path="/metrics"):
    """The whole answer of a daemon's --metrics: where is a socket's path, or a host and a port."""
    with socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET) as s:
        s.settimeout(5)
        s.connect(where)
        s.sendall(b"GET %s HTTP/1.0\r\n\r\n" % path.encode())
        return b"".join(iter(lambda: s.recv(65536), b"")).decode()


def run(tests, start, healthy):
    """Run (name, function) pairs, those without a daemon of their own against one that start() gives; healthy(d) looks at it after
    each. A test that can't run here returns why."""
    only = [a[2:] for a in sys.argv[1:] if a.startswith("-k")]
    tests = [(n, f) for n, f in tests if not only or any(k in n for k in only)]
    shared = start()
    passed = failed = skipped = 0
    for name, f in tests:
        began = time.time()
        try:
            if name in alone:
                why = f()
            else:
                why = f(shared)
                healthy(shared)
            if why:
                skipped += 1
                print("skip", name, why)
            else:
                passed += 1
        except Exception:
            failed += 1
            print("FAIL", name)
            traceback.print_exc(file=sys.stdout)
            if name not in alone:
                print(shared.log()[-3000:])
                shared.stop(signal.SIGKILL)
                shared = start()
        if "-v" in sys.argv:
            print("%6.2f s %s" % (time.time() - began, name))
        sys.stdout.flush()
    rc = shared.stop()
    if rc != 0:
        failed += 1
        print("FAIL the shared daemon exits with", rc, shared.log()[-3000:])
    shutil.rmtree(tmp, ignore_errors=True)
    print("%d passed, %d failed" % (passed, failed) + (", %d skipped" % skipped if skipped else ""))
    return 1 if failed else 0

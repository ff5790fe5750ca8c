"""An HTTP proxy in front of a server that lets requests fail, as networks do.

The faults of a request: an answer of '503', '429' or '403'; the connection is 'reset'
before the server sees the request; or its answer is 'lost', so that the client does not
know its effect; or nothing comes for a while ('slow').
"""

import contextlib
import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Callable

SLOW = 1.5  # seconds


class Proxy(http.server.ThreadingHTTPServer):
  """Attributes: requests, (range, fault) so far; fault(n, method, path) -> one or None."""

  daemon_threads = True
  request_queue_size = 256

  def __init__(self, upstream: str, port: int):
    self.upstream = upstream.removeprefix('http://')
    self.requests: list[tuple[str | None, str | None]] = []
    self.lost: dict[str, tuple] = {}  # answers to parts of uploads, by address
    self.fault: Callable = lambda n, method, path: None
    self._lock = threading.Lock()
    super().__init__(('127.0.0.1', port), _Handler)

  def next_fault(self, method, path, headers) -> str | None:
    with self._lock:
      fault = self.fault(len(self.requests), method, path)
      self.requests.append((headers.get('Range'), fault))
    return fault

  def handle_error(self, request, client_address):
    """Prints nothing about broken connections."""


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'

  def setup(self):
    super().setup()
    self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._up = http.client.HTTPConnection(self.server.upstream, timeout=60)

  def finish(self):
    self._up.close()
    super().finish()

  def log_message(self, *_):
    pass

  def _handle(self):
    body = self._body()
    fault = self.server.next_fault(self.command, self.path, self.headers)
    if fault == 'reset':
      return self._reset()
    if fault == 'slow':
      time.sleep(SLOW)
    if fault in ('503', '429', '403'):
      return self._answer(int(fault), [], b'{"error": {"code": %s}}' % fault.encode())
    if answer := self.server.lost.pop(self.path, None):
      return self._answer(*answer)
    hop = ('connection', 'transfer-encoding', 'content-length', 'accept-encoding')
    headers = {k: v for k, v in self.headers.items() if k.lower() not in hop}
    self._up.request(self.command, self.path, body, headers)
    answer = self._up.getresponse()
    data = answer.read()
    headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in hop]
    if fault == 'lost':
      if 'upload_id=' in self.path:
        # The real service answers a part of an upload that is complete as it did before;
        # fake-gcs-server has forgotten it.
        self.server.lost[self.path] = answer.status, headers, data
      return self._reset()
    return self._answer(answer.status, headers, data)

  do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _handle

  def _body(self) -> bytes:
    if self.headers.get('Transfer-Encoding', '').lower() != 'chunked':
      return self.rfile.read(int(self.headers.get('Content-Length') or 0))
    parts = []
    while size := int(self.rfile.readline().split(b';')[0], 16):
      parts.append(self.rfile.read(size))
      self.rfile.readline()
    self.rfile.readline()
    return b''.join(parts)

  def _answer(self, status, headers, data):
    self.send_response_only(status)
    for key, value in headers:
      self.send_header(key, value)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(data)

  def _reset(self):
    # Closing with unsent data to linger for 0 s sends RST.
    linger = struct.pack('ii', 1, 0)
    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    self.close_connection = True
    self.connection.close()


@contextlib.contextmanager
def serve(upstream: str, port: int):
  """Runs a proxy in this process; yields it."""
  with Proxy(upstream, port) as proxy:
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
      yield proxy
    finally:
      proxy.shutdown()
      thread.join()

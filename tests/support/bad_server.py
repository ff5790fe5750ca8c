"""A web server on the loopback that breaks off, lies, stalls and answers nonsense.

`serving()` yields its address; a path that is a key of ANSWERS gets exactly those bytes.
"""

import contextlib
import gzip
import socketserver
import struct
import threading
import time

from tests.support import GOLDEN

WHOLE = (GOLDEN / 'vit_google_token.npz').read_bytes()


def _ok(body: bytes, *headers: str, length: int | str | None = -1) -> bytes:
  lines = ['HTTP/1.1 200 OK', 'Connection: close', *headers]
  if length is not None:
    lines.append(f'Content-Length: {len(body) if length == -1 else length}')
  return '\r\n'.join(lines).encode() + b'\r\n\r\n' + body


def _status(code: str, *headers: str) -> bytes:
  return '\r\n'.join([f'HTTP/1.1 {code}', *headers, '', '']).encode()


_PICKLE = b'\x80\x02}q\0.' + bytes(100)
_HTML = b'<!DOCTYPE html><html><body>Please log in</body></html>'

# Name -> the bytes that are sent; None: `_Handler` breaks off, or waits.
GOOD = {
  'whole': _ok(WHOLE),
  'without a length': _ok(WHOLE, length=None),
  'moved': _status('302 Found', 'Location: /whole'),
}
ANSWERS = {
  'html': _ok(_HTML, 'Content-Type: text/html'),
  'nothing': _ok(b''),
  'a pickle': _ok(_PICKLE),
  'cut, with a length': _ok(WHOLE[:9000], length=len(WHOLE)),
  'cut by one byte': _ok(WHOLE[:-1], length=None),
  'a length that is too short': _ok(WHOLE, length=1000),
  'a length of a terabyte': _ok(WHOLE, length=10**15),
  'a length that is not a number': _ok(WHOLE, length='many'),
  'compressed': _ok(gzip.compress(WHOLE), 'Content-Encoding: gzip'),
  'a part': _ok(WHOLE[:1000]).replace(b'200 OK', b'206 Partial Content'),
  'not found': _status('404 Not Found'),
  'busy': _status('503 Service Unavailable', 'Retry-After: 1'),
  'loop': _status('302 Found', 'Location: /loop'),
  'to ftp': _status('302 Found', 'Location: ftp://127.0.0.1:1/whole'),
  'to a file': _status('302 Found', 'Location: file:///etc/passwd'),
  'bad chunks': _ok(b'zz\r\nhello\r\n', 'Transfer-Encoding: chunked', length=None),
  'no status': b'\r\n\r\n',
  'a status that is not a number': b'HTTP/1.1 abc OK\r\n\r\n',
  'no answer': b'',
  'reset': None,
  'stall in the body': None,
}


class _Handler(socketserver.StreamRequestHandler):
  def handle(self):
    line = self.rfile.readline(65_537).decode('latin-1')
    while self.rfile.readline(65_537).strip():
      pass
    name = line.split(' ')[1].strip('/').partition('?')[0].replace('%20', ' ')
    name = name.replace('%2C', ',').removesuffix('.npz')
    if name == 'reset':
      self.wfile.write(_ok(WHOLE[:5000], length=len(WHOLE)))
      off = struct.pack('ii', 1, 0)  # close by a reset, not by an end
      self.connection.setsockopt(socketserver.socket.SOL_SOCKET, 13, off)
    elif name == 'stall in the body':
      self.wfile.write(_ok(WHOLE[:5000], length=len(WHOLE)))
      self.wfile.flush()
      time.sleep(3 * STALL)
    else:
      with contextlib.suppress(OSError):
        self.wfile.write((GOOD | ANSWERS)[name])


STALL = 0.3  # seconds: a client's patience has to be this


@contextlib.contextmanager
def serving():
  """Yields 'http://127.0.0.1:PORT' of a server that runs until the end of the block."""
  server = socketserver.ThreadingTCPServer(('127.0.0.1', 0), _Handler)
  server.daemon_threads = True
  threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
  try:
    yield f'http://127.0.0.1:{server.server_address[1]}'
  finally:
    server.shutdown()
    server.server_close()

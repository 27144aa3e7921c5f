"""The service behind the proxy: orders, in one file of plain Python. Every POST that reaches it makes an order."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ORDERS = []
LOCK = threading.Lock()


class Orders(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def body(self):
        """A request of any method may have one. What is left unread would be taken for the beginning of the next request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self):
        body = self.body()
        if self.path != "/orders":
            return self.answer(404, {"error": "there are only /orders"})
        try:
            order = json.loads(body)
            valid = set(order) == {"item", "cents"} and isinstance(order["item"], str)
            valid = valid and type(order["cents"]) is int and 0 <= order["cents"] <= 1_000_000
        except (ValueError, TypeError):
            valid = False
        if not valid:
            return self.answer(400, {"error": "send item, a text, and cents, a number up to 1000000"})
        with LOCK:
            ORDERS.append({**order, "key": self.headers.get("Idempotency-Key"), "fence": self.headers.get("Hapax-Fence")})
            made = {"id": len(ORDERS), **order}
        self.answer(201, made)

    def do_GET(self):
        self.body()
        if self.path == "/log":
            with LOCK:
                return self.answer(200, ORDERS)
        name = self.path.removeprefix("/orders/")
        with LOCK:
            if name.isdecimal() and name.isascii() and len(name) < 9 and 1 <= int(name) <= len(ORDERS):
                order = ORDERS[int(name) - 1]
                return self.answer(200, {"id": int(name), "item": order["item"], "cents": order["cents"]})
        self.answer(404, {"error": "there is no such order"})

    def refuse(self):
        self.body()
        self.answer(405, {"error": "there are GET and POST"}, Allow="GET, POST")

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_QUERY = refuse

    def answer(self, status, value, **headers):
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0), Orders)
    print(server.server_address[1], flush=True)
    server.serve_forever()

"""What the suite asks of its template httpbin: a request's headers, as go-httpbin tells them."""

import http.server
import json


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        headers = {}
        for name, value in self.headers.items():
            headers.setdefault("-".join(p.capitalize() for p in name.split("-")), []).append(value)
        body = json.dumps({"headers": headers}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()

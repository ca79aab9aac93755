"""A collector of OpenTelemetry's spans, which reads them by OpenTelemetry's own protocol."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """A server that keeps what is sent to it."""

    def __init__(self):
        self.requests = requests = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                requests.append(
                    ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                )
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def resources(self):
        return [each.resource for request in self.requests for each in request.resource_spans]

    @property
    def spans(self):
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def attributes(thing):
    return {
        each.key: next(getattr(each.value, kind.name) for kind, _ in each.value.ListFields())
        for each in thing.attributes
    }

"""A server that speaks OpenAI's chat protocol, in a process of its own, and does what judges do: `python judge_server.py`
prints its port. What it answers stands in the question: the last word of the form do:… in it."""

import json
import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

seen: Counter[str] = Counter()
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rules, question = (message["content"] for message in body["messages"])
        with lock:
            times = seen[question] = seen[question] + 1
        wanted = re.findall(r"do:([^\s<]+)", question)[-1]
        mark = re.search(r"VERDICT [0-9a-f]+:", rules)[0]
        match wanted.split("="):
            case ["hang"]:
                time.sleep(60)
            case ["drip"]:
                self.reply(200, "", length=1000)
                while True:
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)
            case ["status", code]:
                self.reply(int(code), "no")
            case ["recovers", code]:
                self.reply(200, chat(f"{mark} 7")) if times > 2 else self.reply(int(code), "busy")
            case ["cut"]:
                self.close_connection = True
            case ["garbage"]:
                self.reply(200, "<html>")
            case ["empty"]:
                self.reply(200, json.dumps({"choices": []}))
            case ["say", text]:
                self.reply(200, chat(text.replace("_", " ").replace("|", "\n").replace("MARK", mark)))
            case ["count"]:
                self.reply(200, chat(f"{mark} {times}"))
            case ["uncounted"]:
                self.reply(200, chat(f"{mark} 7", usage=None))
            case ["echo"]:
                self.reply(200, chat(f"{question}\n{mark} 3"))
            case ["key"]:
                self.reply(200, chat(f"{mark} {10 if self.headers['Authorization'] == 'Bearer sesame' else 0}"))
            case ["likes", word]:  # the answer that has the word; if both have, the first
                first, second = question.split("<second")
                liked = "FIRST" if word in first.split("<first")[1] else "SECOND" if word in second else "TIE"
                self.reply(200, chat(f"{mark} {liked}"))

    def reply(self, code: int, text: str, length: int | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(length or len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None: ...


def chat(text: str, usage: object = {"prompt_tokens": 1000, "completion_tokens": 10}) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage})


class Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *args: object) -> None: ...  # callers that left


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown()), daemon=True).start()
        server.serve_forever()

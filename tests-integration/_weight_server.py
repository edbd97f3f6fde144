"""An inference server of its own process: FOLDER [FAULT ROUTE NTH]; FOLDER has the configuration of its model.

Holds a Transformers model in float32, answers the routes of vLLM's weight transfer, and two more: `generate` continues
prompts greedily, `digests` tells the SHA-256 of each weight and how many updates there were. Prints its port. Ends with
its standard input. FAULT is what happens at call NTH of ROUTE: `die` ends the process, `halt` stops it as SIGSTOP does,
`silence` never answers, `error` answers 500.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zero_comm import WeightReceiver


class Inference:
    """The model, its receiver, and what the routes do with them."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        self.parameters = dict(self.model.named_parameters())
        self.receiver = WeightReceiver(self.load)
        self.updates = 0

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, value in weights:
                self.parameters[name].copy_(value)

    def init_weight_transfer_engine(self, asked: dict[str, Any]) -> Any:
        self.receiver.init_weight_transfer_engine(asked["init_info"])

    def start_weight_update(self, asked: dict[str, Any]) -> Any:
        self.receiver.start_weight_update()

    def update_weights(self, asked: dict[str, Any]) -> Any:
        self.receiver.update_weights(asked["update_info"])

    def finish_weight_update(self, asked: dict[str, Any]) -> Any:
        self.receiver.finish_weight_update()
        self.updates += 1

    def generate(self, asked: dict[str, Any]) -> Any:
        completions = []
        for prompt in asked["prompts"]:
            tokens = torch.tensor([prompt])
            with torch.no_grad():
                for _ in range(asked["max_tokens"]):
                    logits = self.model(input_ids=tokens).logits[0, -1]
                    tokens = torch.cat([tokens, self.choose(logits, asked).view(1, 1)], dim=1)
            completions.append(tokens[0, len(prompt) :].tolist())
        return {"completions": completions, "updates": self.updates}

    def choose(self, logits: torch.Tensor, asked: dict[str, Any]) -> torch.Tensor:
        return torch.multinomial(logits.softmax(-1), 1) if asked["samples"] else logits.argmax()

    def digests(self, asked: dict[str, Any]) -> Any:
        weights = {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in self.parameters.items()}
        return {"weights": weights, "updates": self.updates}


class Fault:
    """What goes wrong, and when."""

    def __init__(self, fault: str = "", route: str = "", nth: str = "0") -> None:
        self._fault, self._route, self._left = fault, route, int(nth)
        self.over = threading.Event()

    def happen(self, route: str) -> None:
        if route != self._route:
            return
        self._left -= 1
        if self._left == 0:
            if self._fault == "die":
                os._exit(9)
            if self._fault == "halt":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self._fault == "silence":
                self.over.wait()
            raise RuntimeError("out of memory while loading")


def serve(inference: Inference, fault: Fault) -> None:
    """Answer requests until standard input ends."""
    alone = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                fault.happen(self.path.strip("/"))
                with alone:
                    status, answer = 200, getattr(inference, self.path.strip("/"))(content)
            except Exception as error:
                status, answer = 500, f"{type(error).__name__}: {error}"
            told = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    fault.over.set()
    server.shutdown()


if __name__ == "__main__":
    torch.manual_seed(99)
    serve(Inference(sys.argv[1]), Fault(*sys.argv[2:]))

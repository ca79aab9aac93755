"""What stands in for SGLang's server, which needs a GPU: the requests and answers that SGLang documents, on transformers.

python tests/sglang_server.py MODEL [--incremental] --host 127.0.0.1 --port PORT
"""

import argparse
import asyncio
import json

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import AutoModelForCausalLM, DynamicCache

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--incremental", action="store_true", help="tell what is new, not all there is")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
options = parser.parse_args()

app = FastAPI()
served = {"path": options.model, "version": "default", "running": 0}
idle = asyncio.Event()
idle.set()
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)


@app.get("/health")
async def health():
    return {}


@app.get("/v1/models")
async def models():
    return {"data": [{"id": served["path"], "max_model_len": model.config.max_position_embeddings}]}


@app.get("/get_model_info")
async def model_info():
    return {"model_path": served["path"], "weight_version": served["version"]}


@app.post("/update_weights_from_disk")
async def update(body: dict):
    await idle.wait()  # it takes weights when nothing runs
    try:
        fresh = AutoModelForCausalLM.from_pretrained(body["model_path"], dtype=torch.float32)
        model.load_state_dict(fresh.state_dict())
    except (OSError, RuntimeError) as error:
        return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
    served.update(path=body["model_path"], version=body["weight_version"])
    return {"success": True, "message": "", "num_paused_requests": 0}


def sampled(tokens, cache, sampling, top):
    """The next token: [log-prob, id, None], and the same of the likeliest."""
    with torch.no_grad():
        new = tokens[cache.get_seq_length() :]
        logits = model(torch.tensor([new]), past_key_values=cache).logits[0, -1]
    generator = torch.Generator().manual_seed(sampling["sampling_seed"] + len(tokens))
    logprobs = torch.log_softmax(logits / (sampling["temperature"] or 1.0), -1)
    token = int(
        logprobs.argmax() if not sampling["temperature"] else logprobs.exp().multinomial(1, generator=generator)
    )
    values, places = logprobs.topk(max(top, 1))
    likeliest = [[value, place, None] for value, place in zip(values.tolist(), places.tolist(), strict=True)]
    return [float(logprobs[token]), token, None], likeliest[:top]


async def said(body, request):
    """What there is after each token: all of it, or what is new."""
    tokens, sampling = list(body["input_ids"]), body["sampling_params"]
    pairs, tops, finish, cache = [], [], None, DynamicCache(config=model.config)
    top = body.get("top_logprobs_num", 0)
    served["running"] += 1
    idle.clear()
    try:
        while finish is None and not await request.is_disconnected():
            pair, likeliest = await asyncio.to_thread(sampled, tokens, cache, sampling, top)
            pairs.append(pair)
            tops.append(likeliest)
            tokens.append(pair[1])
            if pair[1] in sampling["stop_token_ids"]:
                finish = {"type": "stop", "matched": pair[1]}
            elif len(pairs) == sampling["max_new_tokens"]:
                finish = {"type": "length", "length": len(pairs)}
            told = pairs[-1:] if options.incremental else pairs
            about = {"finish_reason": finish, "completion_tokens": len(pairs), "weight_version": served["version"]}
            about |= {"output_token_logprobs": told} if body["return_logprob"] else {}
            yield {
                "text": "",
                "output_ids": [each[1] for each in told],
                "meta_info": about | {"output_top_logprobs": tops},
            }
    finally:
        served["running"] -= 1
        if not served["running"]:
            idle.set()


@app.post("/generate")
async def generate(body: dict, request: Request):
    if not body["stream"]:
        return [piece async for piece in said(body, request)][-1]

    async def lines():
        async for piece in said(body, request):
            yield f"data: {json.dumps(piece)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvicorn.run(app, host=options.host, port=options.port)

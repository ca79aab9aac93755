"""ROCK's own programs (rl-rock 1.11) at either end of the log file: its model service, and its client."""

import asyncio
import base64
import json
import socket

import pytest

from antiphon.core.types import FinishReason
from antiphon.rollout.log_file import model_service
from tests.system.test_log_file_agents import ASK, MARKED
from tests.unit.rollout.gateway_support import TEMPLATES, Logger, make, model
from tests.unit.rollout.log_file_support import play_here, start_here

OTHER_MARKS = MARKED.replace("SESSION_END", "REQUEST")  # ROCK's service ends at any line with this marker


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat"), TEMPLATES["plain"])


AGENT = """
said = [ask({marks!r}), ask("large" * 40_000) == "b" * 100_000]
answers = {{}}
def work(number):
    answers[number] = ask(f"{{number}}=")
threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps([*said, sorted(answers.values())]))
"""


def test_the_model_service_of_rock_is_answered(renderer, tmp_path, rock_python):
    """The agent starts it, as one whose image has it would; its log file is the one that is read here."""
    (tmp_path / "agent.py").write_text(ASK + AGENT.format(marks=OTHER_MARKS))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = f"""
        cd {tmp_path}
        rock() {{ {rock_python} -c 'from rock.cli.main import main; main()' model-service "$@" > rock.txt 2>&1; }}
        rock start --type local --host 127.0.0.1 --port {port} || {{ cat rock.txt; exit 9; }}
        trap 'rock stop' EXIT
        OPENAI_BASE_URL=http://127.0.0.1:{port}/v1 python3 agent.py
    """
    engine = Logger(renderer, (MARKED, FinishReason.STOP), ("b" * 100_000, FinishReason.STOP))
    code, output, captured = asyncio.run(play_here(command, tmp_path, model(renderer, engine, max_length=1 << 20)))
    assert code == 0, output
    assert json.loads(output["stdout"]) == [MARKED, True, ["ok"] * 6]
    first = captured.segments[0]
    assert renderer.decode(first.tokens[first.loss_mask]) == MARKED
    assert captured.counts.turns == 8 == len(engine.log)
    lines = (tmp_path / model_service.LOG).read_text().splitlines()
    indices = [
        json.loads(line.rpartition("LLM_REQUEST_END")[2])["index"] for line in lines if "LLM_REQUEST_START{" in line
    ]
    assert sorted(indices) == [*range(1, 9)]


CLIENT = """
import asyncio, json, sys
from rock.sdk.model.client import ModelClient

async def main():
    client, index, requests, response = ModelClient(sys.argv[1]), 0, [], None
    while (request := await client.anti_call_llm(index, response)) != "SESSION_END":
        index += 1
        requests.append(json.loads(request)["messages"][0]["content"])
        message = {"role": "assistant", "content": f"answer {index}"}
        response = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    print(json.dumps(requests))

asyncio.run(main())
"""


def test_the_client_of_rock_is_served(tmp_path, rock_python):
    (tmp_path / "agent.py").write_text(f"{ASK}\nprint([ask(text) for text in ({MARKED!r}, 'b' * 200_000, 'c')])")

    async def run():
        box = await start_here(f"python3 {tmp_path}/agent.py", tmp_path)
        client = await box.sandbox.execute([rock_python, "-c", CLIENT, f"{tmp_path}/{model_service.LOG}"], 0)
        return client, await box.query("output")

    client, output = asyncio.run(run())
    assert client.exit_code == 0, client.stderr
    assert json.loads(client.stdout.splitlines()[-1]) == [MARKED, "b" * 200_000, "c"]
    assert base64.b64decode(output["stdout"]).decode() == "['answer 1', 'answer 2', 'answer 3']\n"

"""docs/http-api.md: its commands work, and it names every route."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
from enginecore.server.app import ROUTES
from enginecore.server.args import ServerArgs

from tests.server.fake_engine import Running, running, saying
from tests.server.fake_pooling import CLASSIFIER, pooling_server
from tests.server.test_account import BLOCKS
from tests.server.test_pins import TOLD

TEXT = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
VALUES = {"$H": "authorization: Bearer secret", "$J": "content-type: application/json", "$U": ""}


def commands() -> list[list[str]]:
    """The arguments of every curl in the page's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    found = []
    for line in lines:
        start = line.find("curl ")
        if start >= 0:
            command = line[start:].split(" | sed")[0]
            found.append(shlex.split(command)[1:])
    return found


async def call(server: Running, arguments: list[str], response_id: str) -> httpx.Response:
    method, url, headers, body = "GET", "", {}, None
    words = iter(arguments)
    for word in words:
        for name, value in {**VALUES, "$ID": response_id}.items():
            word = word.replace(name, value)
        if word == "-H":
            header = next(words)
            name, _, value = VALUES.get(header, header).partition(": ")
            headers[name] = value
        elif word == "-d":
            method, body = "POST", next(words)
        elif word == "-X":
            method = next(words)
        elif word != "-s":
            url = word
    return await server.http.request(method, url, headers=headers, content=body)


async def test_every_command_works() -> None:
    args = ServerArgs(api_keys=("app:secret",))
    async with (
        running(saying("hello"), args=args, max_model_len=512, served_model_name="m", vocab_size=49152) as server,
        pooling_server(args=args, served_model_name="e") as embedder,
        pooling_server(CLASSIFIER, args=args, served_model_name="c") as classifier,
    ):
        server.engine.answers |= {"memory": BLOCKS, "pin": TOLD, "list_pins": [TOLD], "explain": [{}]}
        found, response_id = commands(), ""
        assert len(found) > 25
        for arguments in found:
            if "/detokenize" in "".join(arguments):
                continue  # ids of another tokenizer
            path = "".join(arguments)
            asked = classifier if "/classify" in path else embedder if '"model": "e"' in path else server
            reply = await call(asked, arguments, response_id)
            assert reply.status_code == 200, (arguments, reply.text)
            if '"background": true' in "".join(arguments):
                response_id = reply.json()["id"]
                while server.app.state.in_flight:
                    await asyncio.sleep(0.001)
            if arguments[-1].startswith("{"):
                json.loads(reply.text)


def test_every_route_is_named() -> None:
    for _, path, _ in ROUTES:
        shown: Any = re.sub(r"\{model:path\}", "NAME", path)
        shown = re.sub(r"\{[^}]*\}", "ID", shown)
        tail = shown.rpartition("/ID/")[2]
        assert shown in TEXT or f"/{tail}" in TEXT, path

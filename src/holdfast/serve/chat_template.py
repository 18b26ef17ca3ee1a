"""The chat template of a model: found in its folder, rendered in a process of its own with limits of time and size."""

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from holdfast.serve.api_errors import ApiError, invalid
from holdfast.system.bounded_files import read_bounded, read_json
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

MAX_TEMPLATE_BYTES = 256 << 10
MAX_CONFIG_BYTES = 64 << 20
RENDER_SECONDS = 5.0
LINE_BYTES = 32 << 20
"""Longest answer line of the rendering process: its text limit, escaped."""


def find_template(folders: Iterable[Path]) -> str | None:
    """The template in chat_template.jinja or tokenizer_config.json of the first folder that has one."""
    for folder in folders:
        file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        found: Any = None
        if file.is_file():
            found = read_bounded(file, MAX_TEMPLATE_BYTES, "chat template").decode("utf-8", "replace")
        elif config.is_file():
            found = read_json(config, MAX_CONFIG_BYTES, "tokenizer_config.json").get("chat_template")
        if isinstance(found, list):  # several templates with names
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        if isinstance(found, str):
            if len(found.encode()) > MAX_TEMPLATE_BYTES:
                raise HoldfastError(f"the chat template in {folder} is larger than {MAX_TEMPLATE_BYTES >> 10} KiB")
            return found
    return None


class ChatTemplate:
    """Renders messages to a prompt. One rendering at a time; a process that takes too long is ended and started again."""

    def __init__(self, template: str, variables: Mapping[str, str]) -> None:
        self._setup = orjson.dumps({"template": template, "variables": dict(variables)}) + b"\n"
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        variables = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
        line = orjson.dumps(variables) + b"\n"
        async with self._lock:
            try:
                async with asyncio.timeout(RENDER_SECONDS):
                    answer = orjson.loads(await self._ask(line))
            except (TimeoutError, OSError, ValueError, orjson.JSONDecodeError):
                await self.close()
                log("the chat template exceeded its limit of time or memory; its process was killed")
                raise ApiError(422, "the model's chat template exceeds its limits", code="chat_template") from None
            except BaseException:
                await self.close()  # its answer would be read by the next request
                raise
        if "error" in answer:
            raise invalid(f"the model's chat template refuses these messages: {answer['error']}", "messages")
        return str(answer["text"])

    async def _ask(self, line: bytes) -> bytes:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "holdfast.serve.template_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
            )
            line = self._setup + line
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line)
        await self._process.stdin.drain()
        return await self._process.stdout.readline()

    async def close(self) -> None:
        """Ends the rendering process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None
